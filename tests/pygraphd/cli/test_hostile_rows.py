"""Rows that the daemon would not store are left out and counted, whatever is in them; the others are shown."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli import main
from pygraphd.cli.catalogue import Catalogue
from pygraphd.cli.exporting import Export
from pygraphd.daemon.store import Store
from pygraphd.schema.locations import locate
from tests.support.cli_command import locations, pygraphd
from tests.support.forged_database import copy_without_types

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import RecordRequest

__all__ = ["locations"]  # a fixture

HOSTILE = ("\x1b]0;\x07", b"\xff", float("inf"), 2**63 - 1)
COMMANDS = (
    "inspect", "inspect --json", "show GRAPH", "show GRAPH --json", "explain GRAPH", "export -", "delete GRAPH --dry-run", "rederive --dry-run",
)  # fmt: skip


def _columns(database: Path) -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        return [
            (table, row[1])
            for table in ("decision", "environment", "graph", "measurement")
            for row in connection.execute(f"PRAGMA table_info({table})")
        ]


@pytest.mark.slow
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
    copy_without_types(tmp_path / "sound.db", database)
    sound = database.read_bytes()

    each = [(*place, value) for place in _columns(database) for value in HOSTILE]
    for number, (table, column, value) in enumerate(each[::3]):  # all commands, and all values
        database.write_bytes(sound)
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


@pytest.mark.slow
def test_no_value_in_any_column_crashes_an_export(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    with Store(tmp_path / "sound.db") as store:
        store.record(make_request("a", "b"), uid=0)
    database = tmp_path / "forged.db"
    copy_without_types(tmp_path / "sound.db", database)
    sound = database.read_bytes()

    each = [(*place, value) for place in _columns(database) for value in HOSTILE]
    for table, column, value in each[::3]:  # all columns, and all values
        database.write_bytes(sound)
        with contextlib.closing(sqlite3.connect(database)) as connection:
            connection.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = 1", (value,))
            connection.commit()
        with Catalogue(database) as catalogue:
            assert len(list(Export(catalogue))) <= 2


def _execute(database: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute(statement)
        connection.commit()


@pytest.mark.parametrize("value", ["x'ff'", "5", "1e999", "NULL", "'a,b'"])
def test_an_export_leaves_a_row_out_whose_sizes_are_none(
    locations: Locations,
    tmp_path: Path,
    make_request: Callable[..., RecordRequest],
    capsys: pytest.CaptureFixture[str],
    value: str,
) -> None:
    sound, graph = tmp_path / "sound.db", make_request("a").records[0].graph.digest
    with Store(sound) as store:
        store.record(make_request("a", "b"), uid=0)
    copy_without_types(sound, locations.database)
    _execute(locations.database, f"UPDATE graph SET sizes = {value} WHERE digest = '{graph}'")

    assert pygraphd("cache", "export", "-") == 0
    shown = capsys.readouterr()
    assert (graph in shown.out, len(shown.out.splitlines())) == (False, 2)
    assert shown.err == "wrote 1 entry; left out 1, what is stored of it is not valid\n"


def test_an_entry_whose_id_is_none_is_named_and_the_others_can_be_deleted(
    locations: Locations, make_request: Callable[..., RecordRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(locations.database) as store:
        store.record(make_request("a", "b"), uid=0)
    spoilt, sound = (make_request(name).records[0].graph.digest for name in ("a", "b"))
    forged = "UPDATE decision SET id = '4d2f' || char(27) || '[31m'"
    _execute(locations.database, f"{forged} WHERE graph = '{spoilt}'")

    for named in ("4d2f", spoilt):
        for words in ((named,), (named, sound), (named, "--dry-run")):
            assert pygraphd("cache", "delete", *words) == 1
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(
                f"pygraphd: {named}: what is stored of it is not valid: id: expected 64 hex"
            )
            assert line.isprintable()
            assert r"'4d2f\x1b[31m'" in line
    assert pygraphd("cache", "delete", sound) == 0
    assert "deleted 1 entry" in capsys.readouterr().out
    assert pygraphd("cache", "clear", "--yes") == 0
    assert "deleted 1 entry and 2 measurements" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["5", "x'ff'"])
def test_ids_of_any_type_can_be_ambiguous(
    locations: Locations,
    tmp_path: Path,
    make_request: Callable[..., RecordRequest],
    capsys: pytest.CaptureFixture[str],
    value: str,
) -> None:
    sound, graph = tmp_path / "sound.db", make_request("a").records[0].graph.digest
    with Store(sound) as store:
        store.record(make_request("a"), uid=0)
        store.record(make_request("a", gpu="NVIDIA A100"), uid=0)
    copy_without_types(sound, locations.database)
    # A prefix finds an id or a graph; the first row is found by its graph, whatever its id is.
    _execute(locations.database, f"UPDATE decision SET id = {value} WHERE rowid = 1")

    assert pygraphd("cache", "delete", graph) in {1, 2}
    assert len(capsys.readouterr().err.splitlines()) == 1


COUNTS = ("added", "replaced", "kept")
IMPOSSIBLE = {
    (column, value)
    for column in ("final", "host", "measured_at", "policy")
    for value in ("x'ff'", "'text'")
    if (column, value) != ("host", "'text'")
}
"""Columns with values that no daemon stores there."""
NO_VALUES = ("x'ff'", "'text'", "NULL", "1e999", "-1")


@pytest.mark.parametrize("column", ["final", "host", "measured_at", "policy"])
@pytest.mark.parametrize("value", NO_VALUES)
def test_an_import_takes_the_place_of_a_row_with_impossible_values(
    locations: Locations,
    tmp_path: Path,
    make_request: Callable[..., RecordRequest],
    capsys: pytest.CaptureFixture[str],
    column: str,
    value: str,
) -> None:
    sound, export = tmp_path / "sound.db", tmp_path / "known.jsonl"
    with Store(locations.database) as store:
        store.record(make_request("a"), uid=0)
    assert pygraphd("cache", "export", str(export)) == 0
    locations.database.rename(sound)
    copy_without_types(sound, locations.database)
    _execute(locations.database, f"UPDATE decision SET {column} = {value}")
    _execute(locations.database, "CREATE UNIQUE INDEX decision_key ON decision (environment, graph)")
    for table, key in (("environment", "id"), ("graph", "digest")):
        _execute(locations.database, f"CREATE UNIQUE INDEX {table}_key ON {table} ({key})")
    capsys.readouterr()

    assert pygraphd("cache", "import", str(export), "--dry-run", "--json") == 0
    foreseen = json.loads(capsys.readouterr().out)
    assert pygraphd("cache", "import", str(export), "--json") == 0
    done = json.loads(capsys.readouterr().out)

    assert {name: foreseen[name] for name in COUNTS} == {name: done[name] for name in COUNTS}
    if (column, value) in IMPOSSIBLE:
        assert done["replaced"] == 1
        assert pygraphd("cache", "inspect", "--json") == 0
        (entry,) = json.loads(capsys.readouterr().out)["entries"]
        assert entry["host"] == "import:host-a"
