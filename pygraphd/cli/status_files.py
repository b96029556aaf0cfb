"""What is wrong with the files and folders of a daemon, as far as it can be seen without one."""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING

from pygraphd.daemon import database_files
from pygraphd.daemon.lock import ELSEWHERE
from pygraphd.remedies import for_access, unreadable
from pygraphd.schema import ownership

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.daemon import spool
    from pygraphd.schema.locations import Locations


def file_problems(locations: Locations, waiting: spool.SpoolState) -> list[str]:
    """Return what is wrong with the files and folders, with the remedies; opens no file."""
    problems = [
        f"{file}: {_why_set_aside(file)}" for file in database_files.files_set_aside(locations.database)
    ]
    if waiting.bad:
        problems.append(
            f"{locations.spool}: {waiting.bad} unreadable files (*.bad); the log says why, delete them"
        )
    # A socket whose path would be too long for the kernel lies in another folder than the lock.
    folders = [locations.runtime, locations.socket.parent, locations.cache]
    # Below a folder that cannot be made, the spool's would tell the same fault once more.
    if os.path.lexists(locations.cache):
        folders.append(locations.spool)
    # With PYGRAPHD_HOME, some of these are one folder.
    found = [*map(_folder_problem, dict.fromkeys(folders)), _socket_problem(locations.socket)]
    older_log = locations.log.with_name(f"{locations.log.name}.1")
    irregular = filter(ownership.is_irregular, (locations.lock, locations.log, older_log))
    found += [f"{file}: is not a regular file; move it away" for file in irregular]
    databases = (locations.database, locations.team_queue)
    # In WAL mode, SQLite opens all three for writing.
    files = [file.with_name(f"{file.name}{suffix}") for file in databases for suffix in ("", "-wal", "-shm")]
    found += map(_access_problem, (locations.lock, *files, locations.log))
    return [*problems, *dict.fromkeys(filter(None, found))]


def _folder_problem(folder: Path) -> str | None:
    try:
        if problem := ownership.why_not_private(folder):
            return problem
        mode = stat.S_IMODE(folder.lstat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return _why_not_made(folder)
    except OSError as error:
        return unreadable(folder, error)
    if mode & 0o700 == 0o700:
        return None
    return f"{folder}: its mode {mode:o} keeps you out; {for_access(folder)}"


def _access_problem(file: Path) -> str | None:
    """Return why the daemon cannot open a file for writing, as far as its name and its mode tell."""
    try:
        file.lstat()
    except OSError:
        return None  # it is not there, or why it cannot be looked at is a problem of its folder
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{file}: cannot be read: {error.strerror}; move it away"
    # access(2) asks for the real ids by default, and to open a file takes the effective ones.
    if not stat.S_ISREG(status.st_mode) or os.access(file, os.R_OK | os.W_OK, effective_ids=True):
        return None
    if status.st_uid != os.geteuid():
        return f"{file}: belongs to uid {status.st_uid}, and you may not write to it; move it away"
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o600 == 0o600:
        return None  # a file system that is only read, as a container may have it
    return f"{file}: its mode {mode:o} keeps you from writing to it; run: chmod 600 {file}"


def _why_not_made(folder: Path) -> str | None:
    """Return why a folder that is not there cannot be made where it is needed; None if it can, as far as is known."""
    there = next(parent for parent in folder.parents if os.path.lexists(parent))
    if not there.is_dir():
        return f"{folder}: cannot be made, as {there} is not a folder; {ownership.REMEDY}"
    if os.statvfs(there).f_flag & os.ST_RDONLY:
        return f"{folder}: cannot be made, as the file system is read-only; {ELSEWHERE}"
    if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
        return f"{folder}: cannot be made, as you may not write to {there}; {ownership.REMEDY}"
    return None


def _socket_problem(socket: Path) -> str | None:
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(socket.lstat().st_mode):
            return f"{socket}: is in the way and no socket; move it away"
    return None


def _why_set_aside(file: Path) -> str:
    """Return why a database was renamed, as its name says, and what to do with it."""
    if f".{database_files.FOREIGN}-" in file.name:
        # Not to be deleted: it may be the only copy of what that program has.
        return "is another program's database, set aside for a new one; move it to where that program looks for it"
    is_damaged = f".{database_files.CORRUPT}-" in file.name
    why = "damaged" if is_damaged else "of an unreleased version"
    return f"was {why} and set aside, a new database was begun; delete it when you no longer need it"
