"""A database is brought up to date, with a copy of it beside, or left exactly as it was."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from alembic import command

from pygraphd import database as database_module
from pygraphd.schema.messages import LookupRequest, RecordRequest
from pygraphd.schema.offline import DATABASE_VERSION, read_entries
from pygraphd.schema.tables import APPLICATION_ID
from pygraphd.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def _query(database: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def test_the_usual_start_imports_no_alembic(database: Path) -> None:
    Store(database).close()
    code = f"import sys; from pathlib import Path; from pygraphd.store import Store; Store(Path({str(database)!r})); print('alembic' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"


def test_an_older_database_is_copied_first(
    database: Path, make_request: Callable[..., RecordRequest]
) -> None:
    with Store(database) as store:
        store.record(make_request("a"), uid=0)
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA user_version=0")
    connection.close()
    with Store(database) as store:
        assert store.problems() == []
        assert store.count_entries() == 1
    assert _query(database, "PRAGMA user_version") == [(DATABASE_VERSION,)]
    assert _query(database.with_name("cache.db.backup-v0"), "SELECT count(*) FROM decision") == [(1,)]


def test_a_database_of_version_1_is_brought_up_to_date(database: Path) -> None:
    _make_version_1(database)
    with Store(database) as store:
        assert store.problems() == []
    assert _query(database, "PRAGMA user_version") == [(DATABASE_VERSION,)]
    columns = "deployment, uid, created_at, hits, last_hit, host, measured_at, forward_in_trees"
    assert _query(database, f"SELECT {columns} FROM decision ORDER BY graph") == [
        ("TREES", 1000, 500.25, 7, 900.5, "", 500.25, None),
        ("KERNELS", 1000, 600.5, 0, None, "", 600.5, 0),
        ("KERNELS", 0, 700.0, 0, None, "", None, None),
    ]
    assert _query(database, "SELECT median_us, measured_at FROM measurement ORDER BY id") == [
        (100.0, 500.25), (50.0, 500.25), (100.0, 600.5), (50.0, 600.5), (100.0, 650.0),
    ]  # fmt: skip
    backup = database.with_name("cache.db.backup-v1")
    assert _query(backup, "PRAGMA user_version") == [(1,)]
    assert _query(backup, "SELECT count(*) FROM decision") == [(3,)]


def test_a_database_of_version_1_answers_lookups_when_it_is_up_to_date(database: Path) -> None:
    _make_version_1(database)
    asked = LookupRequest("e" * 64, ("a" * 64, "b" * 64, "c" * 64))
    with pytest.raises(sqlite3.DatabaseError, match="database version 1, this program reads"):
        read_entries(database, asked)
    Store(database).close()
    found = {entry.graph[0]: entry.cost_us for entry in read_entries(database, asked)}
    assert found == {"a": 50.0, "b": 100.0, "c": None}


def test_a_migration_that_fails_changes_nothing(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_after_a_table(connection: sa.Connection) -> None:
        connection.exec_driver_sql("CREATE TABLE half (x INTEGER)")
        raise sa.exc.OperationalError("upgrade", {}, sqlite3.OperationalError("broken"))

    monkeypatch.setattr(database_module, "upgrade", fail_after_a_table)
    with Store(database) as store:
        assert "broken" in store.problems()[0]
    assert _query(database, "SELECT name FROM sqlite_schema") == []


def _make_version_1(database: Path) -> None:
    """Make the file as version 1 made it: its tables by its own migration, and rows as it wrote them."""
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.begin() as connection:
        command.upgrade(database_module.migration_config(connection), "0001")
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
        connection.exec_driver_sql("PRAGMA user_version=1")
        for statement in _ROWS_OF_VERSION_1:
            connection.exec_driver_sql(statement)
    engine.dispose()


_E, _A, _B, _C = (f"'{digit * 64}'" for digit in "eabc")
_ROWS_OF_VERSION_1 = (
    f"INSERT INTO environment VALUES ({_E}, 'NVIDIA H200', '9.0', 132, 143771, '', '2.13.0', '3.5', '13.0', '580.1', '91400')",
    f"INSERT INTO graph VALUES ({_A}, 'forward', 0, 1, 9), ({_B}, 'backward', 0, 1, 9), ({_C}, 'inference', 0, 1, 9)",
    f"INSERT INTO decision VALUES ('1', {_E}, {_A}, 'TREES', 'TREES is faster', 1, 1, 0, 1000, 500.25, 7, 900.5)",
    f"INSERT INTO decision VALUES ('2', {_E}, {_B}, 'KERNELS', 'its forward is in no tree, so all that was saved for it "
    "would have to be copied', 1, 1, 0, 1000, 600.5, 0, NULL)",
    # Measured once, but what holds now is a rule.
    f"INSERT INTO decision VALUES ('3', {_E}, {_C}, 'KERNELS', 'no CUDA device', 1, 1, 0, 0, 700.0, 0, NULL)",
    *(
        "INSERT INTO measurement (environment, graph, deployment, samples, median_us, mad_us, host_us, span_us, busy, host, "
        f"version, uid, measured_at) VALUES ({_E}, {graph}, '{deployment}', 8, {median}, 1.0, 1.0, 1.0, 0.5, 'h', '0.1.0', 1000, {time})"
        for graph, deployment, median, time in (
            (_A, "KERNELS", 100.0, 500.25),
            (_A, "TREES", 50.0, 500.25),
            (_B, "KERNELS", 100.0, 600.5),
            (_B, "TREES", 50.0, 600.5),
            (_C, "KERNELS", 100.0, 650.0),
        )
    ),
)
