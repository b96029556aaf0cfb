"""A server on a Unix socket that answers each request by a function, one at a time, and keeps what it was sent."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Answering:
    """Listens from its making to `close`. It closes each connection after its answer."""

    def __init__(self, path: Path, answer: Callable[[bytes], bytes]) -> None:
        self.requests: list[bytes] = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # who only looks who is there hangs up at once
                self.requests.append(_received(connection))
                connection.sendall(self._answer(self.requests[-1]))

    def close(self) -> None:
        """Listen no longer, and return when the last request is answered."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


def _received(connection: socket.socket) -> bytes:
    """Return a request, the body of the stated length included; what there is, if the peer sends no more."""
    request = connection.recv(1 << 20)
    head, _, body = request.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head.lower())
    missing = int(length[1]) - len(body) if length else 0
    while missing > 0 and (more := connection.recv(missing)):
        request += more
        missing -= len(more)
    return request
