"""One request to the daemon: HTTP over a Unix socket with the standard library, under one deadline, raising one error.

A connection is opened for each request and closed after it, so nothing is held across a fork. `Transport` keeps no
state; when to ask and what to do without an answer is `client.cache`'s business.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CONNECT_S = 0.05
TOTAL_S = 0.25
MAX_ANSWER_BYTES = 4 * 2**20 + 65536
_CHUNK = 65536


class TransportError(Exception):
    """No usable answer. `absent`: nobody listens there, which costs next to nothing and may change at any time.

    `unknown`: a daemon of another version does not know the question.
    """

    def __init__(self, reason: str, *, absent: bool = False, unknown: bool = False) -> None:
        super().__init__(reason)
        self.absent = absent
        self.unknown = unknown


class Transport:
    """Where the daemon listens, and how long it may take to answer."""

    def __init__(self, path: Path, connect_s: float = CONNECT_S, total_s: float = TOTAL_S) -> None:
        self._path = path
        self._connect_s = connect_s
        self._total_s = total_s

    def request(self, method: str, target: str, body: bytes = b"") -> bytes:
        """Return the body of a successful answer; raises TransportError for everything else."""
        deadline = time.monotonic() + self._total_s
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                connection.settimeout(self._connect_s)
                connection.connect(str(self._path))
                _send(connection, _head(method, target, len(body)) + body, deadline)
                answer = _receive(connection, deadline)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise TransportError("no daemon", absent=True) from error
        except TimeoutError as error:
            raise TransportError("no answer in time") from error
        except OSError as error:
            raise TransportError(f"connection failed: {error.strerror or error}") from error
        return _body(answer)


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
    connection.sendall(data)  # its time-out is for the whole of the data


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


class _Received:
    """Bytes that `http.client` may parse as if they came from a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _body(answer: bytes) -> bytes:
    try:
        response = http.client.HTTPResponse(_Received(answer))  # type: ignore[arg-type]
        response.begin()
        body = response.read()
    except (http.client.HTTPException, ValueError, OSError) as error:
        raise TransportError(f"not HTTP: {type(error).__name__}") from error
    if response.status != http.HTTPStatus.OK:
        unknown = response.status in {http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED}
        raise TransportError(f"status {response.status}", unknown=unknown)
    return body
