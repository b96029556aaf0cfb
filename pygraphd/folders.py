"""Make the daemon's folders, and refuse folders that other users can write to.

A user who may write to the folder of a socket or a database can replace them, whatever their own modes are.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from pygraphd.errors import CommandError

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.schema.locations import Locations

_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def prepare_runtime(locations: Locations) -> None:
    """Make the folders of lock and socket (0700) and check them; raises CommandError with the remedy."""
    for folder in {locations.runtime, locations.socket.parent}:
        make_private(folder)


def prepare_cache(locations: Locations) -> str | None:
    """Make the folders of database and spool. Return why that failed, which a daemon survives.

    Raises CommandError for a folder that other users can write to.
    """
    try:
        for folder in (locations.cache, locations.spool):
            _make(folder)
    except OSError as error:
        return f"{error.filename}: cannot be made: {error.strerror}"
    for folder in (locations.cache, locations.spool):
        check_private(folder)
    return None


def make_private(folder: Path) -> None:
    """Make a folder with mode 0700 if it is missing, then `check_private` it; raises CommandError."""
    try:
        _make(folder)
    except OSError as error:
        raise CommandError(
            f"{folder}: cannot be made: {error.strerror}; set PYGRAPHD_HOME to a folder of yours"
        ) from error
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raise CommandError unless `folder` is a real folder, ours, and writable by nobody else."""
    if problem := why_not_private(folder):
        raise CommandError(problem)


def why_not_private(folder: Path) -> str | None:
    """Return why a folder is not private to this user, and the remedy; None if it is."""
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{folder}: is a symbolic link; give the folder itself"
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder}: is not a folder; move it away"
    if status.st_uid != os.geteuid():
        return f"{folder}: belongs to uid {status.st_uid}, not to you ({os.geteuid()}); set PYGRAPHD_HOME to a folder of yours"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"{folder}: others can write to it (mode {stat.S_IMODE(status.st_mode):o}); run: chmod 700 {folder}"
    return None


def _make(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        # On a read-only file system the error is EROFS even where the folder exists.
        if not folder.is_dir():
            raise
