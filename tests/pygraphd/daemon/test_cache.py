from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from typing import TYPE_CHECKING, TypeVar

import pytest

from pygraphd.daemon.cache import Cache, Reader
from pygraphd.daemon.database_files import files_set_aside
from pygraphd.daemon.leases import Leases
from pygraphd.daemon.peer import Peer
from pygraphd.daemon.store import Store
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import LeaseRequest, LookupRequest, RecordRequest, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
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
        before = await cache.lookup(_lookup_of(make_request("a")))
        assert before.entries == ()
        assert (await cache.record(encode(make_request("a", "b")), ROOT)).stored == 2
        after = await cache.lookup(_lookup_of(make_request("a", "b", "c")))
        assert {entry.decision for entry in after.entries} == {make_request("a").records[0].decision}
        counted = dataclasses.asdict(cache.counters)
        assert {name: count for name, count in counted.items() if count} == {
            "lookups": 2, "graphs": 4, "hits": 2, "misses": 2, "records": 2,
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
        await cache.housekeep()
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
        answer = await cache.lookup(_lookup_of(make_request("a")))
        assert answer.entries == ()
        assert (await cache.record(encode(make_request("b")), ROOT)).stored == 1
        assert len((await cache.lookup(_lookup_of(make_request("b")))).entries) == 1
        assert await cache.describe() == (1, [])

    _with_cache(tmp_path, use)
    assert len(files_set_aside(database)) == 1


def test_a_reader_follows_its_file(tmp_path: Path, make_request: Callable[..., RecordRequest]) -> None:
    database = tmp_path / "cache.db"
    request = make_request("a")
    asked = LookupRequest(request.environment.digest(), (request.records[0].graph.digest,))
    reader = Reader(database)
    assert reader.lookup(asked) == ()
    with Store(database) as store:
        store.record(request, uid=0)
        assert len(reader.lookup(asked)) == 1
        database.unlink()
        assert reader.lookup(asked) == ()
        store.record(request, uid=0)
        assert len(reader.lookup(asked)) == 1
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
