"""Counts the bytes of one connection to a Unix socket by standing in between; slow, so never in a timed run."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from pathlib import Path

_CHUNK = 65536


class Relay:
    """Listens at `path` and passes the first connection on to `target`, and the answer back."""

    def __init__(self, path: Path, target: Path) -> None:
        self.sent = 0
        self.received = 0
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join(timeout=10)
        self._listener.close()

    def _serve(self) -> None:
        client, _ = self._listener.accept()
        with client, socket.socket(socket.AF_UNIX) as daemon:
            daemon.connect(str(self._target))
            upward = threading.Thread(target=self._send, args=(client, daemon), daemon=True)
            upward.start()
            while data := daemon.recv(_CHUNK):
                self.received += len(data)
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)
            upward.join(timeout=10)

    def _send(self, client: socket.socket, daemon: socket.socket) -> None:
        while data := client.recv(_CHUNK):
            self.sent += len(data)
            daemon.sendall(data)
