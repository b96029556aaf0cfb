"""Limits of the cache: which entries are deleted since they were unused for longest. `cache` deletes them as a prune does."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema import offline

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

_FILLED = 0.9
"""The share of the size limit down to which entries are deleted, so that not each record deletes some."""
_LAST_USE = "max(created_at, coalesce(last_hit, 0.0))"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits in force: `size` in bytes of the database's used pages, `unused_s` in seconds since the last use; 0: none."""

    size: int = 0
    unused_s: float = 0.0


def age_to_evict(path: Path, limits: Limits, now: float) -> float | None:
    """Return the age, in seconds since the last use, above which entries are to be deleted; None if all may stay.

    Reads the file on a connection of its own; raises OSError or sqlite3.Error if it cannot be read.
    """
    with contextlib.closing(offline.connect(path)) as connection:
        used = used_bytes(connection)
        if 0 < limits.size < used:
            return _age_of_share(connection, 1 - _FILLED * limits.size / used, now)
        if limits.unused_s:
            unused = connection.execute(
                f"SELECT EXISTS (SELECT 1 FROM decision WHERE {_LAST_USE} < ?)", (now - limits.unused_s,)
            )
            return limits.unused_s if unused.fetchone()[0] else None
    return None


def is_too_large(path: Path, limits: Limits) -> bool:
    """Return whether the file holds more than the limit; raises OSError or sqlite3.Error if it cannot be read."""
    with contextlib.closing(offline.connect(path)) as connection:
        return 0 < limits.size < used_bytes(connection)


def used_bytes(connection: sqlite3.Connection) -> int:
    """Return the bytes of the pages that hold anything, whether they lie in the file or still in the log."""
    pages, free, size = (
        int(connection.execute(f"PRAGMA {name}").fetchone()[0])
        for name in ("page_count", "freelist_count", "page_size")
    )
    return (pages - free) * size


def _age_of_share(connection: sqlite3.Connection, share: float, now: float) -> float | None:
    """Return the age of the youngest entry in the oldest `share` of all."""
    (entries,) = connection.execute("SELECT count(*) FROM decision").fetchone()
    nth = f"SELECT {_LAST_USE} FROM decision ORDER BY 1 LIMIT 1 OFFSET ?"
    row = connection.execute(nth, (max(math.ceil(entries * share) - 1, 0),)).fetchone()
    # An entry of the future, after the clock was set back, is deleted last.
    return None if row is None else max(now - row[0], 1e-3)
