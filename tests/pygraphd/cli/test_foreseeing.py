"""A dry run changes no file, and says what the command would do."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.database_files import files_set_aside
from pygraphd.daemon.store import Store
from pygraphd.schema.messages import encode
from tests.support.cli_command import locations, pygraphd
from tests.support.shipped_rows import FASTER, KERNELS, row, written

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import RecordRequest

__all__ = ["locations"]  # a fixture

COMMANDS = {
    "clear": "entries",
    "prune --gpu H200": "entries",
    "rederive": "entries",
    "import EXPORT": "kept",
}
"""Commands that write, each with the count of its answer that is zero for an empty cache."""


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file with two entries."""
    return written(tmp_path_factory.mktemp("exported"), row("a", KERNELS, FASTER), row("b", KERNELS, FASTER))


def _files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file, but for those that SQLite makes beside a database that is read."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.name: path.read_bytes() for path in found if not path.name.endswith(("-wal", "-shm"))}


def _execute(database: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute(statement)
        connection.commit()


def _junk(database: Path) -> None:
    database.write_bytes(b"junk" * 4096)


def _old(database: Path) -> None:
    _execute(database, "PRAGMA user_version=3")


def _of_another_program(database: Path) -> None:
    _execute(database, "PRAGMA application_id=1")


def _with_a_broken_page(database: Path) -> None:
    pages = bytearray(database.read_bytes())
    pages[4096 : 2 * 4096] = bytes(4096)
    database.write_bytes(pages)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_junk, "file is not a database"),
        (_old, "of version 3, which was never released"),
        (_of_another_program, "another program's database"),
        (_with_a_broken_page, ""),
    ],
)
@pytest.mark.parametrize("words", COMMANDS)
def test_a_database_that_would_be_set_aside_stays(
    locations: Locations,
    make_request: Callable[..., RecordRequest],
    capsys: pytest.CaptureFixture[str],
    export: Path,
    spoil: Callable[[Path], None],
    said: str,
    words: str,
) -> None:
    with Store(locations.database) as store:
        store.record(make_request("a"), uid=0)
    spoil(locations.database)
    before = _files(locations.cache)

    assert (
        pygraphd(
            "cache", *(word.replace("EXPORT", str(export)) for word in words.split()), "--dry-run", "--json"
        )
        == 0
    )
    assert _files(locations.cache) == before
    printed = capsys.readouterr()
    assert json.loads(printed.out)[COMMANDS[words]] == 0
    (line,) = printed.err.splitlines()
    assert line.startswith(f"pygraphd: {locations.database}: {said}")
    assert line.endswith(": a command that writes sets it aside, and begins a new one")


@pytest.mark.parametrize(
    ("spoil", "label", "said"),
    [
        (_junk, "corrupt", "file is not a database"),
        (_old, "old-v3", "is of version 3, which was never released, and is not migrated"),
        (_of_another_program, "foreign", "is another program's database"),
    ],
)
@pytest.mark.parametrize("words", ["prune --older-than 1s", "rederive", "import EXPORT"])
def test_the_command_sets_it_aside_and_says_so(
    locations: Locations,
    capsys: pytest.CaptureFixture[str],
    export: Path,
    spoil: Callable[[Path], None],
    label: str,
    said: str,
    words: str,
) -> None:
    Store(locations.database).close()
    spoil(locations.database)
    before = locations.database.read_bytes()

    assert pygraphd("cache", *(word.replace("EXPORT", str(export)) for word in words.split())) == 0

    (aside,) = files_set_aside(locations.database)
    assert aside.name.startswith(f"cache.db.{label}-")
    assert aside.read_bytes() == before
    assert capsys.readouterr().err == (
        f"pygraphd: {locations.database}: {said}; set aside as {aside}, and a new database is begun\n"
    )


def test_a_sound_database_is_not_said_to_be_set_aside(
    locations: Locations, capsys: pytest.CaptureFixture[str], export: Path
) -> None:
    for _ in range(2):
        assert pygraphd("cache", "import", str(export)) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("make", [Path.touch, lambda path: _execute(path, "VACUUM")])
def test_an_import_into_an_empty_database_is_foreseen(
    locations: Locations,
    capsys: pytest.CaptureFixture[str],
    export: Path,
    make: Callable[[Path], None],
) -> None:
    make(locations.database)
    before = _files(locations.cache)

    assert pygraphd("cache", "import", str(export), "--dry-run", "--json") == 0

    assert _files(locations.cache) == before
    printed = capsys.readouterr()
    assert (json.loads(printed.out)["added"], printed.err) == (2, "")


def test_a_clear_that_is_not_confirmed_changes_nothing(
    locations: Locations, make_request: Callable[..., RecordRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    locations.spool.mkdir(mode=0o700)
    (locations.spool / "1.json").write_bytes(encode(make_request("a")))
    before = _files(locations.cache)

    assert pygraphd("cache", "clear") == 2
    assert "to delete 1 entry and 2 measurements" in capsys.readouterr().err
    assert _files(locations.cache) == before


def test_the_forecast_is_what_happens(
    locations: Locations, make_request: Callable[..., RecordRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(locations.database) as store:
        store.record(make_request("a", "b"), uid=0)
        store.record(make_request("c", gpu="NVIDIA A100"), uid=0)
    locations.spool.mkdir(mode=0o700)
    (locations.spool / "1.json").write_bytes(encode(make_request("a", "d", median_us=50.0)))
    graph = make_request("a").records[0].graph.digest

    for words in ("rederive", f"delete {graph}", "prune --gpu A100", "clear --yes"):
        before = _files(locations.cache)
        assert pygraphd("cache", *words.split(), "--dry-run", "--json") == 0
        assert _files(locations.cache) == before, words
        dry = json.loads(capsys.readouterr().out)
        assert pygraphd("cache", *words.split(), "--json") == 0
        done = json.loads(capsys.readouterr().out)
        assert {**done, "dry_run": True, "freed_bytes": 0} == {**dry, "freed_bytes": 0}, words


def test_entries_of_cache_and_spool_are_counted_once(
    locations: Locations, make_request: Callable[..., RecordRequest], capsys: pytest.CaptureFixture[str]
) -> None:
    with Store(locations.database) as store:
        store.record(make_request("a", "b"), uid=0)
    locations.spool.mkdir(mode=0o700)
    (locations.spool / "1.json").write_bytes(encode(make_request("a", "c", median_us=50.0)))

    assert pygraphd("cache", "clear", "--dry-run") == 0
    assert capsys.readouterr().out == "would delete 3 entries and 8 measurements\n"


def test_a_database_of_a_newer_version_is_not_foreseen(
    locations: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    Store(locations.database).close()
    _execute(locations.database, "PRAGMA user_version=99")

    assert pygraphd("cache", "clear", "--dry-run") == 2
    assert "written by a newer pygraphd" in capsys.readouterr().err


def test_an_empty_database_has_no_entries(locations: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    locations.database.touch()
    assert pygraphd("cache", "rederive", "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out)["entries"] == 0
    _execute(locations.database, "PRAGMA user_version=0")
    assert pygraphd("cache", "clear", "--dry-run") == 0
    assert capsys.readouterr().out == "would delete 0 entries and 0 measurements\n"
