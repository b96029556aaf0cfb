"""The connections of the daemon's socket: their number, their idle time, and the end of one half.

A connection costs a descriptor, and whoever may connect could take all of them. Each user has a limit; at the limit a new
connection ends the one that has been idle longest.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import resource
import select
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING

from aiohttp import StreamReader, web

from pygraphd.daemon.peer import Peer, peer_of, why_refused

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_log = logging.getLogger(__name__)

_BACKLOG = 512
_FILES = 4096
_OTHER_FILES = 64
"""Descriptors kept for the database, the log and the spool."""
_STRANGERS = 16
"""Connections of all users together who are refused anyway."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of connections: their number for each user, and seconds.

    `idle_s`: without a request. `request_s`: from a request's head to the end of its body, and from an answer that the
    client does not take to the end of the connection.
    """

    connections: int = 1024
    idle_s: float = 30.0
    request_s: float = 10.0


def limits_of_process() -> Limits:
    """Raise the soft limit of open files as far as needed and allowed; return limits that fit into it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft == resource.RLIM_INFINITY:
        return Limits()
    # Two users are served: ours and root.
    return Limits(connections=max(min(Limits().connections, (soft - _OTHER_FILES - _STRANGERS) // 2), 1))


class Connection(web.RequestHandler):
    """One client's connection. `cut_body`: the body of a request whose client closed its half before the end of it."""

    __slots__ = ("_abort", "_body", "_table", "cut_body", "peer")

    def __init__(self, server: web.Server, table: Connections) -> None:
        limits = table.limits
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type] # none, as the runner passes it
            tcp_keepalive=False,
            keepalive_timeout=limits.idle_s,
            lingering_time=min(limits.request_s, 10.0),
        )
        self._table = table
        self._abort: asyncio.TimerHandle | None = None
        self._body: StreamReader | None = None
        self.cut_body: StreamReader | None = None
        self.peer = Peer(0, 0)

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, be it for the first or for the next one."""
        return self._waiter is not None and not self._waiter.done()

    @property
    def is_gone(self) -> bool:
        """Whether the client has closed both halves, as one whose deadline has passed does: nobody takes an answer."""
        if self.transport is None:
            return True
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the peer's credentials, and count the connection; refuse it if there are too many."""
        super().connection_made(transport)
        self.peer = peer_of(transport.get_extra_info("socket"))
        if not self._table.admit(self):
            assert self.transport is not None
            self.transport.write(_TOO_MANY)
            self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Forget the connection."""
        self._table.forget(self)
        if self._abort is not None:
            self._abort.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and note the body that is about to come."""
        super().data_received(data)
        if self._messages:
            self._body = self._messages[-1][1]

    def eof_received(self) -> bool | None:  # type: ignore[override] # asyncio takes a result, which aiohttp's lacks
        """Keep our half open for the answer if a request is being served; else close the connection."""
        if self.is_idle:
            return None
        if self._body is not None and not self._body.is_eof():
            # No exception: aiohttp, too, waits for the end of a body that no handler has read.
            self.cut_body = self._body
            self._body.feed_eof()
        self.close()
        return True

    def pause_writing(self) -> None:
        """Give a client some time to take its answer."""
        super().pause_writing()
        transport = self.transport
        if isinstance(transport, asyncio.Transport):
            loop = asyncio.get_running_loop()
            self._abort = loop.call_later(self._table.limits.request_s, transport.abort)

    def resume_writing(self) -> None:
        """Note that the client takes its answer."""
        if self._abort is not None:
            self._abort.cancel()
            self._abort = None
        super().resume_writing()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what is not HTTP, in the form of all errors, and log it in one line."""
        reason = " ".join((message or str(exc) or HTTPStatus(status).phrase).split())[:200]
        _log.warning("not served, status %d: %s", status, reason)
        self._table.count_invalid()
        if request.writer.output_size > 0:
            raise ConnectionError("a part of the answer has been sent already")
        response = web.Response(status=status, body=error_body(reason), content_type="application/json")
        response.force_close()
        return response


class Connections:
    """All open connections, by user, in the order in which they were last used."""

    def __init__(self, limits: Limits, count_invalid: Callable[[], None]) -> None:
        self.limits = limits
        self.count_invalid = count_invalid
        self._open: dict[int | None, dict[Connection, None]] = {}

    def admit(self, connection: Connection) -> bool:
        """Count a connection; return whether there was room, or an idle one of its user that could be ended."""
        group, most = self._group(connection)
        if len(group) >= most:
            idle = next((each for each in group if each.is_idle), None)
            if idle is None:
                _log.warning("uid %d has %d connections, and no more are served", connection.peer.uid, most)
                return False
            del group[idle]
            idle.force_close()
        group[connection] = None
        return True

    def used(self, connection: Connection) -> None:
        """Note that a request came in, so that this connection is not the next to be ended."""
        group, _most = self._group(connection)
        if connection in group:
            del group[connection]
            group[connection] = None

    def forget(self, connection: Connection) -> None:
        """Drop a connection that has been closed."""
        self._group(connection)[0].pop(connection, None)

    def _group(self, connection: Connection) -> tuple[dict[Connection, None], int]:
        peer = connection.peer
        refused = why_refused(peer) is not None
        most = _STRANGERS if refused else self.limits.connections
        return self._open.setdefault(None if refused else peer.uid, {}), most


def error_body(reason: str) -> bytes:
    """Return the body of every answer that is no success."""
    return json.dumps({"error": reason}).encode()


def _raw_answer(status: HTTPStatus, reason: str) -> bytes:
    body = error_body(reason)
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


_TOO_MANY = _raw_answer(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections of this user")


class Listener:
    """Accepts connections for an application, from `listen` to `close`."""

    def __init__(self, application: web.Application, table: Connections, end_s: float) -> None:
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=end_s)
        self._table = table
        self._listening: asyncio.Server | None = None

    async def listen(self, bound: socket.socket) -> None:
        """Accept on a bound socket, and no more on the one before it."""
        if (server := self._runner.server) is None:
            await self._runner.setup()
            server = self._runner.server
        assert server is not None
        before, factory = self._listening, functools.partial(Connection, server, self._table)
        loop = asyncio.get_running_loop()
        self._listening = await loop.create_server(factory, sock=bound, backlog=_BACKLOG)
        if before is not None:
            before.close()

    async def close(self) -> None:
        """Accept no more; end each connection when its request has been answered."""
        if self._listening is not None:
            self._listening.close()
        await self._runner.cleanup()
