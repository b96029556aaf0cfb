"""The spool: files of one `RecordRequest` each, which clients leave while no daemon answers.

Until a daemon stores them, other clients without a daemon read them too. So where no daemon ever runs (CI, a batch job), the second
run of a program still finds the decisions of the first.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema import messages
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.messages import MAX_BODY_BYTES, Entry, Graph, RecordRequest
from pygraphd.schema.ownership import open_regular, refuse_planted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_WAITING_FILES = 1000
MAX_READ = 256
MAX_READ_BYTES = 2**20
"""Files, and bytes after which no other is begun, read for one answer, newest first: a few hundred milliseconds at most."""


@dataclass(frozen=True, slots=True)
class Spooled:
    """An entry in the spool, its graph, and when it was left there, in seconds since the epoch."""

    graph: Graph
    entry: Entry
    left_at: float


class SpoolFullError(OSError):
    """`MAX_WAITING_FILES` files are waiting, or a body is too large: nothing more is kept."""


def leave(folder: Path, body: bytes) -> Path:
    """Write one encoded `RecordRequest`; raises OSError. A reader sees the whole file or none."""
    if len(body) > MAX_BODY_BYTES:
        raise SpoolFullError(f"{len(body)} bytes do not fit a spool file")
    refuse_planted(folder.parent)
    # The daemon refuses a folder that others may write to.
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if len(os.listdir(folder)) >= MAX_WAITING_FILES:  # noqa: PTH208 - names are all that is needed
        raise SpoolFullError(f"{MAX_WAITING_FILES} files are waiting already")
    # Names sort by time, so that readers take the newest first and need not open the others.
    path = folder / f"{time.time_ns()}-{os.getpid()}.json"
    temporary = path.with_name(f".{path.name}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(body)
    temporary.replace(path)
    return path


def read_entries(folder: Path, environment: str) -> dict[str, Spooled]:
    """Return the entries of an environment (its digest) in the spool, by graph. The newest file wins.

    A decision that is not final never hides a final one. Files that are not ours or not valid are skipped.
    """
    entries: dict[str, Spooled] = {}
    for request, left_at in requests(folder):
        if request.environment.digest() == environment:
            merge(entries, request, left_at, newer=False)
    return entries


def merge(entries: dict[str, Spooled], request: RecordRequest, left_at: float, *, newer: bool) -> None:
    """Add records to entries; `left_at` is their time in seconds since the epoch, `newer` whether they are newer than the entries.

    A decision that is not final never hides a final one.
    """
    for record in request.records:
        known, is_final = entries.get(record.graph.digest), record.decision.final
        if known is None or (newer if known.entry.decision.final == is_final else is_final):
            entry = record.entry(os.getuid(), request.origin.host, left_at)
            entries[record.graph.digest] = Spooled(record.graph, entry, left_at)


def requests(folder: Path) -> Iterator[tuple[RecordRequest, float]]:
    """Yield the newest files that are ours and valid, with their times, in seconds since the epoch; raises OSError."""
    names = sorted(os.listdir(folder), reverse=True) if folder.is_dir() else []  # noqa: PTH208
    size = 0
    for name in [name for name in names if name.endswith(".json") and not name.startswith(".")][:MAX_READ]:
        if size >= MAX_READ_BYTES:
            return
        with contextlib.suppress(OSError, InvalidMessageError):
            body, left_at = _read_own(folder / name)
            size += len(body)
            yield messages.decode(RecordRequest, body), left_at


def _read_own(path: Path) -> tuple[bytes, float]:
    """Return the content of a file and its time; raises PermissionError if it belongs to another user."""
    with os.fdopen(open_regular(path), "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid not in (0, os.getuid()):
            raise PermissionError(f"{path} is somebody else's")
        # One byte more than is allowed, by which `decode` tells a longer file.
        return file.read(MAX_BODY_BYTES + 1), found.st_mtime
