"""Sends one request to the daemon: HTTP over a Unix socket, with one deadline and one exception for all errors.

A connection serves one request, so that nothing is shared across a fork. `Transport` keeps no state; `client.decisions.cache`
decides when to ask, and goes on without an answer.
"""

from __future__ import annotations

import re
import socket
import time
from typing import TYPE_CHECKING

from pygraphd.client.common.signals import raised_by_handler
from pygraphd.schema import ownership

if TYPE_CHECKING:
    from pathlib import Path

# A connection waits only for a daemon that is stopped and whose queue in the kernel is full.
CONNECT_S = 0.05
TOTAL_S = 0.25
MAX_ANSWER_BYTES = 4 * 2**20 + 65536
_CHUNK = 65536
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: |$)")
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,10})[ \t]*(?=\r\n|$)", re.IGNORECASE)


class TransportError(Exception):
    """The daemon gave no usable answer.

    `absent`: nobody listens, which costs next to nothing and may change at any time. `unknown`: a daemon of another version does not
    know the path.
    """

    def __init__(self, reason: str, *, absent: bool = False, unknown: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent
        self.unknown = unknown


class Transport:
    """The daemon's socket, and the time that it may take to accept (`connect_s`) and to answer (`total_s`), in seconds."""

    def __init__(self, path: Path, connect_s: float = CONNECT_S, total_s: float = TOTAL_S) -> None:
        self._path = path
        self._connect_s = connect_s
        self._total_s = total_s

    def request(self, method: str, target: str, body: bytes = b"") -> bytes:
        """Return the body of a successful answer; raises TransportError for everything else."""
        deadline = time.monotonic() + self._total_s
        try:
            with ownership.connect(self._path, self._connect_s) as connection:
                _send(connection, _head(method, target, len(body)) + body, deadline)
                return _body(_receive(connection, deadline))
        except Exception as error:
            # A signal handler may raise the same types, as TimeoutError at the end of a time limit.
            if isinstance(error, TransportError) or raised_by_handler(error):
                raise
            raise _transport_error(error) from error


def _transport_error(error: Exception) -> TransportError:
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return TransportError("no daemon", absent=True)
    if isinstance(error, TimeoutError):
        return TransportError("no answer in time")
    if isinstance(error, ownership.StrangerError):
        return TransportError(str(error))
    detail = error.strerror or error if isinstance(error, OSError) else type(error).__name__
    return TransportError(f"connection failed: {detail}")


def _head(method: str, target: str, length: int) -> bytes:
    return (
        f"{method} {target} HTTP/1.1\r\nHost: pygraphd\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _send(connection: socket.socket, data: bytes, deadline: float) -> None:
    connection.settimeout(_remaining(deadline))
    # Its time-out is for the whole of the data. Without the flag, a program that takes SIGPIPE would end here.
    connection.sendall(data, socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket, deadline: float) -> bytes:
    # Read by hand: a reader with a time-out of its own for each piece could be kept waiting for ever by slow pieces.
    pieces: list[bytes] = []
    size = 0
    while True:
        connection.settimeout(_remaining(deadline))
        piece = connection.recv(_CHUNK)
        if not piece:
            return b"".join(pieces)
        pieces.append(piece)
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise TransportError("answer too large")


def _body(answer: bytes) -> bytes:
    """Return the body of an answer that is there as a whole; of HTTP, no more is read than the daemon writes."""
    head, _, rest = answer.partition(b"\r\n\r\n")
    first, _, fields = head.partition(b"\r\n")
    status = _STATUS.match(first)
    length = _LENGTH.findall(b"\r\n" + fields)
    if status is None:
        raise TransportError("not HTTP")
    if status[1] != b"200":
        raise TransportError(f"status {int(status[1])}", unknown=status[1] in {b"404", b"405"})
    if len(length) != 1 or int(length[0]) != len(rest):
        raise TransportError("not HTTP: not as long as it says")
    return rest
