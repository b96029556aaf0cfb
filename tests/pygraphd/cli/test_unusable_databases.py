"""A database that cannot be used ends each command with one line, which says what to do, and with exit code 2."""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon import database_files
from pygraphd.daemon.store import Store
from pygraphd.schema.offline import DATABASE_VERSION
from tests.support.cli_command import locations, pygraphd
from tests.support.shipped_rows import FASTER, KERNELS, row, written

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pygraphd.schema.locations import Locations

__all__ = ["locations"]  # a fixture

READING = ("inspect", "show aa", "explain aa", "delete aa", "export -")
FORESEEING = (
    "prune --older-than 1s --dry-run",
    "clear --dry-run",
    "rederive --dry-run",
    "import EXPORT --dry-run",
)
WRITING = ("prune --older-than 1s", "rederive", "import EXPORT")


def _execute(database: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(database)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()


@contextlib.contextmanager
def _junk(database: Path) -> Iterator[None]:
    database.write_bytes(b"junk" * 4096)
    yield


@contextlib.contextmanager
def _empty(database: Path) -> Iterator[None]:
    database.write_bytes(b"")
    yield


@contextlib.contextmanager
def _of_another_program(database: Path) -> Iterator[None]:
    database.unlink()
    _execute(database, "CREATE TABLE photos (x)")
    yield


@contextlib.contextmanager
def _without_a_table(database: Path) -> Iterator[None]:
    _execute(database, "DROP TABLE measurement", "DROP TABLE decision")
    yield


@contextlib.contextmanager
def _of_a_newer_version(database: Path) -> Iterator[None]:
    _execute(
        database,
        f"PRAGMA user_version={DATABASE_VERSION + 1}",
        "DROP TABLE measurement",
        "DROP TABLE decision",
    )
    yield


@contextlib.contextmanager
def _locked(database: Path) -> Iterator[None]:
    _execute(database, "PRAGMA journal_mode=DELETE")
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        yield


@contextlib.contextmanager
def _a_folder(database: Path) -> Iterator[None]:
    database.unlink()
    database.mkdir()
    yield


ANOTHER = "move it away, and `pygraphd start` begins a new one"
CASES = (
    (_junk, READING, "cannot be read: file is not a database; `pygraphd start` sets a damaged file aside"),
    (_empty, READING, "is empty; `pygraphd start` makes it anew"),
    (_of_another_program, READING, "is another program's database; `pygraphd start` sets it aside"),
    (_without_a_table, READING + FORESEEING, f"cannot be read: no such table: decision; {ANOTHER}"),
    (_without_a_table, WRITING, f"no such table: decision; nothing is stored: {ANOTHER}"),
    (_of_a_newer_version, READING, "is of version 10, and this pygraphd reads 9; upgrade pygraphd, or set PYGRAPHD_HOME to another folder"),
    (_locked, READING + FORESEEING, "cannot be read: database is locked; another process holds it: try again, or see which one does: fuser DATABASE"),
    (_a_folder, READING, "is not a regular file; move it away"),
    (_a_folder, FORESEEING + WRITING, "is not a regular file; nothing is stored: move it away"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("spoilt", "words", "said"), [(spoilt, words, said) for spoilt, some, said in CASES for words in some]
)
def test_the_error_says_what_to_do(
    locations: Locations,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    spoilt: Callable[[Path], contextlib.AbstractContextManager[None]],
    words: str,
    said: str,
) -> None:
    export = written(tmp_path / "exported", row("a", KERNELS, FASTER))
    Store(locations.database).close()
    with spoilt(locations.database):
        code = pygraphd("cache", *(word.replace("EXPORT", str(export)) for word in words.split()))

    expected = said.replace("DATABASE", str(locations.database))
    assert capsys.readouterr().err == f"pygraphd: {locations.database}: {expected}\n"
    assert code == 2
    assert database_files.files_set_aside(locations.database) == []


@pytest.mark.parametrize("words", ["stats", "stats --zero"])
def test_statistics_of_it_say_so_too(
    locations: Locations, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    locations.database.mkdir()
    assert pygraphd(*words.split()) == 2
    assert "move it away" in capsys.readouterr().err


def _error_of(code: int) -> sqlite3.Error:
    error = sqlite3.OperationalError("it fails")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (_error_of(sqlite3.SQLITE_IOERR_READ), "see whether its disk is in order, or set PYGRAPHD_HOME"),
        (_error_of(sqlite3.SQLITE_READONLY_DBMOVED), "set PYGRAPHD_HOME to a folder of yours"),
        (_error_of(sqlite3.SQLITE_CANTOPEN), "set PYGRAPHD_HOME to a folder of yours"),
        (_error_of(sqlite3.SQLITE_FULL), "the disk is full: free some room"),
        (_error_of(sqlite3.SQLITE_BUSY_SNAPSHOT), "another process holds it: try again"),
        (_error_of(sqlite3.SQLITE_CORRUPT_INDEX), "`pygraphd start` sets a damaged file aside"),
        (_error_of(sqlite3.SQLITE_CONSTRAINT_FOREIGNKEY), ANOTHER),
        (_error_of(sqlite3.SQLITE_NOMEM), ANOTHER),
        (sqlite3.OperationalError("without a code"), ANOTHER),
    ],
)
def test_each_error_of_sqlite_has_a_remedy(tmp_path: Path, error: sqlite3.Error, remedy: str) -> None:
    (tmp_path / "cache.db").touch()
    assert database_files.remedy(tmp_path / "cache.db", error).startswith(remedy)
