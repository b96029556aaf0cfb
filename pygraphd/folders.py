"""Make the daemon's folders, and refuse folders that other users can write to.

A user who may write to the folder of a socket or a database can replace them, whatever their own modes are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.errors import CommandError, UsageError
from pygraphd.remedies import unreadable
from pygraphd.schema.ownership import REMEDY, refuse_shared, why_not_private

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.schema.locations import Locations


def prepare_runtime(locations: Locations) -> None:
    """Make the folders of lock and socket (0700) and check them; raises CommandError with the remedy, of `check_private` if it refuses one."""
    for folder in {locations.runtime, locations.socket.parent}:
        make_private(folder)


def prepare_cache(locations: Locations) -> str | None:
    """Make the folders of database and spool. Return why that failed, which a daemon survives.

    Raises UsageError for a folder that other users can write to.
    """
    for folder in (locations.cache, locations.spool):
        try:
            _make(folder)
        except OSError as error:
            return f"{error.filename}: cannot be made: {error.strerror}"
        # Before the next is made: root would leave a folder of its own in one that is refused, and its owner would have no daemon.
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
    """Raise UsageError unless `folder` is a real folder, ours, and writable by nobody else."""
    if problem := why_not_private(folder):
        # Where the folders are is a setting of the user's, and by this class each command has one exit code for it.
        raise UsageError(problem)


def check_readable(locations: Locations) -> None:
    """Raise CommandError if another user may have put what lies in the folders of database, log and spool there; makes nothing."""
    for folder in (locations.cache, locations.spool):
        check_unshared(folder)


def check_unshared(folder: Path) -> None:
    """Raise UsageError if others can write to a folder, or have planted it, CommandError if it cannot be looked at; one that is not there is in order."""
    try:
        refuse_shared(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno:
            raise CommandError(unreadable(folder, error)) from error
        raise UsageError(why_not_private(folder) or str(error)) from error


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
