"""Checks that files, folders and the process behind a socket are this user's. Client, daemon and commands check alike.

Other users may write where paths lead, as in /tmp, and put a file, a pipe or a daemon of theirs in our place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import stat
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ROOT = 0
REMEDY = "set PYGRAPHD_HOME to a folder of yours"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_CREDENTIALS = struct.Struct("iII")


class StrangerError(OSError):
    """A socket's folder, or the process that listens there, is another user's. The text has the remedy."""


def connect(path: Path, timeout_s: float) -> socket.socket:
    """Return a socket connected to a process of this user or of root; raises StrangerError, or another OSError."""
    # Before connecting: who can write to the folder can put a socket in the place of ours.
    if problem := why_not_private(path.parent, owners={ROOT, os.geteuid()}):
        raise StrangerError(problem)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        # The kernel tells who listens. The owner of the socket file may be somebody else.
        _pid, uid = credentials(connection)
        if uid not in {ROOT, os.geteuid()}:
            raise StrangerError(f"{path}: a process of uid {uid} listens there, not one of yours; {REMEDY}")
    except BaseException:
        connection.close()
        raise
    return connection


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the peer: who connected or, on a client's side, who listens. Raises OSError."""
    payload = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(payload)
    return pid, uid


def why_not_private(folder: Path, owners: set[int] | None = None) -> str | None:
    """Return why a folder may be changed by users other than `owners` (by default this one), and the remedy; raises OSError."""
    # lstat: whoever owns a link can turn it to another folder after this check.
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{folder}: is a symbolic link; give the folder itself"
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder}: is not a folder; move it away"
    if status.st_uid not in (owners or {os.geteuid()}):
        return f"{folder}: belongs to uid {status.st_uid}, not to you ({os.geteuid()}); {REMEDY}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"{folder}: others can write to it (mode {stat.S_IMODE(status.st_mode):o}); run: chmod 700 {folder}"
    return None


def refuse_planted(folder: Path) -> None:
    """Raise PermissionError if a folder lies where everybody may write, and belongs to another user or is a link; raises OSError."""
    try:
        there, around = folder.lstat(), folder.parent.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    # The sticky bit of /tmp keeps others from renaming our folder, but not from making it first.
    ours = there.st_uid in {ROOT, os.geteuid()} and not stat.S_ISLNK(there.st_mode)
    if around.st_mode & stat.S_IWOTH and not ours:
        raise PermissionError(f"{folder} is somebody else's")


def refuse_shared(folder: Path) -> None:
    """Raise PermissionError for a folder as `refuse_planted` does, and for one that others can write to; raises OSError."""
    refuse_planted(folder)
    if folder.stat().st_mode & _WRITABLE_BY_OTHERS:
        raise PermissionError(f"others can write to {folder}; run: chmod 700 {folder}")


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """Open a regular file (0600 if it is made) and return its descriptor; a pipe or a device is an OSError, and never waited for."""
    # O_NONBLOCK: to open a pipe would wait for its other end (fifo(7)); a regular file knows no difference.
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    descriptor = os.open(path, flags, 0o600)
    # Of the open file: between a look at the name and the open, another file could be put there.
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.ENOTSUP, "is not a regular file", str(path))


def replace_file(path: Path, data: bytes, mode: int | None = None) -> None:
    """Put a file with `data` in place of what is there, all at once; raises OSError, and then has changed nothing.

    The temporary file has a name that nobody can guess.
    """
    temporary = path.with_name(f".pygraph-{secrets.token_hex(12)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            if mode is not None:
                # Not by the mode at open, from which the umask takes bits away.
                os.fchmod(descriptor, mode)
        temporary.replace(path)
    # At an interrupt, too: nobody else knows the name, so the file would stay for ever.
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def is_there(path: Path) -> bool:
    """Return whether something lies at a path. Where it may not be looked, or a name is no name, nothing does; `Path.exists` raises."""
    return os.path.exists(path)  # noqa: PTH110


def is_irregular(path: Path) -> bool:
    """Return whether something lies at a path that is neither a regular file nor a link to one."""
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False
