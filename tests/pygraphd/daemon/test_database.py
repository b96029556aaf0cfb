"""A database is made with today's tables or not at all; one of an unreleased version is set aside."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa

from pygraphd.daemon import database as database_module
from pygraphd.daemon.database_files import files_set_aside
from pygraphd.daemon.store import Store
from pygraphd.schema.offline import DATABASE_VERSION, OLDEST_MIGRATED

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
