from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.reader import Reader
from pygraphd.daemon.store import Store
from pygraphd.schema import offline
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Entry,
    Graph,
    Kind,
    LookupAnswer,
    LookupRequest,
    Measurement,
    Origin,
    Record,
    RecordRequest,
    decode,
)
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from pathlib import Path

_HERE = Environment("NVIDIA H200", "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400")
_DIGESTS = [hashlib.sha256(bytes([n])).hexdigest() for n in range(4)]
_DECISIONS = [
    Decision(Deployment.KERNELS, Reason(ReasonCode.NO_DEVICE), policy=1),
    Decision(Deployment.GRAPH, Reason(ReasonCode.OTHER, "18 % faster [x]"), policy=2, final=False, calls=7),
    Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER, "größer"), policy=3, calls=2**53),
]


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    records = [
        Record(Graph(digest, Kind.INFERENCE, 0, 1, 3), decision)
        for digest, decision in zip(_DIGESTS, _DECISIONS, strict=False)
    ]
    with Store(tmp_path / "cache.db") as store:
        store.record(RecordRequest(_HERE, Origin("here", "0.1.0"), tuple(records)), uid=1000)
    return tmp_path / "cache.db"


def test_reads_what_the_store_wrote(filled: Path) -> None:
    entries = offline.read_entries(filled, LookupRequest(_HERE.digest(), tuple(_DIGESTS)))
    assert set(entries) == {
        Entry(digest, decision, uid=1000, host="here")
        for digest, decision in zip(_DIGESTS, _DECISIONS, strict=False)
    }


def _measured(deployment: Deployment, median_us: float) -> Measurement:
    return Measurement(deployment, 8, median_us, 0.0, median_us / 2, median_us + 1, 0.5)


@pytest.mark.parametrize(
    "newer",
    [
        (),
        (_measured(Deployment.KERNELS, 90.0),),
        (_measured(Deployment.KERNELS, 90.0), _measured(Deployment.GRAPH, 60.0)),
    ],
    ids=["measured once", "since then only another deployment", "since then the decided one"],
)
def test_a_decision_costs_what_it_was_taken_for(tmp_path: Path, newer: tuple[Measurement, ...]) -> None:
    graph = Graph(_DIGESTS[0], Kind.FORWARD, 0, 1, 1)
    graphs = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), policy=1)
    guess = Decision(Deployment.KERNELS, Reason(ReasonCode.TOO_FEW_CALLS), policy=1, final=False, calls=3)
    first = Record(graph, graphs, (_measured(Deployment.KERNELS, 100.0), _measured(Deployment.GRAPH, 50.0)))
    elsewhere = dataclasses.replace(_HERE, gpu="NVIDIA A100")
    with Store(tmp_path / "cache.db") as store:
        store.record(RecordRequest(_HERE, Origin("here", "1"), (first,)), uid=7)
        store.record(RecordRequest(_HERE, Origin("there", "1"), (Record(graph, guess, newer),)), uid=8)
        other = Record(graph, graphs, (_measured(Deployment.GRAPH, 1.0),))
        store.record(RecordRequest(elsewhere, Origin("elsewhere", "1"), (other,)), uid=9)

    found = offline.read_entries(tmp_path / "cache.db", LookupRequest(_HERE.digest(), (_DIGESTS[0],)))

    (entry,) = found
    assert entry.measured_at == pytest.approx(time.time(), abs=60)
    assert entry == Entry(_DIGESTS[0], graphs, 7, "here", 50.0, entry.measured_at, 25.0, 51.0)


def test_a_lookup_searches_one_table_by_its_key(filled: Path) -> None:
    with contextlib.closing(offline.connect(filled)) as connection:
        parameters = (_HERE.digest(), json.dumps(_DIGESTS))
        plan = [
            row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {offline.SELECT_DECISIONS}", parameters)
        ]
    (search,) = (step for step in plan if "decision" in step or "measurement" in step)
    assert search.startswith("SEARCH decision USING INDEX")
    assert not any("TEMP B-TREE" in step for step in plan)


def test_agrees_with_the_daemons_lookup(filled: Path) -> None:
    request = LookupRequest(_HERE.digest(), tuple(_DIGESTS[1:]))
    reader = Reader(filled)
    answer = decode(LookupAnswer, reader.find(request).encode())
    assert set(offline.read_entries(filled, request)) == set(answer.entries)
    reader.close()


def test_another_environment_has_no_entries(filled: Path) -> None:
    assert offline.read_entries(filled, LookupRequest("0" * 64, tuple(_DIGESTS))) == ()


def test_another_version_is_refused(filled: Path) -> None:
    connection = sqlite3.connect(filled)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(
        sqlite3.DatabaseError, match=f"database version 99, this program reads {offline.DATABASE_VERSION}"
    ):
        offline.read_entries(filled, LookupRequest(_HERE.digest(), ()))


@pytest.mark.parametrize("content", [b"", None], ids=["an empty file", "a file without tables"])
def test_a_database_that_is_being_made_has_no_entries(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "cache.db"
    if content is None:
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.close()
        assert path.stat().st_size
    else:
        path.write_bytes(content)

    assert offline.read_entries(path, LookupRequest(_HERE.digest(), tuple(_DIGESTS))) == ()


def test_a_missing_file_is_an_error_and_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(sqlite3.OperationalError):
        offline.read_entries(tmp_path / "none.db", LookupRequest(_HERE.digest(), ()))
    assert not list(tmp_path.iterdir())


def test_reads_while_the_writer_has_the_file_open(tmp_path: Path) -> None:
    request = RecordRequest(
        _HERE, Origin("h", "1"), (Record(Graph(_DIGESTS[0], Kind.FORWARD, 0, 1, 1), _DECISIONS[0]),)
    )
    with Store(tmp_path / "cache.db") as store:
        store.record(request, uid=0)
        found = offline.read_entries(tmp_path / "cache.db", LookupRequest(_HERE.digest(), (_DIGESTS[0],)))
    assert found == (Entry(_DIGESTS[0], _DECISIONS[0], uid=0, host="h"),)
