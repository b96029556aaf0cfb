"""A database is made with today's tables or not at all; an older one is migrated, and one of an unreleased version set aside."""

from __future__ import annotations

import dataclasses
import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from alembic import command

from pygraphd.daemon import database as database_module
from pygraphd.daemon import queries
from pygraphd.daemon.database_files import APPLICATION_ID, files_set_aside
from pygraphd.daemon.store import Store
from pygraphd.schema.offline import DATABASE_VERSION, OLDEST_MIGRATED, read_sizes
from tests.support.sized_records import HERE, WHOLE, asked, first_sizes, sized_record, sized_request

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.messages import RecordRequest


def _query(database: Path, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def test_the_usual_start_imports_no_alembic(database: Path) -> None:
    Store(database).close()
    code = f"import sys; from pathlib import Path; from pygraphd.daemon.store import Store; Store(Path({str(database)!r})); print('alembic' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "False\n"


@pytest.mark.parametrize("version", [0, 1, OLDEST_MIGRATED - 1])
def test_the_database_of_an_unreleased_version_is_set_aside(
    database: Path, make_request: Callable[..., RecordRequest], version: int
) -> None:
    with Store(database) as store:
        store.record(make_request("a"), uid=0)
    connection = sqlite3.connect(database)
    connection.execute(f"PRAGMA user_version={version}")
    connection.close()

    with Store(database) as store:
        assert store.problems() == []
        assert store.count_entries() == 0
        assert store.record(make_request("b"), uid=0) == 1

    assert _query(database, "PRAGMA user_version") == [(DATABASE_VERSION,)]
    (old,) = files_set_aside(database)
    assert old.name.startswith(f"cache.db.old-v{version}-")
    assert _query(old, "SELECT count(*) FROM decision") == [(1,)]


def test_a_migration_that_fails_changes_nothing(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_after_a_table(connection: sa.Connection) -> None:
        connection.exec_driver_sql("CREATE TABLE half (x INTEGER)")
        raise sa.exc.OperationalError("upgrade", {}, sqlite3.OperationalError("broken"))

    monkeypatch.setattr(database_module, "upgrade", fail_after_a_table)
    with Store(database) as store:
        assert "broken" in store.problems()[0]
    assert _query(database, "SELECT name FROM sqlite_schema") == []


def test_a_database_from_before_sizes_were_found_by_their_graph_has_them_found(database: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{database}")
    with engine.connect() as connection:
        command.upgrade(database_module.migration_config(connection), "0002")
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
        connection.exec_driver_sql("PRAGMA user_version=8")
        connection.commit()
    engine.dispose()
    request = sized_request(8, 16)
    with sqlite3.connect(database) as old:
        _insert(old, "environment", {"id": HERE.digest(), **HERE.factors()})
        for record in (*request.records, sized_record(24, whole=dataclasses.replace(WHOLE, digest="0" * 64))):
            graph = queries.graph_row(record)
            del graph["whole"]
            _insert(old, "graph", graph)
            _insert(old, "decision", queries.decision_row(HERE.digest(), record, request, 0, 1.0, 1.0))
        _insert(old, "graph", {**graph, "digest": "1" * 64, "sizes": "no sizes"})
        old.execute("UPDATE graph SET kind = CAST(x'ff' AS TEXT) WHERE digest = ?", ("1" * 64,))  # no UTF-8
    old.close()

    with Store(database) as store:
        assert (store.problems(), store.count_entries()) == ([], 4)

    assert _query(database, "PRAGMA user_version") == [(DATABASE_VERSION,)]
    assert first_sizes(read_sizes(database, asked())) == [8, 16]
    assert _query(database, "SELECT count(*) FROM graph WHERE whole IS NULL") == [(3,)]


def _insert(connection: sqlite3.Connection, table: str, row: dict[str, object]) -> None:
    names, values = ", ".join(row), ", ".join(f":{name}" for name in row)
    connection.execute(f'INSERT INTO "{table}" ({names}) VALUES ({values})', row)
