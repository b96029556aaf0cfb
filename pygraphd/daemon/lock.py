"""The lock that makes a process the daemon, for as long as it lives.

The lock file is never deleted. A second file beside it has the holder's pid, for messages only.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from pygraphd.schema.ownership import is_irregular, open_regular

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from pygraphd.schema.locations import Locations


class DaemonLock:
    """The held lock. Closing it, or the end of the process, lets the next daemon in."""

    def __init__(self, lock: FileLock, locations: Locations) -> None:
        self._lock = lock
        self._locations = locations

    def close(self) -> None:
        """Withdraw the holder's name, then release the lock; the file stays."""
        with contextlib.suppress(OSError):
            _holder_file(self._locations).unlink()
        self._lock.release()

    def __enter__(self) -> DaemonLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def acquire(locations: Locations, timeout_s: float = 0) -> DaemonLock | None:
    """Return the held lock, or None if another process still holds it after `timeout_s`; raises OSError."""
    if is_irregular(locations.lock):
        raise OSError(errno.ENOTSUP, "is not a regular file", str(locations.lock))
    lock = FileLock(locations.lock, mode=0o600)
    try:
        lock.acquire(timeout=timeout_s, poll_interval=0.02)
    except Timeout:
        return None
    _name_holder(locations)
    return DaemonLock(lock, locations)


def is_held(locations: Locations) -> bool:
    """Return whether some process holds the lock; a lock that cannot be opened is held by nobody."""
    if not locations.lock.exists() or is_irregular(locations.lock):
        return False
    lock = FileLock(locations.lock, mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return True
    except OSError:
        return False
    lock.release()
    return False


def holder(locations: Locations) -> int | None:
    """Return the pid of the last holder of the lock, for messages."""
    try:
        with os.fdopen(open_regular(_holder_file(locations))) as stream:
            return int(stream.read(32))
    except (OSError, ValueError):
        return None


def hung_text(locations: Locations) -> str:
    """Return why the lock is held and nobody answers, and the remedy."""
    pid = holder(locations)
    if pid is None:
        return f"a process holds {locations.lock} but does not answer; find it with: fuser {locations.lock}"
    return f"process {pid} holds the lock but does not answer; end it with: kill -9 {pid}"


def _holder_file(locations: Locations) -> Path:
    return locations.lock.with_suffix(".pid")


def _name_holder(locations: Locations) -> None:
    path = _holder_file(locations)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    # For messages only: a full disk keeps nobody from being the daemon, or from making room.
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        with os.fdopen(open_regular(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as stream:
            stream.write(f"{os.getpid()}\n")
        temporary.replace(path)
