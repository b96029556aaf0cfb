"""Measurements whose decision is gone keep nothing from being deleted, and go with the graph or environment that they are of."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.cache import Cache
from pygraphd.daemon.evicting import Limits
from pygraphd.daemon.leases import Leases
from pygraphd.daemon.pruning import PruneRequest
from pygraphd.daemon.store import Store
from pygraphd.schema.locations import locate
from tests.support.cli_command import locations, pygraphd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import RecordRequest

__all__ = ["locations"]  # a fixture

H200, A100 = "NVIDIA H200", "NVIDIA A100"
_TABLES = ("decision", "measurement", "graph", "environment")


def _execute(database: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(database)) as connection, connection:
        return connection.execute(statement, values).fetchall()


def _rows(database: Path) -> dict[str, int]:
    return {table: int(str(_execute(database, f"SELECT count(*) FROM {table}")[0][0])) for table in _TABLES}


@pytest.fixture
def filled(locations: Locations, make_request: Callable[..., RecordRequest]) -> Path:
    """Return a database with two graphs on two GPUs, where graph "b" has lost its decision on both, and "a" on one."""
    with Store(locations.database) as store:
        for gpu in (H200, A100):
            store.record(make_request("a", "b", gpu=gpu), uid=0)
    lost = make_request("b").records[0].graph.digest
    _execute(locations.database, "DELETE FROM decision WHERE graph = ?", lost)
    other = make_request(gpu=A100).environment.digest()
    _execute(locations.database, "DELETE FROM decision WHERE environment = ?", other)
    assert _rows(locations.database) == {"decision": 1, "measurement": 8, "graph": 2, "environment": 2}
    return locations.database


@pytest.mark.parametrize("words", ["clear --yes", "prune --gpu H200", "delete GRAPH"])
def test_a_command_deletes_what_it_names(
    filled: Path,
    make_request: Callable[..., RecordRequest],
    capsys: pytest.CaptureFixture[str],
    words: str,
) -> None:
    graph = make_request("a").records[0].graph.digest

    assert pygraphd("cache", *words.replace("GRAPH", graph).split()) == 0

    assert capsys.readouterr().out.startswith("deleted 1 entry and 2 measurements")
    assert _rows(filled) == dict.fromkeys(_TABLES, 0)


def test_an_eviction_deletes_what_is_too_old(filled: Path) -> None:
    _execute(filled, "UPDATE decision SET created_at = 1.0")

    async def evicted() -> int:
        cache = Cache(locate(), Store(filled), Leases(60.0), Limits(unused_s=60.0))
        try:
            await cache.housekeep()
            return cache.counters.evicted
        finally:
            await cache.close()

    assert asyncio.run(evicted()) == 1
    assert _rows(filled) == dict.fromkeys(_TABLES, 0)


def test_what_other_entries_name_stays(
    locations: Locations, make_request: Callable[..., RecordRequest]
) -> None:
    requests = {gpu: make_request("a", "b", gpu=gpu) for gpu in (H200, A100)}
    kept, lost = (record.graph.digest for record in requests[H200].records)
    with Store(locations.database) as store:
        for request in requests.values():
            store.record(request, uid=0)
        _execute(locations.database, "DELETE FROM decision WHERE graph = ?", lost)

        answer = store.prune(PruneRequest(gpu="A100"))

        assert (answer.entries, answer.measurements) == (1, 2)
    assert _execute(locations.database, "SELECT graph FROM decision") == [(kept,)]
    assert _execute(locations.database, "SELECT gpu FROM environment") == [(H200,)]
    # Those of the other graph may be of an environment that is in use.
    assert _rows(locations.database) == {"decision": 1, "measurement": 4, "graph": 2, "environment": 1}
