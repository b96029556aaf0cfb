"""What `status` says of files that the daemon cannot use, before it tries."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli.status import Status, collect
from pygraphd.daemon.database_files import files_set_aside
from pygraphd.daemon.store import Store
from pygraphd.schema.locations import Locations, locate

if TYPE_CHECKING:
    from collections.abc import Iterator

_OTHER = 65534


def _collect_as_somebody(locations: Locations) -> Status:
    if os.geteuid():
        return collect(locations)
    for each in (locations.runtime, *locations.runtime.iterdir()):
        os.chown(each, _OTHER, -1)
    os.seteuid(_OTHER)
    try:
        return collect(locations)
    finally:
        os.seteuid(os.getuid())


@pytest.fixture
def locations() -> Iterator[Locations]:
    """Return a home that another user may look into."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        home = Path(name) / "home"
        (home / "spool").mkdir(mode=0o700, parents=True)
        home.chmod(0o700)
        yield locate({"PYGRAPHD_HOME": str(home)})


@pytest.mark.parametrize("name", ["database", "lock", "log", "team_queue"])
def test_a_file_that_may_not_be_written_is_said(locations: Locations, name: str) -> None:
    with Store(locations.database):
        pass
    file: Path = getattr(locations, name)
    file.touch()
    file.chmod(0o400)

    problems = _collect_as_somebody(locations).problems

    assert problems == [f"{file}: its mode 400 keeps you from writing to it; run: chmod 600 {file}"]


@pytest.mark.parametrize("name", ["database", "lock", "log", "team_queue"])
def test_a_loop_of_links_is_said(locations: Locations, name: str) -> None:
    file: Path = getattr(locations, name)
    file.symlink_to(file.name)

    assert collect(locations).problems == [
        f"{file}: cannot be read: Too many levels of symbolic links; move it away"
    ]


def test_a_folder_in_the_way_of_the_older_log_is_said(locations: Locations) -> None:
    older = locations.log.with_name("pygraphd.log.1")
    older.mkdir()

    assert collect(locations).problems == [f"{older}: is not a regular file; move it away"]


@pytest.mark.parametrize("has_lock", [True, False])
@pytest.mark.parametrize("has_spool", [True, False])
def test_a_read_only_file_system_is_said(
    locations: Locations, monkeypatch: pytest.MonkeyPatch, has_lock: bool, has_spool: bool
) -> None:
    if has_lock:
        locations.lock.touch()
    if not has_spool:
        locations.spool.rmdir()

    class Found:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "statvfs", lambda _path: Found)
    remedy = "set PYGRAPHD_HOME to a folder on a file system that can be written to"
    lock = f"{locations.lock}: the file system is read-only, so no daemon can be started; {remedy}"
    spool = f"{locations.spool}: cannot be made, as the file system is read-only; {remedy}"

    assert collect(locations).problems == [*([] if has_spool else [spool]), lock]


def test_an_empty_database_is_said_to_be_empty(locations: Locations) -> None:
    locations.database.touch()

    status = collect(locations)

    assert (status.entries, status.problems) == (
        0,
        [f"{locations.database}: is empty; `pygraphd start` makes it anew"],
    )


def test_another_programs_database_is_not_called_damaged_once_it_is_set_aside(locations: Locations) -> None:
    """Nor is anybody told to delete it: it may be the only copy."""
    with contextlib.closing(sqlite3.connect(locations.database)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    Store(locations.database).close()

    (aside,) = files_set_aside(locations.database)
    said = (
        "is another program's database, set aside for a new one; move it to where that program looks for it"
    )
    assert collect(locations).problems == [f"{aside}: {said}"]


def test_another_programs_database_of_a_high_version_is_not_said_to_be_newer(locations: Locations) -> None:
    with contextlib.closing(sqlite3.connect(locations.database)) as connection:
        connection.execute("CREATE TABLE theirs (x)")
        connection.execute("PRAGMA user_version=75")

    status = collect(locations)

    remedy = "move it to where that program looks for it, or set PYGRAPHD_HOME to another folder"
    assert (status.entries, status.problems) == (
        None,
        [f"{locations.database}: is another program's database; {remedy}"],
    )


def test_another_programs_database_is_said_to_be_that(locations: Locations) -> None:
    with contextlib.closing(sqlite3.connect(locations.database)) as connection:
        connection.execute("CREATE TABLE theirs (x)")

    status = collect(locations)

    assert (status.entries, status.problems) == (
        None,
        [f"{locations.database}: is another program's database; `pygraphd start` sets it aside"],
    )
