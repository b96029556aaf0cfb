"""Databases that earlier versions made, each by its own migrations and with rows as it wrote them, are brought up to date."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from alembic import command

from pygraphd.cli.catalogue import Catalogue
from pygraphd.cli.explain import explain_entry
from pygraphd.daemon import database as database_module
from pygraphd.daemon.store import Store
from pygraphd.daemon.tables import APPLICATION_ID
from pygraphd.errors import CommandError
from pygraphd.schema.messages import Decision, Deployment, LookupRequest
from pygraphd.schema.offline import DATABASE_VERSION, read_entries
from pygraphd.schema.policy import POLICY_VERSION, TOO_FEW_CALLS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pygraphd.schema.messages import Entry

HERE = "e" * 64
"""The one environment's digest."""
_E, _A, _B, _C = (f"'{digit * 64}'" for digit in "eabc")
_HERE = (
    f"INSERT INTO environment VALUES ({_E}, 'NVIDIA H200', '9.0', 132, 143771, '', '2.13.0', '3.5', '13.0', '580.1', '91400')",
)


def query(database: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def make(database: Path, version: int, rows: Sequence[str]) -> None:
    """Make the file as a version made it."""
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        command.upgrade(database_module.migration_config(connection), f"{version:04}")
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
        connection.exec_driver_sql(f"PRAGMA user_version={version}")
        for statement in (*_HERE, *rows):
            connection.exec_driver_sql(statement)
    engine.dispose()


def brought_up_to_date(database: Path) -> None:
    with Store(database) as store:
        assert store.problems() == []
    assert query(database, "PRAGMA user_version") == [(DATABASE_VERSION,)]


def found(database: Path, digits: str) -> dict[str, Entry]:
    """Return by the digit that its graph's digest repeats what a client finds."""
    asked = LookupRequest(HERE, tuple(digit * 64 for digit in digits))
    return {entry.graph[0]: entry for entry in read_entries(database, asked)}


# --- version 1 ---

_ROWS_OF_VERSION_1 = (
    f"INSERT INTO graph VALUES ({_A}, 'forward', 0, 1, 9), ({_B}, 'backward', 0, 1, 9), ({_C}, 'inference', 0, 1, 9)",
    f"INSERT INTO decision VALUES ('1', {_E}, {_A}, 'RELOCATE', 'RELOCATE is faster', 1, 1, 0, 1000, 500.25, 7, 900.5)",
    f"INSERT INTO decision VALUES ('2', {_E}, {_B}, 'LAUNCH', 'its forward is in no tree, so all that was saved for it "
    "would have to be copied', 1, 1, 0, 1000, 600.5, 0, NULL)",
    # Measured once, but what holds now is a rule.
    f"INSERT INTO decision VALUES ('3', {_E}, {_C}, 'LAUNCH', 'no CUDA device', 1, 1, 0, 0, 700.0, 0, NULL)",
    *(
        "INSERT INTO measurement (environment, graph, deployment, samples, median_us, mad_us, host_us, span_us, busy, host, "
        f"version, uid, measured_at) VALUES ({_E}, {graph}, '{deployment}', 8, {median}, 1.0, 1.0, 1.0, 0.5, 'h', '0.1.0', 1000, {time})"
        for graph, deployment, median, time in (
            (_A, "LAUNCH", 100.0, 500.25),
            (_A, "RELOCATE", 50.0, 500.25),
            (_B, "LAUNCH", 100.0, 600.5),
            (_B, "TREES", 50.0, 600.5),
            (_C, "LAUNCH", 100.0, 650.0),
        )
    ),
)


def test_a_database_of_version_1_is_brought_up_to_date(database: Path) -> None:
    make(database, 1, _ROWS_OF_VERSION_1)
    brought_up_to_date(database)
    columns = "deployment, reason, uid, created_at, hits, last_hit, host, measured_at"
    assert query(database, f"SELECT {columns} FROM decision ORDER BY graph") == [
        ("GRAPH", "GRAPH is faster", 1000, 500.25, 7, 900.5, "", 500.25),
        ("KERNELS", "no CUDA device", 0, 700.0, 0, None, "", None),
    ]
    rows = "graph, deployment, median_us, measured_at, host_mad_us, span_mad_us"
    assert query(database, f"SELECT {rows} FROM measurement ORDER BY id") == [
        ("a" * 64, "KERNELS", 100.0, 500.25, None, None),
        ("a" * 64, "GRAPH", 50.0, 500.25, None, None),
        ("c" * 64, "KERNELS", 100.0, 650.0, None, None),
    ]
    backup = database.with_name("cache.db.backup-v1")
    assert query(backup, "PRAGMA user_version") == [(1,)]
    assert query(backup, "SELECT count(*) FROM decision") == [(3,)]


def test_a_database_of_version_1_answers_lookups_when_it_is_up_to_date(database: Path) -> None:
    make(database, 1, _ROWS_OF_VERSION_1)
    with pytest.raises(sqlite3.DatabaseError, match="database version 1, this program reads"):
        found(database, "abc")
    brought_up_to_date(database)
    assert {graph: entry.cost_us for graph, entry in found(database, "abc").items()} == {"a": 50.0, "c": None}


# --- version 4: PyTorch's trees beside launching and relocating ---

_TIMES = {"LAUNCH": 100.0, "TREES": 60.0, "RELOCATE": 50.0}


def _decided(
    digit: str,
    deployment: str,
    reason: str,
    measured: Sequence[str],
    final: int = 1,
    others: Sequence[str] = (),
    kind: str = "forward",
) -> list[str]:
    """Return the statements with which version 4 stored one decision, with what it rests on and what was measured before."""
    graph, at = f"'{digit * 64}'", "NULL" if not measured else "500.0"
    figures = [*((name, 400.0) for name in others), *((name, 500.0) for name in measured)]
    return [
        f"INSERT INTO graph VALUES ({graph}, '{kind}', 0, 1, 9, '')",
        f"INSERT INTO decision VALUES ('{digit}', {_E}, {graph}, '{deployment}', '{reason}', 4, {final}, 12, 1000, 500.0, 3, NULL, "
        f"'host-a', {at}, 1, 12.5)",
        *(
            "INSERT INTO measurement (environment, graph, deployment, samples, median_us, mad_us, host_us, span_us, busy, host, "
            f"version, uid, measured_at) VALUES ({_E}, {graph}, '{name}', 12, {_TIMES[name]}, 1.0, {_TIMES[name]}, 30.0, 0.5, "
            f"'host-a', '0.1.0', 1000, {time})"
            for name, time in figures
        ),
    ]


_BOTH, _ALL, _NO_RELOCATE, _NO_LAUNCH = (
    ("LAUNCH", "RELOCATE"),
    ("LAUNCH", "TREES", "RELOCATE"),
    ("LAUNCH", "TREES"),
    ("TREES", "RELOCATE"),
)
_ROWS_OF_VERSION_4 = [
    *_decided("1", "LAUNCH", "no gain over LAUNCH beyond noise and 2 %", _BOTH),
    *_decided("2", "RELOCATE", "RELOCATE is faster", _BOTH),
    *_decided("3", "RELOCATE", "RELOCATE is faster", _ALL),
    *_decided("4", "TREES", "TREES is faster", _ALL),
    *_decided("5", "TREES", "its backward gains more in trees than this graph loses there", _NO_RELOCATE),
    *_decided("6", "TREES", "TREES is faster; could not be relocated: no room", _NO_RELOCATE, final=0),
    *_decided("7", "TREES", "TREES is faster", _NO_LAUNCH),
    *_decided("8", "LAUNCH", "no gain over LAUNCH beyond noise and 2 %", _NO_RELOCATE),
    *_decided("9", "TREES", "its attention keeps random numbers elsewhere if captured", ()),
    *_decided("a", "LAUNCH", "it cannot be relocated: a LAUNCH node", ()),
    *_decided("b", "LAUNCH", "too few calls to measure", ("LAUNCH",), final=0),
    *_decided("c", "LAUNCH", "only LAUNCH in this mode: all else needs reduce-overhead or max-autotune", ()),
    # What it rests on now lacks RELOCATE, and that it was measured earlier says nothing.
    *_decided("d", "TREES", "TREES is faster", _NO_RELOCATE, others=_BOTH),
]


@pytest.fixture
def of_version_4(database: Path) -> Path:
    make(database, 4, _ROWS_OF_VERSION_4)
    brought_up_to_date(database)
    return database


def test_of_trees_nothing_is_left_but_what_the_others_figures_decide(of_version_4: Path) -> None:
    rows = query(of_version_4, "SELECT id, deployment, reason, final, policy FROM decision ORDER BY id")
    assert rows == [
        ("1", "KERNELS", "no gain over KERNELS beyond noise and 2 %", 1, 4),
        ("2", "GRAPH", "GRAPH is faster", 1, 4),
        ("3", "GRAPH", "GRAPH is faster", 1, 4),
        ("4", "KERNELS", "graphs of PyTorch were chosen before, and are no choice any more", 1, 4),
        ("a", "KERNELS", "it cannot be relocated: a LAUNCH node", 1, 4),
        ("b", "KERNELS", "too few calls to measure", 0, 4),
        ("c", "KERNELS", "only KERNELS in this mode: all else needs reduce-overhead or max-autotune", 1, 4),
    ]
    measured = query(of_version_4, "SELECT DISTINCT substr(graph, 1, 1), deployment FROM measurement")
    assert set(measured) == {
        *((graph, deployment) for graph in "1234" for deployment in ("KERNELS", "GRAPH")),
        ("b", "KERNELS"),
    }
    assert query(of_version_4, "SELECT count(*), sum(hits) FROM decision") == [(7, 21)]
    graphs = query(of_version_4, "SELECT substr(digest, 1, 1) FROM graph ORDER BY 1")
    assert "".join(str(graph) for (graph,) in graphs) == "1234abc"
    backup = of_version_4.with_name("cache.db.backup-v4")
    assert query(backup, "SELECT count(*) FROM decision") == [(13,)]


def test_a_starting_daemon_decides_anew_what_rests_on_both(of_version_4: Path) -> None:
    with Store(of_version_4) as store:
        assert store.rederive_outdated(60.0) == (5, 0)

    entries = found(of_version_4, "123456789abcd")
    assert {graph for graph, entry in entries.items() if entry.decision.policy == POLICY_VERSION} == set(
        "1234b"
    )
    with Catalogue(of_version_4) as catalogue:
        for graph in "1234":
            (details,) = catalogue.of_graph(graph * 64)
            assert [row["median_us"] for row in explain_entry(details).figures] == [100.0, 50.0]
    assert len({entries[graph].decision for graph in "1234"}) == 1
    assert (entries["4"].decision.deployment, entries["4"].cost_us) == ("GRAPH", 50.0)
    guess = Decision(Deployment.KERNELS, TOO_FEW_CALLS, POLICY_VERSION, final=False, calls=12)
    assert entries["b"].decision == guess


def test_what_a_command_cannot_read_before_says_how_it_is_brought_up_to_date(database: Path) -> None:
    make(database, 4, _ROWS_OF_VERSION_4)
    with (
        Catalogue(database) as catalogue,
        pytest.raises(CommandError, match="it is of version 4, and `pygraphd start` brings it up to date"),
    ):
        catalogue.of_graph("1" * 64)


def test_a_database_without_entries_is_brought_up_to_date(database: Path) -> None:
    for version in range(1, DATABASE_VERSION):
        path = database.with_name(f"{version}.db")
        make(path, version, ())
        brought_up_to_date(path)
        assert query(path, "SELECT count(*) FROM environment") == [(0,)]
