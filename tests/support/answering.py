"""A server on a Unix socket that answers each request by a function, one at a time, and keeps what it was sent."""

from __future__ import annotations

import contextlib
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
                self.requests.append(connection.recv(1 << 20))
                connection.sendall(self._answer(self.requests[-1]))

    def close(self) -> None:
        """Listen no longer, and return when the last request is answered."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
