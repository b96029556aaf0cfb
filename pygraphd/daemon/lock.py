"""The lock that makes a process the daemon, for as long as it lives.

The lock file is never deleted. A second file beside it has the holder's pid, for messages only.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from pygraphd.daemon import control
from pygraphd.remedies import for_access
from pygraphd.schema.ownership import REMEDY, is_irregular, is_there, open_regular, replace_file

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from pygraphd.schema.locations import Locations


class Activity(enum.StrEnum):
    """What the holder of the lock does while it answers nobody."""

    STARTING = "starting"
    SERVING = "serving"
    ENDING = "ending"
    COMMAND = "command"


ELSEWHERE = "set PYGRAPHD_HOME to a folder on a file system that can be written to"
"""What to do where the file system of the lock is read-only."""
_PATIENCE = {
    Activity.STARTING: "is starting: it checks the database, which takes a while if that is large; wait, or end it with: kill {pid}",
    Activity.ENDING: "is ending, which takes some seconds at most: wait for it",
    Activity.COMMAND: "changes the cache for a command: wait for it, or end it with: kill {pid}",
}


class DaemonLock:
    """The held lock. Closing it, or the end of the process, lets the next daemon in."""

    def __init__(self, lock: FileLock, locations: Locations) -> None:
        self._lock = lock
        self._locations = locations

    def close(self) -> None:
        """Withdraw the holder's name, then release the lock; the file stays."""
        # Before the release: after it, the file may be that of the next holder.
        with contextlib.suppress(OSError):
            _holder_file(self._locations).unlink()
        self._lock.release()

    def say(self, activity: Activity) -> None:
        """Write for other processes what this one does."""
        _name_holder(self._locations, activity)

    def __enter__(self) -> DaemonLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def acquire(
    locations: Locations, timeout_s: float = 0, activity: Activity = Activity.SERVING
) -> DaemonLock | None:
    """Return the held lock, or None if another process still holds it after `timeout_s`; raises OSError."""
    if is_irregular(locations.lock):
        raise OSError(errno.ENOTSUP, "is not a regular file", str(locations.lock))
    # flock: the kernel releases it with the process, however that ends, so that no lock is ever stale.
    lock = FileLock(locations.lock, mode=0o600)
    try:
        lock.acquire(timeout=timeout_s, poll_interval=0.02)
    except Timeout:
        return None
    _name_holder(locations, activity)
    return DaemonLock(lock, locations)


def is_held(locations: Locations) -> bool:
    """Return whether some process holds the lock; a lock that cannot be opened is held by nobody."""
    if not is_there(locations.lock) or is_irregular(locations.lock):
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
        return int(_holder_lines(locations)[0])
    except (OSError, ValueError):
        return None


def activity_of_holder(locations: Locations) -> Activity:
    """Return what the last holder of the lock said that it does; `SERVING` if it did not say."""
    try:
        return Activity(_holder_lines(locations)[1])
    except (OSError, ValueError):
        return Activity.SERVING


def why_unknown(locations: Locations) -> str | None:
    """Return why it cannot be told whether a daemon runs: the lock may not be looked at or opened. None if it can be told."""
    try:
        # O_NONBLOCK: a pipe in the place of the lock must not be waited for.
        os.close(os.open(locations.lock, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except OSError as error:
        if is_irregular(locations.lock):
            return None
        unknown = "cannot be opened, so whether pygraphd runs is not known"
        # No mode of a file mends that.
        remedy = ELSEWHERE if error.errno == errno.EROFS else for_access(locations.lock)
        return f"{locations.lock}: {unknown}: {error.strerror}; {remedy}"
    return None


def not_locked_text(locations: Locations, error: OSError) -> str:
    """Return that the lock could not be taken and why, with the remedy."""
    remedy = ELSEWHERE if error.errno == errno.EROFS else REMEDY
    return f"{locations.lock}: cannot be locked: {error.strerror}; {remedy}"


def why_read_only(locations: Locations) -> str | None:
    """Return that the lock lies, or would be made, on a file system that is only read, where no daemon can be started; None if it does not."""
    there = locations.lock if is_there(locations.lock) else locations.lock.parent
    try:
        is_read_only = os.statvfs(there).f_flag & os.ST_RDONLY
    except OSError:
        return None  # why, is a problem of the folder
    if not is_read_only:
        return None
    return f"{locations.lock}: the file system is read-only, so no daemon can be started; {ELSEWHERE}"


def hung_text(locations: Locations) -> str:
    """Return why the lock is held and nobody answers, and the remedy."""
    pid = holder(locations)
    # First, as these answer nobody either: the advice to kill must not end a process that lives and works.
    if pid is not None and (patience := _PATIENCE.get(activity_of_holder(locations))):
        return f"process {pid} {patience.format(pid=pid)}"
    if why := control.why_no_answer(locations.socket):
        return f"{'a process' if pid is None else f'process {pid}'} holds the lock, but {why}"
    if pid is None:
        return f"a process holds {locations.lock} but does not answer; find it with: fuser {locations.lock}"
    return f"process {pid} holds the lock but does not answer; end it with: kill -9 {pid}"


def _holder_lines(locations: Locations) -> tuple[str, str]:
    with os.fdopen(open_regular(_holder_file(locations))) as stream:
        pid, _, activity = stream.read(64).partition("\n")
    return pid, activity.strip()


def _holder_file(locations: Locations) -> Path:
    return locations.lock.with_suffix(".pid")


def _name_holder(locations: Locations, activity: Activity) -> None:
    # For messages only: a full disk keeps nobody from being the daemon, or from making room.
    with contextlib.suppress(OSError):
        replace_file(_holder_file(locations), f"{os.getpid()}\n{activity}\n".encode(), mode=0o600)
