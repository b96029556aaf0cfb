"""HTTP over the daemon's Unix socket: routes, admission of peers, and error answers.

Knows nothing of processes, locks or SQL: see `process` and `cache`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import time
from http import HTTPStatus
from typing import TYPE_CHECKING

from pygraphd.daemon import metrics
from pygraphd.daemon.connections import Connections, Limits, Listener, Service
from pygraphd.daemon.http import Response, error
from pygraphd.daemon.peer import why_refused
from pygraphd.daemon.store import DiskFullError, EndingError, StoreError
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.messages import (
    API_VERSION,
    DATABASE_CAUSE,
    IMPORT_PATH,
    LEASE_PATH,
    LOOKUP_PATH,
    RECORD_PATH,
    REDERIVE_PATH,
    SIZES_PATH,
    Ping,
    encode,
)
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pygraphd.config import Config
    from pygraphd.daemon.cache import Cache
    from pygraphd.daemon.connections import Request
    from pygraphd.daemon.peer import Peer

    Handler = Callable[[Request], Awaitable[Response]]

_log = logging.getLogger(__name__)

CAPABILITIES = ("lookup", "sizes", "record", "lease", "stats", "prune", "rederive", "import")
# Within the time after which the kernel ends the daemon: hit counts and statistics are yet to be written.
_SHUTDOWN_S = 5.0


class Server:
    """The request handlers, and the time of the last request of a client."""

    def __init__(self, cache: Cache, config: Config, limits: Limits | None = None) -> None:
        self._cache = cache
        self.log_problems: Callable[[], list[str]] = list
        """What is wrong with the log, for `pygraphd status`."""
        self.config = config
        self.metrics_port = metrics.Port(self._metrics_listener)
        self._connections = Connections(limits or Limits())
        self._started = time.monotonic()
        self._started_at = time.time()
        self.last_used = self._started
        """`time.monotonic()` of the last request but pings and statistics, which keep no daemon alive."""

    def listener(self) -> Listener:
        """Return what accepts connections for these handlers; called on the event loop."""
        handlers: dict[str, tuple[str, Handler]] = {
            "/v1/ping": ("GET", self._ping),
            LOOKUP_PATH: ("POST", self._lookup),
            SIZES_PATH: ("POST", self._sizes),
            RECORD_PATH: ("POST", self._record),
            LEASE_PATH: ("POST", self._lease),
            "/v1/stats": ("GET", self._stats),
            "/v1/stats/zero": ("POST", self._zero_stats),
            "/v1/prune": ("POST", self._prune),
            REDERIVE_PATH: ("POST", self._rederive),
            IMPORT_PATH: ("POST", self._import),
            metrics.PATH: ("GET", self._metrics),
        }
        return self._listener(handlers, self._answer_at_once, self._why_refused)

    def _metrics_listener(self) -> Listener:
        """Return what accepts connections of anybody on this host: it serves numbers only, and few at a time."""
        # The kernel has no credentials for TCP. Such connections count as strangers', and share their limit.
        handlers: dict[str, tuple[str, Handler]] = {metrics.PATH: ("GET", self._metrics)}
        return self._listener(handlers, lambda _request: None, lambda _peer: None)

    def _listener(
        self,
        handlers: dict[str, tuple[str, Handler]],
        at_once: Callable[[Request], Response | None],
        why_not: Callable[[Peer], str | None],
    ) -> Listener:
        service = Service(
            functools.partial(self._refuse, handlers, why_not),
            at_once,
            functools.partial(self._answer, handlers),
            self._count_invalid,
        )
        return Listener(service, self._connections, _SHUTDOWN_S)

    def _refuse(
        self,
        handlers: dict[str, tuple[str, Handler]],
        why_not: Callable[[Peer], str | None],
        method: str,
        path: str,
        peer: Peer,
    ) -> Response | None:
        """Return the answer to a request that needs no look at its body."""
        # By the head alone: the megabytes of a stranger's body are never kept.
        if reason := why_not(peer):
            self._cache.counters.refused += 1
            _log.warning("%s refused: %s", path, reason)
            return error(HTTPStatus.FORBIDDEN, reason)
        known = handlers.get(path)
        if known is not None and known[0] == method:
            return None
        self._count_invalid()
        status = HTTPStatus.NOT_FOUND if known is None else HTTPStatus.METHOD_NOT_ALLOWED
        return error(status, status.phrase)

    @staticmethod
    def _why_refused(peer: Peer) -> str | None:
        return why_refused(peer)

    async def _answer(self, handlers: dict[str, tuple[str, Handler]], request: Request) -> Response:
        """Answer a request; an error becomes JSON with a reason, and is counted."""
        if request.is_gone:
            return self._gone()
        try:
            return await handlers[request.path][1](request)
        except Exception as problem:  # noqa: BLE001 - one request's fault must not take the others' daemon with it
            return self._error(request, problem)

    def _answer_at_once(self, request: Request) -> Response | None:
        """Answer a lookup that nothing has to be waited for, which nearly all requests are; else return None."""
        # A stranger's request takes the long way, which counts and refuses it.
        if (request.path, request.method) != (LOOKUP_PATH, "POST") or why_refused(request.peer):
            return None
        if request.is_gone:
            return self._gone()
        try:
            body = self._cache.lookup_at_once(request.body)
        except Exception as problem:  # noqa: BLE001
            return self._error(request, problem)
        if body is None:
            return None
        self._note_use(request.peer)
        return Response(body)

    def _error(self, request: Request, problem: Exception) -> Response:
        counters = self._cache.counters
        if isinstance(problem, InvalidMessageError):
            counters.invalid += 1
            _log.warning("%s refused: %s", request.path, problem)
            return error(HTTPStatus.BAD_REQUEST, str(problem))
        counters.failed += 1
        # No line in the log: the store writes one when the fault begins, and not for each record.
        if isinstance(problem, DiskFullError):
            return error(HTTPStatus.INSUFFICIENT_STORAGE, str(problem), DATABASE_CAUSE)
        if isinstance(problem, StoreError):
            cause = "" if isinstance(problem, EndingError) else DATABASE_CAUSE
            return error(HTTPStatus.SERVICE_UNAVAILABLE, str(problem), cause)
        _log.error("%s %s", request.method, request.path, exc_info=problem)
        return error(HTTPStatus.INTERNAL_SERVER_ERROR, "an error in pygraphd; its log says more")

    def _gone(self) -> Response:
        # Under load the others would wait for it, and a record would be stored that its client has left in the spool.
        self._count_invalid()
        return error(HTTPStatus.BAD_REQUEST, "the client is gone")

    def _count_invalid(self) -> None:
        self._cache.counters.invalid += 1

    def _note_use(self, peer: Peer) -> None:
        self.last_used = time.monotonic()
        self._cache.processes.note(peer)

    async def _ping(self, _request: Request) -> Response:
        return Response(encode(Ping("pygraphd", VERSION, API_VERSION, os.getpid(), CAPABILITIES)))

    async def _lookup(self, request: Request) -> Response:
        self._note_use(request.peer)
        return Response(await self._cache.lookup(request.body))

    async def _sizes(self, request: Request) -> Response:
        self._note_use(request.peer)
        return Response(encode(await self._cache.sizes(request.body)))

    async def _record(self, request: Request) -> Response:
        self._note_use(request.peer)
        return Response(encode(await self._cache.record(request.body, request.peer)))

    async def _lease(self, request: Request) -> Response:
        self._note_use(request.peer)
        return Response(encode(self._cache.lease(request.body, request.peer)))

    async def _prune(self, request: Request) -> Response:
        # A command keeps the daemon alive, but measures nothing, so it is no process to be listed.
        self.last_used = time.monotonic()
        return _json((await self._cache.prune(request.body)).as_json())

    async def _rederive(self, request: Request) -> Response:
        self.last_used = time.monotonic()
        return _json((await self._cache.rederive(request.body)).as_json())

    async def _import(self, request: Request) -> Response:
        self.last_used = time.monotonic()
        return _json((await self._cache.add_imported(request.body, request.peer)).as_json())

    async def _stats(self, _request: Request) -> Response:
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
        return _json(stats)

    async def _metrics(self, _request: Request) -> Response:
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
        return entries, [*problems, *([port] if port else []), *self.log_problems()]

    async def _zero_stats(self, _request: Request) -> Response:
        await self._cache.zero_statistics()
        return _json({"schema": 1})


def _json(values: Mapping[str, object]) -> Response:
    return Response(json.dumps(values).encode())
