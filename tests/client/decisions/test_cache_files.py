"""The client beside a daemon that is starting, and with a database or folder that it may not or cannot use."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions import daemon_start
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.replay.native import build
from pygraphd.daemon.lock import acquire
from pygraphd.schema import offline
from pygraphd.schema.locations import Locations, locate
from tests.support.cache_case import ENVIRONMENT, GRAPH, RECORD, places

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["places"]  # a fixture


# --- a daemon that is just starting ---


@pytest.fixture
def held(places: Locations) -> Iterator[None]:
    """The lock is held as a daemon holds it before it answers."""
    lock = acquire(places)
    assert lock is not None
    with lock:
        yield


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("content", [None, b"", b"half a database" * 100])
def test_a_daemon_that_is_starting_is_no_failure(places: Locations, content: bytes | None) -> None:
    if content is not None:
        places.database.write_bytes(content)
    cache = Cache(places, "host", report := Report())

    assert cache.lookup(ENVIRONMENT, [GRAPH]) == {}
    assert cache.lease(ENVIRONMENT, [GRAPH]) is None
    cache.record(ENVIRONMENT, [RECORD])

    assert (dict(report.failures), report.counts["spooled"]) == ({}, 1)


@pytest.mark.usefixtures("held")
def test_one_that_takes_too_long_is(places: Locations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_start, "STARTING_S", 0.0)
    cache = Cache(places, "host", report := Report())

    cache.lookup(ENVIRONMENT, [GRAPH])

    assert report.failures == {"daemon: no daemon": 1}


def test_one_that_has_ended_is(places: Locations) -> None:
    lock = acquire(places)
    assert lock is not None
    lock.close()  # its lock file stays
    cache = Cache(places, "host", report := Report())

    cache.lookup(ENVIRONMENT, [GRAPH])

    assert report.failures == {"daemon: no daemon": 1}


def test_looking_takes_the_lock_from_nobody(places: Locations) -> None:
    places.lock.touch()
    cache = Cache(places, "host", Report())

    cache.lookup(ENVIRONMENT, [GRAPH])

    lock = acquire(places)
    assert lock is not None
    lock.close()


WITHOUT_RIGHTS = """
import os, sys
from pathlib import Path
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.common.report import Report
from pygraphd.schema.locations import locate
from tests.support.cache_case import ENVIRONMENT, GRAPH, RECORD

os.setuid(65534)
places = locate({"HOME": sys.argv[1]})
cache = Cache(places, "host", report := Report())
assert cache.lookup(ENVIRONMENT, [GRAPH]) == {}
assert cache.lease(ENVIRONMENT, [GRAPH]) is None
cache.record(ENVIRONMENT, [RECORD])
assert cache.lookup(ENVIRONMENT, [GRAPH]) == {}
print(*sorted(report.failures), sep="; ")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_a_home_that_may_not_be_searched_is_a_miss_with_a_reason(tmp_path: Path) -> None:
    """As after `sudo -E`, which leaves HOME as it was."""
    (tmp_path / "home").mkdir(mode=0o700)

    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, tmp_path / "home"], capture_output=True, text=True, check=False
    )

    said = "daemon: no daemon; database: Permission denied; spool: Permission denied"
    assert (done.stdout.strip(), done.stderr) == (said, "")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: Path(path).symlink_to(path)])
def test_a_database_that_is_no_file_is_a_reason(places: Locations, make: Callable[[Path], None]) -> None:
    make(places.database)

    assert Cache(places, "host", report := Report()).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert any(reason.startswith("database: ") for reason in report.failures)


def test_rows_that_are_none_of_ours_are_misses(places: Locations) -> None:
    with contextlib.closing(sqlite3.connect(places.database)) as connection:
        columns = "graph, deployment, reason, detail, against, against_detail, policy, final, calls, uid, host, measured_at, environment"
        connection.execute(f"CREATE TABLE decision ({columns}, cost_us, host_us, span_us)")
        row = (
            GRAPH,
            b"\xff",
            2**62,
            "",
            "x",
            "",
            "x",
            "",
            None,
            None,
            None,
            None,
            ENVIRONMENT.digest(),
            "",
            "",
            "",
        )
        connection.execute(f"INSERT INTO decision VALUES ({','.join('?' * 16)})", row)
        connection.execute(f"PRAGMA user_version={offline.DATABASE_VERSION}")
        connection.commit()

    assert Cache(places, "host", report := Report()).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert dict(report.failures) == {"daemon: no daemon": 1}


def test_a_database_without_tables_is_being_made(places: Locations) -> None:
    with contextlib.closing(sqlite3.connect(places.database)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")

    assert Cache(places, "host", report := Report()).lookup(ENVIRONMENT, [GRAPH]) == {}
    assert dict(report.failures) == {"daemon: no daemon": 1}


def test_nothing_is_written_into_a_folder_that_another_user_has_put_in_a_common_place(tmp_path: Path) -> None:
    """Without a home, what is ours lies under /tmp, by a name that everybody knows."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common").chmod(0o1777)
    (tmp_path / "victim").mkdir()
    home = tmp_path / "common" / "pygraphd-0"
    home.symlink_to(tmp_path / "victim")
    report = Report()

    Cache(locate({"PYGRAPHD_HOME": str(home)}), "host", report).record(ENVIRONMENT, [RECORD])

    assert list((tmp_path / "victim").iterdir()) == []
    assert f"spool: PermissionError: {home} is somebody else's" in report.failures
    with pytest.raises(PermissionError):
        build.compile_once(build.place(home))


def test_a_folder_of_ours_in_a_common_place_is_written_into(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    places = locate({"PYGRAPHD_HOME": str(tmp_path / "pygraphd-0")})
    for _ in range(2):
        Cache(places, "host", report := Report()).record(ENVIRONMENT, [RECORD])

        assert report.counts["spooled"] == 1
