"""The connections of the daemon's socket: their requests in order, limits on their number and idle time, and half-closed ones.

A connection costs a descriptor, and a user who may connect could take all of them. Each user has a limit; at the limit a new
connection ends the one that has been idle longest. A few beyond it may still ask whether the daemon lives.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import select
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus

from pygraphd.daemon import http
from pygraphd.daemon.peer import Peer, peer_of, why_refused
from pygraphd.schema.messages import MAX_BODY_BYTES

_log = logging.getLogger(__name__)

_BACKLOG = 512
_STRANGERS = 16
"""Connections of all users together who are refused anyway."""
_RESERVE = 8
"""Connections of a user beyond the limit that may still ask for what `status` and `stop` need."""
MOST_BEYOND = _STRANGERS + 2 * _RESERVE
"""Connections beyond the limits of the two users who are served, ours and root."""
_RESERVE_S = 1.0
"""How long such a connection may take."""
_RESERVED_PATHS = frozenset({"/v1/ping", "/v1/stats"})
_WARNING_S = 60.0
"""How long nothing more is logged of connections that are refused."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of connections: their number for each user, and seconds.

    `idle_s`: without a request. `request_s`: from a request's head to the end of its body, and from an answer that the
    client does not take to the end of the connection.
    """

    connections: int = 1024
    idle_s: float = 30.0
    request_s: float = 10.0


@dataclass(frozen=True, slots=True)
class Request:
    """One request, whose body is there as a whole."""

    method: str
    path: str
    body: bytes
    peer: Peer
    connected: socket.socket

    @property
    def is_gone(self) -> bool:
        """Whether the client has closed both halves, as one whose deadline has passed does: nobody takes an answer."""
        if (descriptor := self.connected.fileno()) < 0:
            return True
        poll = select.poll()
        poll.register(descriptor, 0)
        return any(event & select.POLLHUP for _, event in poll.poll(0))


@dataclass(frozen=True, slots=True)
class Service:
    """What answers requests: `refuse` by the head alone (method, path, peer), where it can tell; `answer_at_once` those for which
    nothing has to be waited for; `answer` the others."""

    refuse: Callable[[str, str, Peer], http.Response | None]
    answer_at_once: Callable[[Request], http.Response | None]
    answer: Callable[[Request], Awaitable[http.Response]]
    count_invalid: Callable[[], None]


class _State(enum.Enum):
    HEAD = enum.auto()
    """No request is here, or not all of its head."""
    BODY = enum.auto()
    SERVING = enum.auto()
    ENDING = enum.auto()
    """The last answer has been written. What comes in is dropped, so that the client, which may send still, can read it."""


class Connection(asyncio.Protocol):
    """One client's connection, which serves one request at a time; `received` has come already, and `unsent` is left of the last answer."""

    def __init__(self, listener: Listener, received: bytes = b"", unsent: bytes = b"") -> None:
        self._listener = listener
        self._loop = listener.loop
        self._transport: asyncio.Transport | None = None
        self._state = _State.HEAD
        self._buffer = bytearray()
        self._received = received
        self._unsent = unsent
        self._head: http.Head | None = None
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False
        self._is_closing = False
        self._is_due = False
        self._is_blocked = False
        self._is_reserved = False
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.peer = Peer(0, 0)

    @property
    def is_idle(self) -> bool:
        """Whether no request is here, be it for the first or for the next one, or only some that wait until answers are taken."""
        return self._state is _State.HEAD and not self._is_due

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the peer's credentials, and count the connection; if there are too many, refuse it or all but a ping."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(0)
        self.peer = peer_of(transport.get_extra_info("socket"))
        self._listener.open.add(self)
        self._limit(self._listener.table.limits.idle_s)
        if not self._is_admitted():
            self._is_closing = True
            self._end(_TOO_MANY)
        elif self._unsent:
            self._state = _State.ENDING
            transport.write(self._unsent)
            transport.close()
        elif self._received:
            self.data_received(self._received)
        self._received = self._unsent = b""

    def _is_admitted(self) -> bool:
        table = self._listener.table
        if table.admit(self):
            return True
        self._is_reserved = table.reserve(self)
        if self._is_reserved:
            self._limit(min(table.limits.idle_s, _RESERVE_S))
        return self._is_reserved

    def connection_lost(self, _error: BaseException | None) -> None:
        """Forget the connection. What is being done for it goes on, and nobody takes the answer."""
        self._transport = None
        self._listener.table.forget(self)
        self._listener.open.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Take what came, and begin to serve a request that is complete."""
        if self._state is _State.ENDING or self._transport is None:
            return
        self._buffer += data
        if self._state is not _State.SERVING and not self._is_due and not self._is_blocked:
            self._go_on()
        elif len(self._buffer) > http.MAX_HEAD_BYTES:
            self._transport.pause_reading()  # else requests that wait for the one before fill the memory

    def eof_received(self) -> bool:
        """Keep our half open for the answers to all requests that have come; close the connection if there are none."""
        self._has_ended = True
        is_more_to_do = self._is_due or (self._is_blocked and self._buffer)
        if self._state is _State.SERVING or (self._state is not _State.ENDING and is_more_to_do):
            return True
        if self._state is _State.BODY or self._buffer:
            self._refuse(HTTPStatus.BAD_REQUEST, _ENDED_EARLY)
        self._state = _State.ENDING
        return False

    def pause_writing(self) -> None:
        """Serve no more requests until the client has taken its answer, for which it has some time."""
        self._is_blocked = True
        self._limit(self._listener.table.limits.request_s)

    def resume_writing(self) -> None:
        """Go on with what was sent meanwhile."""
        self._is_blocked = False
        if self._state is _State.HEAD:
            self._limit(self._listener.table.limits.idle_s)
        self._look_further()

    def abort(self) -> None:
        """Close the connection, and leave what is being done for it."""
        if self._task is not None:
            self._task.cancel()
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Close the connection once its request, if there is one, has been answered."""
        self._is_closing = True
        if self._state is _State.HEAD and self._transport is not None:
            self._state = _State.ENDING
            self._transport.close()

    def _look_further(self) -> None:
        """Go on with what came while the request before was served, or its answer was not taken."""
        self._is_due = False
        if self._buffer and not self._is_blocked and self._state in {_State.HEAD, _State.BODY}:
            self._go_on()

    def _go_on(self) -> None:
        """Read as much of a request as is here, and begin to serve it if that is all of it."""
        transport = self._transport
        try:
            if transport is None or (self._state is _State.HEAD and not self._read_head(transport)):
                return
            head = self._head
            assert head is not None
            if len(self._buffer) < head.length:
                self._await_body(head, transport)
                return
        except http.RefusedError as error:
            _log.warning("not served, status %d: %s", error.status, error)
            self._refuse(error.status, str(error))
            return
        body = bytes(self._buffer[: head.length])
        del self._buffer[: head.length]
        self._state = _State.SERVING
        self._deadline = None
        request = Request(head.method, head.path, body, self.peer, transport.get_extra_info("socket"))
        if (response := self._listener.service.answer_at_once(request)) is not None:
            self._answer(response)
        else:
            self._task = self._loop.create_task(self._serve(request))

    def _await_more(self, transport: asyncio.Transport) -> None:
        """Read on; raises RefusedError if nothing can come any more."""
        if self._has_ended:
            raise http.RefusedError(HTTPStatus.BAD_REQUEST, _ENDED_EARLY)
        transport.resume_reading()

    def _await_body(self, head: http.Head, transport: asyncio.Transport) -> None:
        self._await_more(transport)
        if head.expects and not self._buffer:
            transport.write(http.CONTINUE)
        if self._deadline is None:
            self._limit(self._listener.table.limits.request_s)

    def _read_head(self, transport: asyncio.Transport) -> bool:
        """Take a head out of the buffer, and answer it if no body is needed for that; return whether the body is next. Raises RefusedError."""
        end = self._buffer.find(http.END_OF_HEAD, 0, http.MAX_HEAD_BYTES)
        if end < 0:
            http.check_beginning(self._buffer)
            self._await_more(transport)
            return False
        head = self._head = http.parse_head(bytes(self._buffer[:end]))
        del self._buffer[: end + len(http.END_OF_HEAD)]
        self._listener.table.used(self)
        if (refusal := self._listener.service.refuse(head.method, head.path, self.peer)) is not None:
            self._end(refusal)
            return False
        if self._is_reserved and head.path not in _RESERVED_PATHS:
            self._end(_TOO_MANY)
            return False
        if head.length > MAX_BODY_BYTES:
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            raise http.RefusedError(status, f"a body of over {MAX_BODY_BYTES} bytes")
        self._state = _State.BODY
        self._deadline = None
        return True

    async def _serve(self, request: Request) -> None:
        response = await self._listener.service.answer(request)
        self._task = None
        self._answer(response)

    def _answer(self, response: http.Response) -> None:
        """Send an answer, and go on with the next request unless this one was the last or went wrong."""
        head, transport = self._head, self._transport
        if transport is None:
            return
        is_last = head is None or not head.keep_alive or (self._has_ended and not self._buffer)
        if is_last or self._is_closing or self._is_reserved or response.status is not HTTPStatus.OK:
            self._end(response)
            return
        self._state, self._head = _State.HEAD, None
        self._limit(self._listener.table.limits.idle_s)
        transport.write(response.encode(keep_alive=True))
        if self._buffer:
            self._is_due = True
            self._loop.call_soon(self._look_further)
        else:
            transport.resume_reading()  # which requests may have stopped that have all been served by now

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._listener.service.count_invalid()
        self._end(http.error(status, reason))

    def _end(self, response: http.Response) -> None:
        """Send the last answer."""
        transport = self._transport
        if transport is None:
            return
        is_read = self._state is _State.SERVING
        self._state = _State.ENDING
        self._buffer.clear()
        self._limit(self._listener.table.limits.request_s)
        transport.write(response.encode(keep_alive=False))
        if is_read or self._has_ended or self._is_closing:
            transport.close()  # once the answer is out
        elif transport.can_write_eof():
            # A client that is still sending would find its connection broken, and not read the answer.
            transport.write_eof()

    def _limit(self, seconds: float) -> None:
        """Let the present state last for some seconds, and then end the connection."""
        self._deadline = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._look)

    def _look(self) -> None:
        # One timer for all limits: most connections are over before it, and need no other.
        self._timer = None
        if self._deadline is None or self._transport is None:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._look)
        elif self._state is _State.BODY:
            limit_s = self._listener.table.limits.request_s
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {limit_s:g} s")
        else:
            self.abort()


class Connections:
    """All open connections, by user, in the order in which they were last used."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: dict[int | None, dict[Connection, None]] = {}
        self._reserved: dict[int, set[Connection]] = {}
        self._next_warning = 0.0

    def admit(self, connection: Connection) -> bool:
        """Count a connection; return whether there was room, or an idle one of its user that could be ended."""
        group, most = self._group(connection)
        if len(group) >= most:
            idle = next((each for each in group if each.is_idle), None)
            if idle is None:
                self._warn(connection.peer.uid, most)
                return False
            del group[idle]
            idle.abort()
        group[connection] = None
        return True

    def reserve(self, connection: Connection) -> bool:
        """Count a connection for which there was no room; return whether it may still ask whether the daemon lives."""
        group = self._reserved.setdefault(connection.peer.uid, set())
        if why_refused(connection.peer) is not None or len(group) >= _RESERVE:
            return False
        group.add(connection)
        return True

    def _warn(self, uid: int, most: int) -> None:
        # Not for each one: that would push all else out of the log.
        if (now := time.monotonic()) >= self._next_warning:
            self._next_warning = now + _WARNING_S
            _log.warning("uid %d has %d connections, and no more are served", uid, most)

    def used(self, connection: Connection) -> None:
        """Note that a request came in, so that this connection is not the next to be ended."""
        group, _most = self._group(connection)
        if connection in group:
            del group[connection]
            group[connection] = None

    def forget(self, connection: Connection) -> None:
        """Drop a connection that has been closed."""
        self._group(connection)[0].pop(connection, None)
        self._reserved.get(connection.peer.uid, set()).discard(connection)

    def _group(self, connection: Connection) -> tuple[dict[Connection, None], int]:
        peer = connection.peer
        refused = why_refused(peer) is not None
        most = _STRANGERS if refused else self.limits.connections
        return self._open.setdefault(None if refused else peer.uid, {}), most


_ENDED_EARLY = "the request ended early"
_TOO_MANY = http.error(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections of this user")


class Listener:
    """Accepts connections for a service, from `listen` to `close`."""

    def __init__(self, service: Service, table: Connections, end_s: float) -> None:
        self.service = service
        self.table = table
        self.open: set[Connection] = set()
        self.loop = asyncio.get_running_loop()
        self._end_s = end_s
        self._listening: socket.socket | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    async def listen(self, bound: socket.socket) -> None:
        """Accept on a bound socket, and no more on the one before it. Raises OSError."""
        bound.setblocking(False)
        bound.listen(_BACKLOG)
        self._stop_accepting()
        self._listening = bound
        self.loop.add_reader(bound.fileno(), self._accept, bound)

    async def close(self) -> None:
        """Accept no more; end each connection when its request has been answered, or after some seconds."""
        self._stop_accepting()
        await asyncio.gather(*self._connecting)
        for connection in list(self.open):
            connection.end()
        end = self.loop.time() + self._end_s
        while self.open and self.loop.time() < end:
            await asyncio.sleep(_LOOK_S)
        for connection in list(self.open):
            connection.abort()

    def _stop_accepting(self) -> None:
        if self._listening is not None:
            self.loop.remove_reader(self._listening.fileno())
            self._listening.close()
            self._listening = None

    def _accept(self, bound: socket.socket) -> None:
        for _ in range(_ACCEPTED):
            try:
                accepted, _address = bound.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                _log.error("no connection can be accepted for now: %s", error.strerror)
                self.loop.remove_reader(bound.fileno())
                self.loop.call_later(_PAUSE_S, self._accept_again, bound)
                return
            accepted.setblocking(False)
            self._begin(accepted)

    def _accept_again(self, bound: socket.socket) -> None:
        if bound is self._listening:
            self.loop.add_reader(bound.fileno(), self._accept, bound)

    def _begin(self, accepted: socket.socket) -> None:
        """Answer a request that is here as a whole and needs no waiting, which nearly all are; leave others to a `Connection`."""
        # A transport takes longer to make than a lookup to answer.
        try:
            received = accepted.recv(_CHUNK)
            # Nothing received: the client has hung up already.
            unsent = self._answered(accepted, received) if received else b""
        except BlockingIOError:
            received, unsent = b"", None
        except OSError:
            unsent = b""
        if unsent == b"":
            accepted.close()
            return
        task = self.loop.create_task(self._connect(accepted, received, unsent or b""))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _answered(self, accepted: socket.socket, received: bytes) -> bytes | None:
        """Answer the request on a connection if that can be done at once; return what could not be sent yet, None if it is not answered."""
        end = received.find(http.END_OF_HEAD)
        if end < 0:
            return None
        try:
            head = http.parse_head(received[:end])
        except http.RefusedError:
            return None
        body = received[end + len(http.END_OF_HEAD) :]
        if head.keep_alive or len(body) != head.length:
            return None
        request = Request(head.method, head.path, body, peer_of(accepted), accepted)
        if (response := self.service.answer_at_once(request)) is None:
            return None
        answer = response.encode(keep_alive=False)
        try:
            return answer[accepted.send(answer) :]
        except BlockingIOError:
            return answer

    async def _connect(self, accepted: socket.socket, received: bytes, unsent: bytes) -> None:
        try:
            await self.loop.connect_accepted_socket(lambda: Connection(self, received, unsent), accepted)
        except OSError:
            accepted.close()


_LOOK_S = 0.02
_PAUSE_S = 1.0
_ACCEPTED = 16
"""Connections accepted, of which each may be answered, before others are looked at: some milliseconds."""
_CHUNK = 65536
