"""The socket file of the daemon: bound under the held lock, bound again where it was deleted, removed at the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
from typing import TYPE_CHECKING, Self

from pygraphd.daemon.database_files import identity
from pygraphd.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from pygraphd.schema.locations import Locations

_log = logging.getLogger(__name__)

WATCH_S = 1.0
"""The interval at which a running daemon looks whether its socket is still there: one `stat`."""


class Binding:
    """Our socket at our path, mode 0600. Raises CommandError if it cannot be bound.

    `inherited` is the socket there that systemd has bound, and removes itself.
    """

    def __init__(self, locations: Locations, inherited: socket.socket | None = None) -> None:
        self._path = locations.socket
        self._lock = locations.lock
        self._lock_identity = identity(self._lock)
        self._is_inherited = inherited is not None
        if inherited is None:
            # We hold the lock, and `process` has seen that nobody listens. Else a live daemon would lose its
            # socket in silence: once the file is gone, the kernel binds the path again.
            _remove_stale(self._path)
        self.socket = inherited or _bound(self._path)
        self._identity = identity(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket, and remove its file unless another one lies there."""
        self.socket.close()
        if not self._is_inherited and self.is_in_place():
            self._path.unlink(missing_ok=True)

    def is_in_place(self) -> bool:
        """Whether the file at our path is our socket."""
        return identity(self._path) == self._identity

    def bind_again(self) -> None:
        """Bind a new socket where ours was deleted; raises CommandError if another daemon may be there by now, or something else is."""
        if self._is_inherited:
            raise CommandError(f"{self._path}: was deleted, and is systemd's to bind")
        # A link that leads nowhere does not exist for `exists`, and yet no socket can be bound in its place.
        if self._path.is_symlink() or self._path.exists():
            raise CommandError(f"{self._path}: is not the socket of this daemon any more")
        # A lock is on the file, not on its name: whoever makes a new file there becomes the daemon beside us.
        if identity(self._lock) != self._lock_identity:
            raise CommandError(f"{self._path} and {self._lock}: were both removed")
        self.socket = _bound(self._path)
        self._identity = identity(self._path)

    async def watch(self, listen: Callable[[socket.socket], Awaitable[None]], stop: asyncio.Event) -> None:
        """Have `listen` accept on a new socket whenever ours was deleted. Set `stop` and return where there can be none."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self.is_in_place():
                continue
            try:
                self.bind_again()
            except CommandError as error:
                _log.warning("%s: stopping, so that another daemon can start", error)
                stop.set()
                return
            await listen(self.socket)
            _log.warning("%s: was deleted, and is bound again", self._path)


def _remove_stale(path: Path) -> None:
    """Remove a socket that a killed daemon left; raises CommandError for a file of another kind."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise CommandError(f"{path}: is in the way and no socket; move it away")
        path.unlink()


def _bound(path: Path) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    # The file gets its mode at bind. A chmod after that would come too late for who connects in between.
    umask = os.umask(0o177)
    try:
        bound.bind(str(path))
    except OSError as error:
        bound.close()
        raise CommandError(f"{path}: cannot be bound: {error.strerror or error}") from error
    finally:
        os.umask(umask)
    return bound
