"""The spool: a folder of records that clients leave as files while no daemon answers.

A client writes a hidden temporary file and renames it to `*.json`. A file that cannot be read is renamed to `*.bad`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.daemon.older_versions import translated_request
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.messages import MAX_BODY_BYTES, RecordRequest, decode, read
from pygraphd.schema.ownership import ROOT, open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator
    from pathlib import Path

_log = logging.getLogger(__name__)

MAX_PASS_FILES = 1000
"""Files taken in one pass; the next pass takes the rest."""
_SHOWN = 3
"""Files that a problem names."""


@dataclass(frozen=True, slots=True)
class SpoolState:
    """The number of waiting files, and of files set aside as unreadable."""

    waiting: int
    bad: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """The content of a file, its owner, and the time when it was left, in seconds since the epoch."""

    request: RecordRequest
    uid: int
    left_at: float


def state(folder: Path) -> SpoolState:
    """Return the state of the folder; one that cannot be read counts as empty."""
    names = list(_names(folder))
    waiting = sum(1 for name in names if _is_record(name))
    return SpoolState(waiting, sum(1 for name in names if name.endswith(".bad")))


def waiting(folder: Path) -> Iterator[Waiting]:
    """Yield the files that the next pass would store, oldest first; changes nothing and skips unreadable files."""
    for name in records(folder):
        with contextlib.suppress(OSError, InvalidMessageError):
            yield _read(folder / name)


def is_any_waiting(folder: Path) -> bool:
    """Return whether a file waits to be stored."""
    return any(map(_is_record, _names(folder)))


def ingest_file(path: Path, store: Callable[[RecordRequest, int], int]) -> int:
    """Store a file's records with `store`, under its owner's uid, then delete the file; return the number stored.

    A file that cannot be read is set aside. An error of `store` passes, and the file stays.
    """
    return _ingest(path, store)[0]


@dataclass(frozen=True, slots=True)
class _Stuck:
    """A file that was dealt with and could not be removed or set aside: which one it was, and why it stays."""

    identity: tuple[int, int, int, int] | None
    was_stored: bool
    why: str


class Intake:
    """The spool of a running daemon. A file that was dealt with and cannot be removed is not taken in again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stuck: dict[str, _Stuck] = {}

    def is_any_waiting(self) -> bool:
        """Return whether a file waits to be stored; may be asked by any thread, and looks at names only."""
        return any(_is_record(name) and name not in self._stuck for name in _names(self._folder))

    def records(self) -> list[str]:
        """Return the names of the files of one pass, oldest first. Tries once more to remove those that were dealt with."""
        # A copy: this runs on the reader's thread, and `ingest` adds to it on the writer's.
        for name, stuck in list(self._stuck.items()):
            if _identity(self._folder / name) != stuck.identity or self._is_away(name, stuck):
                del self._stuck[name]
        return records(self._folder, self._stuck)

    def ingest(self, name: str, store: Callable[[RecordRequest, int], int]) -> int:
        """Do as `ingest_file` does, and remember a file that stays."""
        path = self._folder / name
        identity = _identity(path)
        stored, stuck = _ingest(path, store)
        if stuck is not None:
            is_first = not any(each.was_stored for each in self._stuck.values())
            self._stuck[name] = dataclasses.replace(stuck, identity=identity)
            if stuck.was_stored and is_first:
                _log.error("%s: was stored, but cannot be removed: %s", path, stuck.why)
        return stored

    def problems(self) -> list[str]:
        """Return what keeps files in the spool, as text for `pygraphd status`."""
        stuck = list(self._stuck.items())
        stored = [each.why for _name, each in stuck if each.was_stored]
        found = [
            f"{self._folder / name}: cannot be read or set aside: {each.why}; delete it"
            for name, each in stuck
            if not each.was_stored
        ]
        if len(found) > _SHOWN:
            found = [*found[:_SHOWN], f"{self._folder}: {len(found) - _SHOWN} more such files"]
        if stored:
            count = f"{len(stored)} files were" if len(stored) > 1 else "a file was"
            stays = f"{count} stored but cannot be removed: {stored[-1]}"
            found.insert(0, f"{self._folder}: {stays}; give the daemon the right to write there")
        return found

    def _is_away(self, name: str, stuck: _Stuck) -> bool:
        path = self._folder / name
        return (_why_left(path) if stuck.was_stored else _why_not_set_aside(path)) is None


def _ingest(path: Path, store: Callable[[RecordRequest, int], int]) -> tuple[int, _Stuck | None]:
    try:
        file = _read(path)
    except FileNotFoundError:
        return 0, None
    except (OSError, InvalidMessageError) as error:
        if (why := _why_not_set_aside(path)) is None:
            _log.warning("%s: set aside: %s", path, error)
            return 0, None
        _log.warning("%s: cannot be read: %s; nor set aside: %s", path, error, why)
        return 0, _Stuck(None, was_stored=False, why=why)
    # Stored before it is removed. A daemon that is killed in between stores it twice, which changes nothing.
    stored = store(file.request, file.uid)
    why = _why_left(path)
    return stored, None if why is None else _Stuck(None, was_stored=True, why=why)


def _read(path: Path) -> Waiting:
    with os.fdopen(open_regular(path), "rb") as stream:
        # Of the open file, not of its name, behind which there may be another one by now.
        status = os.fstat(stream.fileno())
        if problem := _why_refused(status):
            raise InvalidMessageError(problem)
        # One byte more than allowed, so that a file that has grown since is refused and not cut off.
        return Waiting(_decoded(stream.read(MAX_BODY_BYTES + 1)), status.st_uid, status.st_mtime)


def _decoded(body: bytes) -> RecordRequest:
    try:
        return decode(RecordRequest, body)
    except InvalidMessageError:
        with contextlib.suppress(ValueError, RecursionError):  # of which InvalidMessageError is one
            return read(RecordRequest, translated_request(json.loads(body)))
        raise


def _why_refused(status: os.stat_result) -> str | None:
    # As on the socket: the row will carry this uid, and programs trust those of their own user.
    if status.st_uid not in (os.geteuid(), ROOT):
        return f"belongs to uid {status.st_uid}"
    if status.st_size > MAX_BODY_BYTES:
        return f"{status.st_size} bytes, at most {MAX_BODY_BYTES} allowed"
    return None


def _why_not_set_aside(path: Path) -> str | None:
    return _why_not(lambda: path.rename(path.with_suffix(".bad")))


def _why_left(path: Path) -> str | None:
    return _why_not(path.unlink)


def _why_not(remove: Callable[[], object]) -> str | None:
    """Take a file away; return why that failed, None once it is gone."""
    try:
        remove()
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def _identity(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.lstat()
    except OSError:
        return None
    # With size and time, as a new file may get the inode of one that was removed.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def records(folder: Path, without: Container[str] = ()) -> list[str]:
    """Return the names of the files of one pass, oldest first, `without` some."""
    # Clients let names begin with the time.
    names = sorted(name for name in _names(folder) if _is_record(name) and name not in without)
    return names[:MAX_PASS_FILES]


def _names(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from (entry.name for entry in entries)


def _is_record(name: str) -> bool:
    return name.endswith(".json") and not name.startswith(".")
