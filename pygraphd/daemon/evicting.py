"""Eviction: chooses the entries that are deleted to keep the limits of size and age, and the time at which the file is packed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import sqlite3
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.daemon.pruning import PruneRequest
from pygraphd.schema import offline
from pygraphd.schema.durations import human_duration

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from pygraphd.daemon.pruning import PruneAnswer

_log = logging.getLogger(__name__)

LOOK_S = 3600.0
"""How often entries are looked for that were unused for too long: that takes a look at all of them."""
_SET_S = 3600.0
"""How far the clock is set before no age is believed for `LOOK_S`: a clock that is wrong for a moment must not empty the cache."""
_FILLED = 0.9
"""The share of the size limit down to which entries are deleted, so that not each record deletes some."""
_MUCH_TOO_LARGE = 1.25
"""The share of the size limit above which the file is packed although records have to wait for that."""
_LAST_USE = "max(created_at, coalesce(last_hit, 0.0))"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits in force: `size` in bytes of the database's used pages, `unused_s` in seconds since the last use; 0: none."""

    size: int = 0
    unused_s: float = 0.0


class Eviction:
    """Keeps the limits of one database; `limits` may be replaced at any time."""

    def __init__(self, path: Path, limits: Limits) -> None:
        self.limits = limits
        self._path = path
        self._next_look = self._next_age_look = 0.0
        self._must_pack = False
        self._clock_offset_s: float | None = None

    async def keep(
        self,
        prune: Callable[[PruneRequest], Awaitable[PruneAnswer]],
        pack: Callable[[], Awaitable[bool]],
        *,
        is_quiet: bool,
    ) -> int:
        """Delete entries beyond the limits; return their number. Raises what `prune` and `pack` raise.

        `pack` rewrites the file while records wait, and returns whether it could. It is called when `is_quiet`, or when the file has
        grown by a quarter beyond the limit without a quiet time.
        """
        if self._must_pack:
            await self._pack(pack, is_quiet or await self._is_too_large(_MUCH_TOO_LARGE))
            return 0
        age_s = await self._age()
        if age_s is None:
            return 0
        evicted = await prune(PruneRequest(older_than_s=age_s))
        _log.info("evicted %d entries unused for %s", evicted.entries, human_duration(age_s))
        # Entries unused for longest lie among others: each leaves a hole, and few pages become free.
        self._must_pack = await self._is_too_large()
        await self._pack(pack, is_quiet)
        return evicted.entries

    async def _age(self) -> float | None:
        now, limits = time.monotonic(), self.limits
        if now < self._next_look:
            return None
        if now < self._next_age_look:
            limits = dataclasses.replace(limits, unused_s=0.0)
        else:
            self._next_age_look = now + LOOK_S
            if self._was_clock_set(now):
                limits = dataclasses.replace(limits, unused_s=0.0)
        if limits == Limits():
            return None
        try:
            return await asyncio.to_thread(age_to_evict, self._path, limits, time.time())
        except (OSError, sqlite3.Error):
            return None  # there is no file, or lookups will say what is the matter with it

    def _was_clock_set(self, now: float) -> bool:
        """Return whether the clock was set by over `_SET_S` since the last look, at `now` by `time.monotonic`; sleep counts, too."""
        before, self._clock_offset_s = self._clock_offset_s, time.time() - now
        if before is None or abs(self._clock_offset_s - before) <= _SET_S:
            return False
        _log.warning("the clock was set: no entry is evicted for its age for %s", human_duration(LOOK_S))
        return True

    async def _is_too_large(self, share: float = 1.0) -> bool:
        limits = dataclasses.replace(self.limits, size=int(self.limits.size * share))
        try:
            return await asyncio.to_thread(is_too_large, self._path, limits)
        except (OSError, sqlite3.Error):
            return False  # as in `_age`

    async def _pack(self, pack: Callable[[], Awaitable[bool]], may_wait: bool) -> None:
        if not self._must_pack or not may_wait:
            return
        self._must_pack = False
        if not await pack():
            # Or more and more would be deleted, to no avail.
            self._next_look = time.monotonic() + LOOK_S
            _log.warning("%s: no room to pack it; the limits are not kept for now", self._path)


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
