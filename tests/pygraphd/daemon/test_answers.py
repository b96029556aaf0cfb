from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.answers import found_in
from pygraphd.daemon.reader import Reader
from pygraphd.daemon.store import Store
from pygraphd.schema import offline
from pygraphd.schema.messages import LookupAnswer, LookupRequest, RecordRequest, encode
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_DAMAGE = {
    "deployment": "'OTHER'",
    "calls": "-1",
    "policy": "-1",
    "uid": "-1",
    "host": "char(27)",
    "measured_at": "9e999",
}


def test_what_is_written_is_what_entries_are_encoded_to(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    """Of sound rows, rows without measurements, text that JSON escapes, and rows that are not valid."""
    request = make_request(*map(str, range(12)))
    graphs = tuple(each.graph.digest for each in request.records)
    asked = LookupRequest(request.environment.digest(), graphs)
    database = tmp_path / "cache.db"
    with Store(database) as store:
        store.record(request, uid=7)
    changes = [f"{column} = {value}" for column, value in _DAMAGE.items()]
    changes += [
        "reason = 'of a newer version'",
        "measured_at = NULL",
        """host = 'a "host" é'""",
        "detail = 'a\\b'",
    ]
    with sqlite3.connect(database) as connection:
        for graph, change in zip(graphs, changes, strict=False):
            connection.execute(f"UPDATE decision SET {change} WHERE graph = ?", (graph,))
    connection.close()
    reader = Reader(database)
    found = reader.find(asked)
    reader.close()
    entries = offline.read_entries(database, asked)
    assert found.encode() == encode(LookupAnswer(asked.environment, VERSION, entries))
    assert set(found.texts) == {entry.graph for entry in entries} == set(graphs[len(_DAMAGE) :])


@pytest.mark.parametrize("cost_us", [float("inf"), -1.0, 4e9, "1", True])
def test_no_number_out_of_range_is_written(cost_us: object) -> None:
    decision = ("KERNELS", "no_gain", "", "not_stated", "", 1, 1, 0)
    asked = LookupRequest("e" * 64, ("a" * 64,))
    sound = ("a" * 64, *decision, 0, "", 1.0, 2.0, 3.0, 4.0)
    assert found_in(asked, [sound]).unusable == {"a" * 64: "other_policy"}
    assert found_in(asked, [(*sound[:11], cost_us, *sound[12:])]).texts == {}
