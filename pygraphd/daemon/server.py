"""HTTP over the daemon's Unix socket: routes, admission of peers, and error answers.

Knows nothing of processes, locks or SQL: see `process` and `cache`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import web

from pygraphd.daemon import metrics
from pygraphd.daemon.connections import Connection, Connections, Limits, Listener, error_body
from pygraphd.daemon.peer import why_refused
from pygraphd.daemon.store import DiskFullError, StoreError
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.messages import (
    API_VERSION,
    IMPORT_PATH,
    LEASE_PATH,
    LOOKUP_PATH,
    MAX_BODY_BYTES,
    RECORD_PATH,
    REDERIVE_PATH,
    Ping,
    encode,
)
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from pygraphd.config import Config
    from pygraphd.daemon.cache import Cache
    from pygraphd.daemon.peer import Peer

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)

CAPABILITIES = ("lookup", "record", "lease", "stats", "prune", "rederive", "import")
_SHUTDOWN_S = 5.0


class Server:
    """The request handlers, and the time of the last request of a client."""

    def __init__(self, cache: Cache, config: Config, limits: Limits | None = None) -> None:
        self._cache = cache
        self.config = config
        self.metrics_port = metrics.Port(self._metrics_listener)
        self._connections = Connections(limits or Limits(), self._count_invalid)
        self._started = time.monotonic()
        self._started_at = time.time()
        self.last_used = self._started
        """`time.monotonic()` of the last request but pings and statistics, which keep no daemon alive."""

    def listener(self) -> Listener:
        """Return what accepts connections for these handlers."""
        return Listener(self._application(), self._connections, _SHUTDOWN_S)

    def _application(self) -> web.Application:
        application = web.Application(
            middlewares=[self._answer_errors, self._admit], client_max_size=MAX_BODY_BYTES
        )
        application.add_routes(
            [
                web.get("/v1/ping", self._ping),
                web.post(LOOKUP_PATH, self._lookup),
                web.post(RECORD_PATH, self._record),
                web.post(LEASE_PATH, self._lease),
                web.get("/v1/stats", self._stats),
                web.post("/v1/stats/zero", self._zero_stats),
                web.post("/v1/prune", self._prune),
                web.post(REDERIVE_PATH, self._rederive),
                web.post(IMPORT_PATH, self._import),
                web.get(metrics.PATH, self._metrics),
            ]
        )
        return application

    def _metrics_listener(self) -> Listener:
        """Return what accepts connections of anybody on this host: it serves numbers only, and few at a time."""
        application = web.Application(middlewares=[self._answer_errors])
        application.add_routes([web.get(metrics.PATH, self._metrics)])
        return Listener(application, self._connections, _SHUTDOWN_S)

    @web.middleware
    async def _answer_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn every error into JSON with a reason, and count it."""
        counters = self._cache.counters
        try:
            return await handler(request)
        except InvalidMessageError as error:
            counters.invalid += 1
            _log.warning("%s refused: %s", request.path, error)
            return _error(HTTPStatus.BAD_REQUEST, str(error))
        except web.HTTPException as error:
            counters.invalid += 1
            return _error(error.status, error.text or error.reason)
        except ConnectionResetError:
            # The client hung up in the middle of its request, as one with a deadline may.
            counters.invalid += 1
            return _error(HTTPStatus.BAD_REQUEST, "the request ended early")
        except web.RequestPayloadError as error:
            counters.invalid += 1
            return _error(HTTPStatus.BAD_REQUEST, f"the body is not what its headers say: {error}")
        except DiskFullError as error:
            counters.failed += 1
            return _error(HTTPStatus.INSUFFICIENT_STORAGE, str(error))
        except StoreError as error:
            counters.failed += 1
            return _error(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        except Exception:  # noqa: BLE001 - one request's fault must not take the others' daemon with it
            counters.failed += 1
            _log.exception("%s %s", request.method, request.path)
            return _error(HTTPStatus.INTERNAL_SERVER_ERROR, "an error in pygraphd; its log says more")

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Admit requests of our own user and of root only."""
        connection = _connection(request)
        self._connections.used(connection)
        if connection.is_gone:
            # Under load the others would wait for it, and a record would be stored that its client has left in the spool.
            raise ConnectionResetError("the client is gone")
        if reason := why_refused(connection.peer):
            self._cache.counters.refused += 1
            _log.warning("%s refused: %s", request.path, reason)
            return _error(HTTPStatus.FORBIDDEN, reason)
        return await handler(request)

    async def _body(self, request: web.Request) -> bytes:
        """Return the body; raises ConnectionResetError if it was cut off, HTTPRequestTimeout if it does not come in time."""
        limit_s = self._connections.limits.request_s
        try:
            async with asyncio.timeout(limit_s):
                body = await request.read()
        except TimeoutError as error:
            raise web.HTTPRequestTimeout(text=f"the body did not come within {limit_s:g} s") from error
        if _connection(request).cut_body is request.content:
            raise ConnectionResetError("the client has closed its half")
        return body

    def _count_invalid(self) -> None:
        self._cache.counters.invalid += 1

    def _note_use(self, request: web.Request) -> None:
        self.last_used = time.monotonic()
        self._cache.processes.note(_peer(request))

    async def _ping(self, _request: web.Request) -> web.Response:
        return _json(encode(Ping("pygraphd", VERSION, API_VERSION, os.getpid(), CAPABILITIES)))

    async def _lookup(self, request: web.Request) -> web.Response:
        self._note_use(request)
        return _json(encode(await self._cache.lookup(await self._body(request))))

    async def _record(self, request: web.Request) -> web.Response:
        self._note_use(request)
        return _json(encode(await self._cache.record(await self._body(request), _peer(request))))

    async def _lease(self, request: web.Request) -> web.Response:
        self._note_use(request)
        return _json(encode(self._cache.lease(await self._body(request), _peer(request))))

    async def _prune(self, request: web.Request) -> web.Response:
        self.last_used = time.monotonic()
        answer = await self._cache.prune(await self._body(request))
        return _json(json.dumps(answer.as_json()).encode())

    async def _rederive(self, request: web.Request) -> web.Response:
        self.last_used = time.monotonic()
        answer = await self._cache.rederive(await self._body(request))
        return _json(json.dumps(answer.as_json()).encode())

    async def _import(self, request: web.Request) -> web.Response:
        self.last_used = time.monotonic()
        answer = await self._cache.add_imported(await self._body(request), _peer(request))
        return _json(json.dumps(answer.as_json()).encode())

    async def _stats(self, _request: web.Request) -> web.Response:
        entries, problems = await self._describe()
        ever = await self._cache.statistics()
        processes, left_out = self._cache.processes.describe()
        stats = {
            "schema": 1,
            "since": self._cache.counted_since,
            "since_ever": None if ever is None else ever.as_json(),
            "version": VERSION,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "entries": entries,
            "shipped": len(self._cache.shipped.known),
            "problems": problems,
            "settings": self.config.settings(),
            "team": None if (team := self._cache.team.state()) is None else team.as_json(),
            "processes": processes,
            "processes_left_out": left_out,
            **dataclasses.asdict(self._cache.counters),
        }
        return _json(json.dumps(stats).encode())

    async def _metrics(self, request: web.Request) -> web.Response:
        self._connections.used(_connection(request))
        entries, problems = await self._describe()
        size = await self._cache.size()
        state = metrics.State(
            VERSION,
            self._started_at,
            entries,
            size,
            len(problems),
            self._cache.counters,
            self._cache.team.state(),
        )
        return metrics.response(state)

    async def _describe(self) -> tuple[int | None, list[str]]:
        entries, problems = await self._cache.describe()
        port = self.metrics_port.problem
        return entries, [*problems, port] if port else problems

    async def _zero_stats(self, _request: web.Request) -> web.Response:
        await self._cache.zero_statistics()
        return _json(b'{"schema": 1}')


def _connection(request: web.Request) -> Connection:
    connection = request.protocol
    assert isinstance(connection, Connection)
    return connection


def _peer(request: web.Request) -> Peer:
    return _connection(request).peer


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _error(status: int, reason: str) -> web.Response:
    return web.Response(status=status, body=error_body(reason), content_type="application/json")
