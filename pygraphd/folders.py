"""Make the daemon's folders, and refuse folders that other users can write to.

A user who may write to the folder of a socket or a database can replace them, whatever their own modes are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.errors import CommandError
from pygraphd.remedies import unreadable
from pygraphd.schema.ownership import REMEDY, refuse_shared, why_not_private

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.schema.locations import Locations


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
        raise CommandError(f"{folder}: cannot be made: {error.strerror}; {REMEDY}") from error
    check_private(folder)


def check_private(folder: Path) -> None:
    """Raise CommandError unless `folder` is a real folder, ours, and writable by nobody else."""
    if problem := why_not_private(folder):
        raise CommandError(problem)


def check_readable(locations: Locations) -> None:
    """Raise CommandError if another user may have put what lies in the folders of database, log and spool there; makes nothing."""
    for folder in (locations.cache, locations.spool):
        check_unshared(folder)


def check_unshared(folder: Path) -> None:
    """Raise CommandError if others can write to a folder, or have planted it; one that is not there is in order."""
    try:
        refuse_shared(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        said = unreadable(folder, error) if error.errno else why_not_private(folder)
        raise CommandError(said or str(error)) from error


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
