from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

from pygraphd.daemon import database_files
from pygraphd.daemon.database_files import (
    BALLAST_BYTES,
    CORRUPT,
    ballast_file,
    files_set_aside,
    identity,
    make_ballast,
)
from pygraphd.schema.offline import DATABASE_VERSION

if TYPE_CHECKING:
    from pathlib import Path


def test_setting_aside_takes_the_log_along(database: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        database.with_name(f"cache.db{suffix}").write_text(f"content{suffix}")
    target = database_files.set_aside(database, CORRUPT)
    assert {path.name.removeprefix(target.name) for path in database.parent.iterdir()} == {"", "-wal", "-shm"}
    assert target.with_name(f"{target.name}-wal").read_text() == "content-wal"
    assert files_set_aside(database) == [target]


def test_another_file_of_the_same_name_is_another(database: Path) -> None:
    assert identity(database) is None
    database.touch()
    first = identity(database)
    database.rename(database.with_name("moved"))
    database.touch()
    assert identity(database) != first
    assert identity(database.with_name("moved")) == first


def test_the_ballast_is_real_room(database: Path) -> None:
    make_ballast(database)
    status = ballast_file(database).stat()
    assert status.st_size == BALLAST_BYTES
    assert status.st_blocks * 512 >= BALLAST_BYTES


def test_no_ballast_where_there_is_no_room(tmp_path: Path) -> None:
    make_ballast(tmp_path / "none" / "cache.db")
    assert list(tmp_path.iterdir()) == []


def test_the_version_of_what_is_no_database_is_unknown(database: Path) -> None:
    assert database_files.stored_version(database) is None
    database.write_bytes(b"garbage" * 100)
    assert database_files.stored_version(database) is None
    assert database_files.why_read_only(database) is None


def test_a_newer_version_is_only_read(database: Path) -> None:
    connection = sqlite3.connect(database)
    connection.execute(f"PRAGMA user_version={DATABASE_VERSION + 1}")
    connection.close()
    assert f"database version {DATABASE_VERSION + 1}, this one writes {DATABASE_VERSION}" in str(
        database_files.why_read_only(database)
    )
