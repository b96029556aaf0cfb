"""What is counted, under which reason, and what survives the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.cache import Cache
from pygraphd.daemon.leases import Leases
from pygraphd.daemon.peer import Peer
from pygraphd.daemon.statistics import MISSES, Counters
from pygraphd.daemon.store import Store
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import Deployment, LeaseRequest, LookupRequest, Measurement, encode
from pygraphd.schema.policy import POLICY_VERSION

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from pygraphd.daemon.statistics import Stored
    from pygraphd.schema.messages import RecordRequest

ROOT = Peer(pid=0, uid=0)


def today(request: RecordRequest, deployment: Deployment = Deployment.GRAPH) -> RecordRequest:
    """Return the request with decisions of this version's policy, which rest on a GRAPH that saves 30 us of host time a call."""
    measured = (
        Measurement(Deployment.KERNELS, 12, 100.0, 1.0, 80.0, 50.0, 0.5),
        Measurement(Deployment.GRAPH, 10, 100.0, 1.0, 50.0, 50.0, 0.5),
    )
    records = tuple(
        dataclasses.replace(
            record,
            decision=dataclasses.replace(record.decision, policy=POLICY_VERSION, deployment=deployment),
            measurements=measured,
            recording_us=2e6,
        )
        for record in request.records
    )
    return dataclasses.replace(request, records=records)


def lookup(*requests: RecordRequest) -> bytes:
    graphs = tuple(record.graph.digest for request in requests for record in request.records)
    return encode(LookupRequest(requests[0].environment.digest(), graphs))


def with_cache(home: Path, use: Callable[[Cache], Awaitable[None]]) -> None:
    """Run `use` on an open cache, as a daemon does between its start and its end."""

    async def run() -> None:
        locations = locate({"PYGRAPHD_HOME": str(home)})
        cache = Cache(locations, Store(locations.database), Leases(60.0))
        try:
            await use(cache)
        finally:
            await cache.close()

    asyncio.run(run())


def ever(home: Path) -> Stored | None:
    with Store(home / "cache.db") as store:
        return store.statistics()


def test_each_miss_has_a_reason(tmp_path: Path, make_request: Callable[..., RecordRequest]) -> None:
    asked = make_request("usable", "leased", "new", "elsewhere", "old policy")

    async def use(cache: Cache) -> None:
        await cache.record(encode(today(make_request("usable"))), ROOT)
        await cache.record(encode(today(make_request("provisional", final=False))), ROOT)
        await cache.record(encode(make_request("old policy")), ROOT)
        await cache.record(encode(today(make_request("elsewhere", gpu="NVIDIA A100"))), ROOT)
        leased = make_request("leased").records[0].graph.digest
        cache.lease(encode(LeaseRequest(asked.environment.digest(), "one", (leased,))), ROOT)
        await cache.lookup(lookup(asked, make_request("provisional")))
        assert (cache.counters.graphs, cache.counters.hits, cache.counters.misses) == (6, 1, 5)
        assert {name: getattr(cache.counters, name) for name in MISSES} == {
            "unknown": 1, "other_environment": 1, "being_measured": 1, "provisional": 1, "other_policy": 1,
            "unreadable": 0,
        }  # fmt: skip

    with_cache(tmp_path, use)


@pytest.mark.parametrize(
    ("deployment", "measuring_s", "recording_s"),
    # 12 calls as KERNELS that took 30 us longer; 10 as GRAPH that took no longer, and a recording that need not be made.
    [(Deployment.GRAPH, 360e-6, 0.0), (Deployment.KERNELS, 0.0, 2.0)],
)
def test_a_hit_saves_what_its_entry_cost(
    tmp_path: Path,
    make_request: Callable[..., RecordRequest],
    deployment: Deployment,
    measuring_s: float,
    recording_s: float,
) -> None:
    async def use(cache: Cache) -> None:
        await cache.record(encode(today(make_request("a"), deployment)), ROOT)
        await cache.record(encode(make_request("of another policy")), ROOT)
        for _ in range(3):
            await cache.lookup(lookup(make_request("a", "of another policy")))
        await cache.write_hits()
        assert cache.counters.measuring_saved_s == pytest.approx(3 * measuring_s)
        assert cache.counters.recording_saved_s == pytest.approx(3 * recording_s)

    with_cache(tmp_path, use)
    stored = ever(tmp_path)
    assert stored is not None
    assert stored.counters.measuring_saved_s == pytest.approx(3 * measuring_s)


def test_times_that_no_program_records_save_nothing(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    asked = today(make_request("a"), Deployment.KERNELS)

    async def use(cache: Cache) -> None:
        await cache.record(encode(asked), ROOT)
        with contextlib.closing(sqlite3.connect(tmp_path / "cache.db")) as database, database:
            database.execute("UPDATE decision SET recording_us = 9e999")
            database.execute("UPDATE measurement SET host_us = 9e999 WHERE deployment = 'GRAPH'")
        await cache.lookup(lookup(asked))
        await cache.write_hits()
        assert (cache.counters.measuring_saved_s, cache.counters.recording_saved_s) == (0, 0)

    with_cache(tmp_path, use)


@pytest.mark.parametrize("first", ["hits", "counts"])
def test_all_time_begins_with_the_first_daemon_and_not_with_its_first_flush(
    tmp_path: Path, make_request: Callable[..., RecordRequest], first: str
) -> None:
    async def use(cache: Cache) -> None:
        cache.counted_since = 1000.0
        await cache.record(encode(today(make_request("a"))), ROOT)
        await cache.lookup(lookup(make_request("a")))
        await (cache.write_hits() if first == "hits" else cache.write_statistics())
        told = await cache.statistics()
        assert told is not None
        assert told.since == 1000.0

    with_cache(tmp_path, use)
    stored = ever(tmp_path)
    assert stored is not None
    assert stored.since == 1000.0


def test_counts_outlive_the_daemon_until_they_are_begun_anew(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    async def miss(cache: Cache) -> None:
        await cache.lookup(lookup(make_request("a")))
        await cache.housekeep()
        await cache.lookup(lookup(make_request("a")))
        assert cache.counters.misses == 2

    with_cache(tmp_path, miss)
    with_cache(tmp_path, miss)
    first = ever(tmp_path)
    assert first is not None
    assert dataclasses.asdict(first.counters) == dataclasses.asdict(
        Counters(lookups=4, graphs=4, misses=4, unknown=4)
    )

    async def begin_anew(cache: Cache) -> None:
        await cache.lookup(lookup(make_request("a")))
        await cache.housekeep()
        await cache.zero_statistics()
        assert cache.counters == Counters()
        await cache.lookup(lookup(make_request("a")))
        told = await cache.statistics()
        assert told is not None
        assert (told.counters.misses, told.since > first.since) == (1, True)

    with_cache(tmp_path, begin_anew)
    second = ever(tmp_path)
    assert second is not None
    assert second.counters.misses == 1
