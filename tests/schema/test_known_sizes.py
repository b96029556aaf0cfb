"""The decided sizes of a graph are found by the graph, most used first, whatever lies in the database."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.store import Store
from pygraphd.schema import messages, offline
from pygraphd.schema.messages import MAX_REQUEST_GRAPHS, Origin, RecordRequest
from tests.support.forged_database import copy_without_types
from tests.support.sized_records import HERE, WHOLE, asked, first_sizes, sized_record, sized_request

if TYPE_CHECKING:
    from pathlib import Path

OTHER = dataclasses.replace(HERE, gpu="NVIDIA H100")


def digest(size: int) -> str:
    return WHOLE.at((size,)).digest


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A database in which 8, 16, 24 and 32 were measured in this order, each by itself, and then used unequally."""
    with Store(tmp_path / "cache.db") as store:
        for size in (8, 16, 24, 32):
            store.record(sized_request(size), uid=7)
        store.record(sized_request(64, environment=OTHER), uid=7)
        provisional = sized_record(48, final=False)
        store.record(RecordRequest(HERE, Origin("here", "1"), (provisional,)), uid=7)
        elsewhere = sized_record(8, whole=dataclasses.replace(WHOLE, digest="0" * 64))
        store.record(RecordRequest(HERE, Origin("here", "1"), (elsewhere,)), uid=7)
        store.add_hits({(HERE.digest(), digest(24)): (5, 2.0), (HERE.digest(), digest(32)): (1, 3.0)})
    return tmp_path / "cache.db"


def test_the_most_used_come_first_and_then_those_that_were_measured_first(filled: Path) -> None:
    found = offline.read_sizes(filled, asked())

    assert first_sizes(found) == [24, 32, 8, 16]
    assert first_sizes(offline.read_sizes(filled, asked(most=2))) == [24, 32]
    assert first_sizes(offline.read_sizes(filled, asked(environment=OTHER))) == [64]
    lookup = messages.LookupRequest(HERE.digest(), tuple(each.entry.graph for each in found))
    assert set(offline.read_entries(filled, lookup)) == {each.entry for each in found}


def test_they_are_found_by_indices(filled: Path) -> None:
    with contextlib.closing(offline.connect(filled)) as connection:
        steps = connection.execute(f"EXPLAIN QUERY PLAN {offline.SELECT_SIZES}", ("", "", 1)).fetchall()

    plan = [row[3] for row in steps]
    assert plan[0].startswith("SEARCH graph USING INDEX graph_by_whole (whole=?)")
    assert plan[1].startswith("SEARCH decision USING INDEX")
    assert "(environment=? AND graph=?)" in plan[1]


def test_a_peer_that_does_not_say_of_what_a_graph_is_a_size_hides_nothing(tmp_path: Path) -> None:
    whole = sized_record(8)
    silent = dataclasses.replace(whole, graph=dataclasses.replace(whole.graph, whole=None))
    with Store(tmp_path / "cache.db") as store:
        for number, (record, known) in enumerate(((silent, []), (whole, [8]), (silent, [8]))):
            another = dataclasses.replace(record, recording_us=float(number))  # else it is stored already
            store.record(RecordRequest(HERE, Origin("here", "1"), (another,)), uid=7)
            assert first_sizes(offline.read_sizes(tmp_path / "cache.db", asked())) == known


HOSTILE = ("\x1b]0;\x07", b"\xff", float("inf"), 2**63 - 1, None, "8", "8,16", "9" * 5000)


@pytest.mark.parametrize("value", HOSTILE, ids=range(len(HOSTILE)))
def test_a_row_that_is_not_valid_hides_none_of_the_others(
    tmp_path: Path, filled: Path, value: object
) -> None:
    for table, key in (("decision", "graph"), ("graph", "digest")):
        with contextlib.closing(sqlite3.connect(filled)) as connection:
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
        for number, column in enumerate(columns):
            forged = tmp_path / f"{table}{number}.db"
            copy_without_types(filled, forged)
            with contextlib.closing(sqlite3.connect(forged)) as connection:
                change = f"UPDATE {table} SET {column} = ? WHERE {key} = ?"
                connection.execute(change, (value, digest(16)))
                connection.commit()

            found = offline.read_sizes(forged, asked())

            assert {8, 24, 32} <= set(first_sizes(found)) <= {8, 16, 24, 32}, (table, column)
            answer = messages.SizesAnswer(HERE.digest(), "1", WHOLE.digest, found)
            assert messages.decode(messages.SizesAnswer, messages.encode(answer)) == answer


def test_an_answer_with_the_most_and_longest_sizes_fits_into_a_body() -> None:
    sizes = [(2**62 + number,) * messages.MAX_INTEGER_INPUTS for number in range(MAX_REQUEST_GRAPHS)]
    entries = tuple(
        messages.SizedEntry(each, sized_record(*each).entry(0, "h" * messages.MAX_HOST, 1e9))
        for each in sizes
    )

    answer = messages.encode(messages.SizesAnswer(HERE.digest(), "1", WHOLE.digest, entries))

    assert len(answer) < messages.MAX_BODY_BYTES
