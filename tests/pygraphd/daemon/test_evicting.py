"""Limits of size and age: what was unused for longest goes first."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon import evicting
from pygraphd.daemon.cache import Cache
from pygraphd.daemon.evicting import Eviction, Limits, age_to_evict, used_bytes
from pygraphd.daemon.leases import Leases
from pygraphd.daemon.pruning import PruneAnswer
from pygraphd.daemon.store import Store
from pygraphd.schema import offline
from pygraphd.schema.locations import locate
from tests.support.stepped_clock import SteppedClock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.daemon.pruning import PruneRequest
    from pygraphd.schema.messages import RecordRequest

DAY_S = 86400.0


def fill(database: Path, request: RecordRequest) -> list[str]:
    """Record a request as if its entries had been decided a day after each other, until today; return their graphs."""
    with Store(database) as store:
        store.record(request, uid=0)
    graphs = [record.graph.digest for record in request.records]
    now = time.time()
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        connection.executemany(
            "UPDATE decision SET created_at = ? WHERE graph = ?",
            [(now - DAY_S * (len(graphs) - index), graph) for index, graph in enumerate(graphs)],
        )
    return graphs


def housekeep(home: Path, limits: Limits) -> int:
    """Keep house once, under some limits; return how many entries were evicted."""

    async def run() -> int:
        locations = locate({"PYGRAPHD_HOME": str(home)})
        cache = Cache(locations, Store(locations.database), Leases(60.0), limits)
        try:
            await cache.housekeep()
            return cache.counters.evicted
        finally:
            await cache.close()

    return asyncio.run(run())


def left(database: Path) -> set[str]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return {graph for (graph,) in connection.execute("SELECT graph FROM decision")}


def size(database: Path) -> int:
    with contextlib.closing(offline.connect(database)) as connection:
        return used_bytes(connection)


def test_over_the_size_limit_what_was_unused_for_longest_goes(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    database = tmp_path / "cache.db"
    graphs = fill(database, make_request(*map(str, range(300))))
    often = graphs[::4]  # so that each page keeps some, and none becomes free by itself
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        moments = [(time.time() + index, graph) for index, graph in enumerate(often)]
        connection.executemany("UPDATE decision SET last_hit = ? WHERE graph = ?", moments)
    limit = size(database) * 3 // 4

    evicted = housekeep(tmp_path, Limits(size=limit))

    assert 75 <= evicted < 150  # 0.1 below a limit a quarter below what was used, and fixed costs
    assert size(database) <= limit
    assert database.stat().st_size <= limit  # given back to the file system
    unused = [graph for graph in graphs if graph not in often]
    assert left(database) == {*often, *unused[evicted:]}
    assert housekeep(tmp_path, Limits(size=limit)) == 0


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (0.99, ["pruned", "10 evicted", "0 evicted", "packed", "0 evicted", "0 evicted"]),
        # Records wait for it rather than have the file grow in a time that is never quiet.
        (0.75, ["pruned", "10 evicted", "packed", "0 evicted", "0 evicted", "0 evicted"]),
    ],
)
def test_the_file_is_packed_while_nobody_would_wait_for_it_and_never_in_vain(
    tmp_path: Path, make_request: Callable[..., RecordRequest], share: float, expected: list[str]
) -> None:
    database = tmp_path / "cache.db"
    fill(database, make_request(*map(str, range(100))))
    done: list[str] = []

    async def prune(request: PruneRequest) -> PruneAnswer:
        done.append("pruned")  # and freed no page
        return PruneAnswer(10, 20, 0, request.dry_run)

    async def pack() -> bool:
        done.append("packed")
        return False

    async def keep() -> None:
        eviction = Eviction(database, Limits(size=int(size(database) * share)))
        for is_quiet in (False, False, True, True):
            evicted = await eviction.keep(prune, pack, is_quiet=is_quiet)
            done.append(f"{evicted} evicted")

    asyncio.run(keep())
    assert done == expected


def test_what_was_unused_for_too_long_goes(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    database = tmp_path / "cache.db"
    graphs = fill(database, make_request("a", "b", "c", "d"))

    assert housekeep(tmp_path, Limits(unused_s=30 * DAY_S)) == 0
    assert housekeep(tmp_path, Limits(unused_s=2.5 * DAY_S)) == 2
    assert left(database) == set(graphs[2:])


def test_a_clock_that_is_set_evicts_nothing_until_it_has_stayed_so(
    tmp_path: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    database, clock = tmp_path / "cache.db", SteppedClock()
    fill(database, make_request("a", "b"))
    real, ahead_s = time.time(), 0.0
    stands_in = SimpleNamespace(monotonic=clock.now, time=lambda: real + clock.now() + ahead_s)
    monkeypatch.setattr(evicting, "time", stands_in)
    ages: list[float | None] = []

    async def prune(request: PruneRequest) -> PruneAnswer:
        ages.append(request.older_than_s)
        return PruneAnswer(0, 0, 0, request.dry_run)

    async def pack() -> bool:
        return True

    async def look(eviction: Eviction, ahead: float) -> list[float | None]:
        nonlocal ahead_s
        ahead_s = ahead
        clock.sleep(evicting.LOOK_S)
        ages.clear()
        await eviction.keep(prune, pack, is_quiet=True)
        return [*ages]

    async def run() -> None:
        eviction, year_s = Eviction(database, Limits(unused_s=30 * DAY_S)), 365 * DAY_S
        looks = [await look(eviction, ahead) for ahead in (0, year_s, 0, year_s, year_s)]
        assert looks == [[], [], [], [], [30 * DAY_S]]

    asyncio.run(run())


def test_entries_of_one_moment_or_of_the_future_are_evicted_all_the_same(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    database = tmp_path / "cache.db"
    fill(database, make_request(*map(str, range(100))))
    for moment in (1e9, 1e11):
        with contextlib.closing(sqlite3.connect(database)) as connection, connection:
            connection.execute("UPDATE decision SET created_at = ?", (moment,))
        age = age_to_evict(database, Limits(size=size(database) - 1), time.time())
        assert age is not None
        assert age > 0
    assert age_to_evict(database, Limits(), time.time()) is None
