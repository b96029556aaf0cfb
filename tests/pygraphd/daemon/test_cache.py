from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import sqlite3
import threading
from typing import TYPE_CHECKING, TypeVar

import pytest

from pygraphd.daemon.cache import Cache
from pygraphd.daemon.database_files import files_set_aside
from pygraphd.daemon.leases import Leases
from pygraphd.daemon.peer import Peer
from pygraphd.daemon.reader import Reader
from pygraphd.daemon.store import Store, StoreError
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import (
    Entry,
    LeaseRequest,
    LookupAnswer,
    LookupRequest,
    RecordRequest,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

T = TypeVar("T")
ROOT = Peer(pid=0, uid=0)


def _with_cache(home: Path, use: Callable[[Cache], Awaitable[T]]) -> T:
    """Run `use` on an open cache and close it."""

    async def run() -> T:
        locations = locate({"PYGRAPHD_HOME": str(home)})
        cache = Cache(locations, Store(locations.database), Leases(60.0))
        try:
            return await use(cache)
        finally:
            await cache.close()

    return asyncio.run(run())


def _lookup_of(request: RecordRequest) -> bytes:
    return encode(LookupRequest(request.environment.digest(), tuple(r.graph.digest for r in request.records)))


async def _entries(cache: Cache, body: bytes) -> tuple[Entry, ...]:
    return decode(LookupAnswer, await cache.lookup(body)).entries


def _hits(database: Path) -> list[tuple[int]]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute("SELECT hits FROM decision ORDER BY hits").fetchall()
    finally:
        connection.close()


def test_a_lookup_finds_what_was_recorded_and_counts(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    async def use(cache: Cache) -> None:
        before = await _entries(cache, _lookup_of(make_request("a")))
        assert before == ()
        assert (await cache.record(encode(make_request("a", "b")), ROOT)).stored == 2
        after = await _entries(cache, _lookup_of(make_request("a", "b", "c")))
        assert {entry.decision for entry in after} == {make_request("a").records[0].decision}
        counted = dataclasses.asdict(cache.counters)
        assert {name: count for name, count in counted.items() if count} == {
            "lookups": 2, "graphs": 4, "misses": 4, "unknown": 2, "other_policy": 2, "records": 2,
        }  # fmt: skip

    _with_cache(tmp_path, use)


def test_hits_are_written_in_batches_and_at_the_end(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    database = tmp_path / "cache.db"

    async def use(cache: Cache) -> None:
        await cache.record(encode(make_request("a", "b")), ROOT)
        for _ in range(3):
            await cache.lookup(_lookup_of(make_request("a")))
        assert _hits(database) == [(0,), (0,)]
        await cache.write_hits()
        assert _hits(database) == [(0,), (3,)]
        await cache.lookup(_lookup_of(make_request("a", "b")))

    _with_cache(tmp_path, use)
    assert _hits(database) == [(1,), (4,)]


def test_a_prune_counts_the_latest_hits(tmp_path: Path, make_request: Callable[..., RecordRequest]) -> None:
    async def use(cache: Cache) -> int:
        await cache.record(encode(make_request("a", "b")), ROOT)
        connection = sqlite3.connect(tmp_path / "cache.db")
        connection.execute("UPDATE decision SET created_at = 1")
        connection.commit()
        connection.close()
        await cache.lookup(_lookup_of(make_request("a")))
        return (await cache.prune(b'{"older_than_s": 60}')).entries

    assert _with_cache(tmp_path, use) == 1


def test_housekeeping_takes_in_the_spool(tmp_path: Path, make_request: Callable[..., RecordRequest]) -> None:
    async def use(cache: Cache) -> tuple[int | None, list[str]]:
        (tmp_path / "spool").mkdir()
        (tmp_path / "spool" / "1.json").write_bytes(encode(make_request("a", "b")))
        await cache.housekeep()
        assert cache.counters.spooled == 2
        return await cache.describe()

    assert _with_cache(tmp_path, use) == (2, [])


@pytest.mark.parametrize(
    "body", [b"", b"null", b'{"environment": 1, "graphs": []}', b'{"environment": 1e999}']
)
def test_bad_bodies_are_refused(tmp_path: Path, body: bytes) -> None:
    async def use(cache: Cache) -> None:
        for ask in (cache.lookup, lambda data: cache.record(data, ROOT), cache.prune):
            with pytest.raises(InvalidMessageError):
                await ask(body)
        assert cache.counters.lookups == 0

    _with_cache(tmp_path, use)


def test_a_file_that_turns_bad_is_a_miss_and_is_replaced(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    database = tmp_path / "cache.db"

    async def use(cache: Cache) -> None:
        await cache.record(encode(make_request("a")), ROOT)
        await cache.lookup(_lookup_of(make_request("a")))
        Store(database).close()
        with database.open("r+b") as stream:
            stream.write(b"garbage!" * 10000)
            stream.truncate(80000)
        # A second reader has nothing in its memory.
        cache._reader.close()
        answer = await _entries(cache, _lookup_of(make_request("a")))
        assert answer == ()
        assert (await cache.record(encode(make_request("b")), ROOT)).stored == 1
        assert len(await _entries(cache, _lookup_of(make_request("b")))) == 1
        assert await cache.describe() == (1, [])

    _with_cache(tmp_path, use)
    assert len(files_set_aside(database)) == 1


def test_a_reader_follows_its_file(tmp_path: Path, make_request: Callable[..., RecordRequest]) -> None:
    database = tmp_path / "cache.db"
    request = make_request("a")
    asked = LookupRequest(request.environment.digest(), (request.records[0].graph.digest,))
    reader = Reader(database)
    assert reader.find(asked).texts == {}
    with Store(database) as store:
        store.record(request, uid=0)
        assert len(reader.find(asked).texts) == 1
        database.unlink()
        assert reader.find(asked).texts == {}
        store.record(request, uid=0)
        assert len(reader.find(asked).texts) == 1
    reader.close()


def test_where_nothing_can_be_stored_nobody_waits_for_an_answer(
    tmp_path: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def use(cache: Cache) -> None:
        environment = make_request("a").environment.digest()
        asks = [encode(LeaseRequest(environment, name, ("a" * 64,))) for name in ("one", "two")]
        assert [len(cache.lease(ask, ROOT).granted) for ask in asks] == [1, 0]
        monkeypatch.setattr(cache._store, "_fault", "the disk is full")
        assert [len(cache.lease(ask, ROOT).granted) for ask in asks] == [1, 1]

    _with_cache(tmp_path, use)


@pytest.mark.parametrize("damage", ["deployment = 'OTHER'", "calls = -1", "host = CAST(x'ff00' AS TEXT)"])
def test_a_row_that_is_not_valid_hides_no_other_and_asks_for_no_check(
    tmp_path: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    request = make_request(*map(str, range(20)))
    bad = request.records[7].graph.digest

    async def use(cache: Cache) -> None:
        await cache.record(encode(request), ROOT)
        connection = sqlite3.connect(tmp_path / "cache.db")
        connection.execute(f"UPDATE decision SET {damage} WHERE graph = ?", (bad,))
        connection.commit()
        connection.close()
        monkeypatch.setattr(cache._store, "check", lambda: pytest.fail("the whole file is read"))
        found = await _entries(cache, _lookup_of(request))
        assert {entry.graph for entry in found} == {each.graph.digest for each in request.records} - {bad}
        assert await cache.describe() == (20, [])

    _with_cache(tmp_path, use)


def test_a_file_that_cannot_be_read_is_checked_once_a_housekeeping(
    tmp_path: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[int] = []

    async def use(cache: Cache) -> None:
        monkeypatch.setattr(cache._store, "check", lambda: checks.append(1))
        monkeypatch.setattr(cache._reader, "find", _raise)
        for expected in (1, 2):
            for _ in range(3):
                assert await _entries(cache, _lookup_of(make_request("a"))) == ()
            await cache.housekeep()
            assert len(checks) == expected

    _with_cache(tmp_path, use)


def _raise(_request: LookupRequest) -> None:
    raise sqlite3.OperationalError("disk I/O error")


def _transactions(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have the store's calls be noted: the names of those that begin a transaction, in order."""
    names: list[str] = []
    for name in ("record", "add_hits", "prune_some", "shrink_some"):
        original = getattr(cache._store, name)

        def noted(*args: object, name: str = name, original: Callable[..., object] = original) -> object:
            names.append(name)
            return original(*args)

        monkeypatch.setattr(cache._store, name, noted)
    return names


def test_a_record_is_stored_between_the_pieces_of_a_prune(
    tmp_path: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    many, more = make_request(*map(str, range(300)), gpu="NVIDIA A100"), make_request("new")

    async def use(cache: Cache) -> None:
        await cache.record(encode(many), ROOT)
        names = _transactions(cache, monkeypatch)
        pruning = asyncio.create_task(cache.prune(b'{"gpu": "A100"}'))
        while not names:
            await asyncio.sleep(0)
        stored, pruned = await cache.record(encode(more), ROOT), await pruning
        assert (pruned.entries, pruned.measurements, stored.stored) == (300, 600, 1)
        assert names.count("prune_some") == 6  # of 64 each, and one that finds no more
        assert names.index("record") < names.index("shrink_some")
        assert await cache.describe() == (1, [])

    _with_cache(tmp_path, use)


def test_an_ending_daemon_ends_a_prune_after_its_present_piece(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    async def use(cache: Cache) -> None:
        await cache.record(encode(make_request(*map(str, range(300)))), ROOT)
        cache.end_long_work()
        with pytest.raises(StoreError, match="64 entries were pruned: prune once more"):
            await cache.prune(b'{"gpu": "H200"}')
        assert await cache.describe() == (236, [])

    _with_cache(tmp_path, use)


def test_hits_are_written_in_portions_with_records_between(
    tmp_path: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    many = make_request(*map(str, range(400)))

    async def use(cache: Cache) -> None:
        await cache.record(encode(many), ROOT)
        await cache.lookup(_lookup_of(many))
        names = _transactions(cache, monkeypatch)
        writing = asyncio.create_task(cache.write_hits())
        while not names:
            await asyncio.sleep(0)
        await cache.record(encode(make_request("new")), ROOT)
        await writing
        assert (names.count("add_hits"), names.count("record")) == (4, 1)
        assert names[-1] == "add_hits"

    _with_cache(tmp_path, use)
    assert _hits(tmp_path / "cache.db") == [(0,)] + [(1,)] * 400


def test_waiting_hits_are_bounded(
    tmp_path: Path, make_request: Callable[..., RecordRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.daemon.cache.MAX_WAITING_HITS", 2)

    async def use(cache: Cache) -> None:
        await cache.record(encode(make_request("a", "b", "c")), ROOT)
        for _ in range(2):
            await cache.lookup(_lookup_of(make_request("a", "b", "c")))
        assert cache.counters.other_policy == 6

    _with_cache(tmp_path, use)
    assert _hits(tmp_path / "cache.db") == [(0,), (2,), (2,)]


@contextlib.contextmanager
def _busy_writer(cache: Cache) -> Iterator[None]:
    """Have the only writer of a cache be at work, as in a long transaction."""
    done = threading.Event()
    cache._writing.submit(done.wait)
    try:
        yield
    finally:
        done.set()


def test_a_miss_does_not_wait_for_the_writer_where_the_spool_is_empty(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    async def use(cache: Cache) -> None:
        (tmp_path / "spool").mkdir()
        with _busy_writer(cache):
            assert await _entries(cache, _lookup_of(make_request("a"))) == ()

    _with_cache(tmp_path, use)


def test_a_miss_does_not_wait_for_all_of_a_spool(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    async def use(cache: Cache) -> None:
        (tmp_path / "spool").mkdir()
        (tmp_path / "spool" / "1.json").write_bytes(encode(make_request("a")))
        with _busy_writer(cache):
            assert await _entries(cache, _lookup_of(make_request("a"))) == ()
        await cache.housekeep()
        assert len(await _entries(cache, _lookup_of(make_request("a")))) == 1

    _with_cache(tmp_path, use)


def test_a_miss_waits_for_a_record_that_came_after_the_spool_was_listed(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    async def use(cache: Cache) -> None:
        (tmp_path / "spool").mkdir()
        (tmp_path / "spool" / "1.json").write_bytes(encode(make_request("a")))
        with _busy_writer(cache):
            under_way = cache._ingestion()
            await asyncio.sleep(0)  # it asks for the list now
            await cache._run(cache._reading, lambda: None)  # and has it
            (tmp_path / "spool" / "2.json").write_bytes(encode(make_request("b")))
            lookup = asyncio.create_task(cache.lookup(_lookup_of(make_request("b"))))
            for _ in range(3):  # until it has read the database, and waits for the spool
                await cache._run(cache._reading, lambda: None)
            assert not under_way.done()
        assert len(decode(LookupAnswer, await lookup).entries) == 1

    _with_cache(tmp_path, use)


def test_only_large_lookups_are_handed_to_a_thread(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    async def use(cache: Cache) -> None:
        small, large = make_request(*map(str, range(20))), make_request(*map(str, range(1000)))
        await cache.record(encode(large), ROOT)
        done = threading.Event()
        cache._reading.submit(done.wait)
        slow = asyncio.create_task(cache.lookup(_lookup_of(large)))
        assert len(await _entries(cache, _lookup_of(small))) == 20
        assert not slow.done()
        done.set()
        assert len(decode(LookupAnswer, await slow).entries) == 1000

    _with_cache(tmp_path, use)
