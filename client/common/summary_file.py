"""Writes the summary to a path that a user has chosen, and harms nothing else that may be there.

A file is replaced as a whole. A device, a FIFO or an open file of this process (`/dev/stdout`) is written into. Links that another user
has made are not followed, and the temporary file has a name that nobody can guess.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
from pathlib import Path

from pygraphd.client.common.log import pour
from pygraphd.schema.ownership import replace_file

WAIT_S = 1.0
"""Seconds that a reader of a FIFO, or of a pipe behind `/dev/stdout`, may take for all of the data."""
_MAX_LINKS = 40
_OWN_FILES = re.compile(r"/proc/(\d+)(?:/task/\d+)?/fd")


def write(target: Path, data: bytes, suffix: str = "") -> None:
    """Write `data` to a path that a user has chosen; raises OSError if that fails, and then has changed nothing.

    `suffix` is added to the name if the path is that of a regular file, or of nothing yet.
    """
    path, descriptor = _follow(target)
    if descriptor is not None:
        _write_into_open_file(descriptor, data)
        return
    there = _lstat(path)
    if suffix and (there is None or stat.S_ISREG(there.st_mode)):
        path, descriptor = _follow(path.with_name(f"{path.name}{suffix}"))
        there = _lstat(path)
    if there is None or stat.S_ISLNK(there.st_mode):  # a link of another user's
        replace_file(path, data)
    elif stat.S_ISREG(there.st_mode):
        replace_file(path, data, stat.S_IMODE(there.st_mode))
    elif stat.S_ISDIR(there.st_mode):
        raise IsADirectoryError(f"{path} is a folder")
    elif stat.S_ISBLK(there.st_mode):
        raise OSError(f"{path} is a block device")
    else:
        _write_into_device(path, data)


def _lstat(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _follow(path: Path) -> tuple[Path, int | None]:
    """Follow the links of this user and of root; return the final path, and the descriptor if it names an open file of this process."""
    for _ in range(_MAX_LINKS):
        folder = Path(os.path.realpath(path.parent))
        path = folder / path.name
        own = _OWN_FILES.fullmatch(str(folder))
        if own is not None and int(own[1]) == os.getpid() and path.name.isdecimal():
            return path, int(path.name)
        there = _lstat(path)
        if there is None or not stat.S_ISLNK(there.st_mode) or there.st_uid not in {0, os.geteuid()}:
            return path, None
        path = folder / path.readlink()
    raise OSError(f"{path} is a link to itself")


def _write_into_open_file(descriptor: int, data: bytes) -> None:
    for stream in (sys.stdout, sys.stderr):  # keeps the order of the program's own output
        with contextlib.suppress(Exception):
            if stream.fileno() == descriptor:
                stream.flush()
    pour(descriptor, data, WAIT_S)


def _write_into_device(path: Path, data: bytes) -> None:
    # O_NONBLOCK: to open a FIFO that nobody reads would wait for a reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    try:
        pour(descriptor, data, WAIT_S)
    finally:
        os.close(descriptor)
