"""The files around the database: its identity, its version, renamed databases, the ballast.

Needs no SQLAlchemy, so that `pygraphd status` answers fast. `database` opens the file for writing.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.remedies import for_access
from pygraphd.schema import offline
from pygraphd.schema.offline import DATABASE_VERSION, OLDEST_MIGRATED
from pygraphd.schema.ownership import REMEDY, is_irregular, is_there, open_regular

if TYPE_CHECKING:
    from pathlib import Path

CORRUPT = "corrupt"
"""Names a damaged database that was renamed."""
FOREIGN = "foreign"
"""Names another program's database that was renamed."""
OUTDATED = "old-v"
"""Names, with a version, the database of an unreleased version that was renamed."""
BALLAST_BYTES = 4 * 2**20
APPLICATION_ID = 0x50794772
"""`PRAGMA application_id` ("PyGr"): tells our file from another program's."""
DAMAGE = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""SQLite's result codes for a file that is no sound database."""
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_NO_ACCESS = frozenset(
    {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_AUTH}
)
_MOVE_IT = "move it to where that program looks for it, or set PYGRAPHD_HOME to another folder"
_LITTLE_ROOM = 2**20
"""Free bytes of a disk with less than which it counts as full: WAL's files alone take some hundred kilobytes."""


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """The identity of the file at a path. If it has changed, somebody removed or replaced our database."""

    device: int
    inode: int


def identity(path: Path) -> FileIdentity | None:
    """Return which file lies at `path`, or None."""
    try:
        status = path.stat()
    except OSError:
        return None
    return FileIdentity(status.st_dev, status.st_ino)


def why_read_only(path: Path) -> str | None:
    """Return why the database may not be written: a newer pygraphd wrote it, or something lies there that is no file."""
    if (file := offline.irregular_file(path)) is not None:
        return f"{file}: is not a regular file; nothing is stored: move it away"
    version = stored_version(path)
    if version is None or version <= DATABASE_VERSION:
        return None
    # Of other programs' versions, nothing follows for ours.
    if _is_foreign(path):
        return f"{path}: is another program's database; nothing is stored: {_MOVE_IT}"
    return (
        f"{path}: written by a newer pygraphd (database version {version}, this one writes {DATABASE_VERSION}); "
        "nothing is stored: upgrade pygraphd, or set PYGRAPHD_HOME to another folder"
    )


def why_unreadable(path: Path, error: BaseException | None) -> str:
    """Return the cause of SQLite's error and the remedy. Only a damaged file is said to be damaged."""
    if (file := offline.irregular_file(path)) is not None:
        return f"{file}: is not a regular file; move it away"
    version = stored_version(path)
    if version is not None and (problem := _why_another(path, version)):
        return f"{path}: {problem}"
    return f"{path}: cannot be read: {error}; {remedy(path, error)}"


def _why_another(path: Path, version: int) -> str:
    """Return what a sound database is instead of one of this version, with the remedy; empty if it is one, or cannot be read."""
    if version > DATABASE_VERSION:
        if _is_foreign(path):
            return f"is another program's database; {_MOVE_IT}"
        return f"is of version {version}, and this pygraphd reads {DATABASE_VERSION}; upgrade pygraphd, or set PYGRAPHD_HOME to another folder"
    with contextlib.suppress(sqlite3.Error), contextlib.closing(offline.connect(path)) as connection:
        (has_tables,) = connection.execute("SELECT EXISTS (SELECT 1 FROM sqlite_schema)").fetchone()
        if not has_tables:
            return "is empty; `pygraphd start` makes it anew"
    if _is_foreign(path):
        return "is another program's database; `pygraphd start` sets it aside"
    if 0 < version < DATABASE_VERSION:
        does = "sets it aside" if version < OLDEST_MIGRATED else "migrates it"
        return f"is of version {version}, and this pygraphd reads {DATABASE_VERSION}; `pygraphd start` {does}"
    return ""


def _is_foreign(path: Path) -> bool:
    """Return whether a sound database has tables of another program; false if it cannot be read."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(offline.connect(path)) as connection:
        (has_tables,) = connection.execute("SELECT EXISTS (SELECT 1 FROM sqlite_schema)").fetchone()
        (program,) = connection.execute("PRAGMA application_id").fetchone()
        return bool(has_tables) and program != APPLICATION_ID
    return False


def remedy(path: Path, error: BaseException | None) -> str:
    """Return what a person can do about an error of SQLite's, or of the system's, with the database at `path`."""
    # The lowest byte of an extended code is the primary one.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    if code in DAMAGE:
        return "`pygraphd start` sets a damaged file aside"
    if code == sqlite3.SQLITE_FULL or is_full(path):
        return "the disk is full: free some room or run: pygraphd cache prune"
    if code in _BUSY:
        return f"another process holds it: try again, or see which one does: fuser {path}"
    if code in _NO_ACCESS or isinstance(error, OSError):
        may_use = os.access(path.parent, os.W_OK | os.X_OK) and os.access(path, os.R_OK | os.W_OK)
        return REMEDY if may_use else for_access(path)
    if code == sqlite3.SQLITE_IOERR:
        return f"see whether its disk is in order, or {REMEDY}"
    return "move it away, and `pygraphd start` begins a new one"


def with_remedy(path: Path, error: BaseException) -> str:
    """Return the text of an error with the file at `path`, and what a person can do about it."""
    if offline.irregular_file(path) is not None:
        return str(error)  # which says so
    return f"{error}; {remedy(path, error)}"


def is_full(path: Path) -> bool:
    """Return whether the disk of a file has next to no room for this user."""
    try:
        room = os.statvfs(path.parent)
    except OSError:
        return False
    # f_bavail leaves out what the file system keeps for root.
    return room.f_bavail * room.f_frsize < _LITTLE_ROOM


def stored_version(path: Path) -> int | None:
    """Return `PRAGMA user_version` of the file, or None if there is no readable database."""
    if not is_there(path):
        return None
    try:
        with contextlib.closing(offline.connect(path)) as connection:
            return int(connection.execute("PRAGMA user_version").fetchone()[0])
    except sqlite3.Error:
        return None


def set_aside(path: Path, label: str) -> Path:
    """Rename a database, log and all, to `NAME.LABEL-<UTC time>`; returns the new name."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    # The stamp has whole seconds, within which another may be set aside.
    target = _free_name(path.with_name(f"{path.name}.{label}-{stamp}"))
    path.rename(target)
    # They belong to this database: left there, SQLite would take them for the next one's.
    for suffix in ("-wal", "-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(path.name + suffix).rename(target.with_name(target.name + suffix))
    return target


def files_set_aside(path: Path) -> list[Path]:
    """Return the databases that were renamed and still lie beside this one, sorted by name; none where it may not be looked."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for label in (CORRUPT, FOREIGN, OUTDATED):
            found += path.parent.glob(f"{path.name}.{label}*")
    return sorted(file for file in found if not file.name.endswith(("-wal", "-shm")))


def ballast_file(path: Path) -> Path:
    """Return the path of the ballast. It is deleted on a full disk, since SQLite needs room even to delete rows."""
    return path.with_name(f"{path.name}.ballast")


def make_ballast(path: Path) -> None:
    """Reserve the ballast's room on the disk; without enough room, what there is of it stays."""
    file = ballast_file(path)
    with contextlib.suppress(OSError):
        if file.stat().st_size == BALLAST_BYTES:
            return
    try:
        with os.fdopen(open_regular(file, os.O_WRONLY | os.O_CREAT), "wb") as stream:
            # Not `truncate`, which makes a hole and reserves nothing.
            os.posix_fallocate(stream.fileno(), 0, BALLAST_BYTES)
    except OSError:
        if is_irregular(file) or not (file.exists() and file.stat().st_size):
            file.unlink(missing_ok=True)


def lower_ballast(path: Path) -> bool:
    """Give half of the ballast back to a full disk, for WAL's files; return whether there is any room to be had that way."""
    file = ballast_file(path)
    if not is_full(path) or is_irregular(file) or not file.exists():
        return False
    try:
        os.truncate(file, file.stat().st_size // 2)
    except OSError:
        return False
    return True


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}{suffix}") for suffix in ("", *(f".{n}" for n in range(1, 1000))))
    return next(name for name in names if not name.exists())
