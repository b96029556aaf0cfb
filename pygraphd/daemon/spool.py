"""The spool: a folder of records that clients leave as files while no daemon answers.

A client writes a hidden temporary file and renames it to `*.json`. A file that cannot be read is renamed to `*.bad`.
"""

from __future__ import annotations

import contextlib
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
    from collections.abc import Callable, Iterator
    from pathlib import Path

_log = logging.getLogger(__name__)

MAX_PASS_FILES = 1000
"""Files taken in one pass; the next pass takes the rest."""


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
    try:
        file = _read(path)
    except FileNotFoundError:
        return 0
    except (OSError, InvalidMessageError) as error:
        _log.warning("%s: set aside: %s", path, error)
        _set_aside(path)
        return 0
    stored = store(file.request, file.uid)
    with contextlib.suppress(OSError):
        path.unlink()
    return stored


def _read(path: Path) -> Waiting:
    with os.fdopen(open_regular(path), "rb") as stream:
        status = os.fstat(stream.fileno())
        if problem := _why_refused(status):
            raise InvalidMessageError(problem)
        return Waiting(_decoded(stream.read(MAX_BODY_BYTES + 1)), status.st_uid, status.st_mtime)


def _decoded(body: bytes) -> RecordRequest:
    try:
        return decode(RecordRequest, body)
    except InvalidMessageError:
        with contextlib.suppress(ValueError, RecursionError):  # of which InvalidMessageError is one
            return read(RecordRequest, translated_request(json.loads(body)))
        raise


def _why_refused(status: os.stat_result) -> str | None:
    if status.st_uid not in (os.geteuid(), ROOT):
        return f"belongs to uid {status.st_uid}"
    if status.st_size > MAX_BODY_BYTES:
        return f"{status.st_size} bytes, at most {MAX_BODY_BYTES} allowed"
    return None


def _set_aside(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.rename(path.with_suffix(".bad"))


def records(folder: Path) -> list[str]:
    """Return the names of the files of one pass, oldest first."""
    return sorted(name for name in _names(folder) if _is_record(name))[:MAX_PASS_FILES]


def _names(folder: Path) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        yield from (entry.name for entry in entries)


def _is_record(name: str) -> bool:
    return name.endswith(".json") and not name.startswith(".")
