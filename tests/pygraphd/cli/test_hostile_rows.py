"""Rows that the daemon would not store are left out and counted, whatever is in them; the others are shown."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli import main
from pygraphd.daemon.store import Store
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.messages import RecordRequest

HOSTILE = ("\x1b]0;\x07", b"\xff", float("inf"), 2**63 - 1)
COMMANDS = ("inspect", "inspect --json", "show GRAPH", "show GRAPH --json", "explain GRAPH")


def _copy_without_types(database: Path, target: Path) -> None:
    """Copy the tables without STRICT, constraints and keys, as who forges a database would."""
    with contextlib.closing(sqlite3.connect(target)) as copy:
        copy.execute("ATTACH ? AS source", (str(database),))
        for (name,) in copy.execute("SELECT name FROM source.sqlite_schema WHERE type = 'table'").fetchall():
            columns = [row[1] for row in copy.execute(f"PRAGMA source.table_info({name})")]
            copy.execute(f"CREATE TABLE {name} ({', '.join(columns)})")
            copy.execute(f"INSERT INTO {name} SELECT * FROM source.{name}")
        (version,) = copy.execute("PRAGMA source.user_version").fetchone()
        copy.execute(f"PRAGMA user_version={version}")
        copy.commit()


def _columns(database: Path) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return [
            (table, row[1])
            for table in ("decision", "environment", "graph", "measurement")
            for row in connection.execute(f"PRAGMA table_info({table})")
        ]


def test_no_value_in_any_column_crashes_a_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_request: Callable[..., RecordRequest],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Store(tmp_path / "sound.db") as store:
        store.record(make_request("a", "b"), uid=0)
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path))
    database, graph = locate().database, make_request("a").records[0].graph.digest
    _copy_without_types(tmp_path / "sound.db", database)
    sound = database.read_bytes()

    for number, (table, column) in enumerate(_columns(database)):
        database.write_bytes(sound)
        value = HOSTILE[number % len(HOSTILE)]
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = 1", (value,))
            connection.commit()
        words = COMMANDS[number % len(COMMANDS)].replace("GRAPH", graph).split()
        with pytest.raises(SystemExit) as ended:
            main(["cache", *words])
        said = "".join(capsys.readouterr())

        assert ended.value.code in {0, 1, 2}, (table, column)
        assert "Traceback" not in said
        assert said.replace("\n", "").isprintable()

    database.write_bytes(sound)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("UPDATE graph SET operators = ? WHERE digest = ?", (HOSTILE[0], graph))
        connection.commit()
    with pytest.raises(SystemExit):
        main(["cache", "inspect"])
    shown = capsys.readouterr()
    assert (graph[:12] in shown.out, len(shown.out.splitlines())) == (False, 2)
    assert "1 row left out, since what is stored of it is not valid" in shown.err
