"""Damage, full disks, files that go away: the daemon says so and goes on."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.database_files import ballast_file, files_set_aside
from pygraphd.daemon.store import Store
from pygraphd.schema.messages import LookupRequest, RecordRequest, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon


def _lookup_of(request: RecordRequest) -> bytes:
    return encode(LookupRequest(request.environment.digest(), tuple(r.graph.digest for r in request.records)))


def _hits(home: Home, request: RecordRequest) -> int:
    status, answer = home.ask("POST", "/v3/lookup", _lookup_of(request))
    assert status == 200
    return len(answer["entries"])


def _problems(home: Home) -> str:
    return "\n".join(home.status()["problems"])


def test_a_damaged_database_is_set_aside_at_the_start(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    home.locations.database.write_bytes(b"garbage" * 1000)
    home.start()
    assert home.ask("POST", "/v3/record", encode(make_request("a")))[0] == 200
    (aside,) = files_set_aside(home.locations.database)
    assert aside.read_bytes() == b"garbage" * 1000
    assert f"{aside}: was damaged and set aside" in _problems(home)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_start_that_can_store_nothing_says_so(home: Home, make: Callable[[Path], None]) -> None:
    make(home.locations.database)

    started = home.pygraphd("start")

    assert started.stdout.startswith("started (pid ")
    said = "is not a regular file; nothing is stored: move it away"
    assert (started.returncode, started.stderr) == (0, f"pygraphd: {home.locations.database}: {said}\n")


def test_a_removed_database_is_begun_anew(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    home.start()
    home.ask("POST", "/v3/record", encode(make_request("a")))
    home.locations.database.unlink()
    assert _hits(home, make_request("a")) == 0
    assert home.ask("POST", "/v3/record", encode(make_request("b")))[0] == 200
    assert _hits(home, make_request("a", "b")) == 1
    assert "was removed or replaced while in use" in _problems(home)


@pytest.mark.slow
def test_a_newer_database_is_only_read(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    with Store(home.locations.database) as store:
        store.record(make_request("a"), 0)
    connection = sqlite3.connect(home.locations.database)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    home.start()
    assert _hits(home, make_request("a")) == 1
    status, answer = home.ask("POST", "/v3/record", encode(make_request("b")))
    assert status == 503
    assert "written by a newer pygraphd (database version 99" in answer["error"]
    assert "newer pygraphd" in _problems(home)


def test_what_is_not_known_is_looked_for_in_the_spool_first(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    home.start()
    home.put_in_spool("late.json", encode(make_request("c")))

    assert _hits(home, make_request("c")) == 1


@pytest.mark.slow
def test_the_spool_is_taken_in(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    home.variables["PYGRAPHD_HOUSEKEEPING"] = "0.2"
    home.put_in_spool("before.json", encode(make_request("a")))
    home.start()
    home.wait_until(lambda: _hits(home, make_request("a")) == 1)
    home.put_in_spool("bad.json", b"{")
    home.put_in_spool("while.json", encode(make_request("b")))
    home.wait_until(lambda: _hits(home, make_request("b")) == 1)
    status = home.status()
    assert (status["spool_waiting"], status["spool_bad"]) == (0, 1)
    assert "1 unreadable files" in _problems(home)


@contextlib.contextmanager
def _mounted(folder: Path, *options: str) -> Iterator[None]:
    folder.mkdir(mode=0o700, exist_ok=True)
    mount = subprocess.run(["mount", *options, str(folder)], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(home: Home, tmp_path: Path) -> Iterator[Path]:
    """The home's cache on a file system of 8 MiB, the socket elsewhere."""
    cache = tmp_path / "small"
    with _mounted(cache, "-t", "tmpfs", "-o", "size=8m,mode=700", "tmpfs"):
        home.variables = {
            "PYGRAPHD_HOME": "",
            "XDG_CACHE_HOME": str(cache),
            "XDG_RUNTIME_DIR": str(home.path),
        }
        try:
            yield cache
        finally:
            home.close()


@pytest.mark.slow
@pytest.mark.usefixtures("small_disk")
def test_a_full_disk(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    home.start()
    stored = 0
    while stored < 1000:
        status, answer = home.ask(
            "POST", "/v3/record", encode(make_request(*(f"{stored}.{n}" for n in range(100))))
        )
        if status != 200:
            break
        stored += 1
    assert 0 < stored < 1000
    assert status == 507
    assert "the disk is full" in answer["error"]
    assert _hits(home, make_request("0.0", "0.1")) == 2
    assert "the disk is full" in _problems(home)
    assert home.status()["entries"] == stored * 100
    pruned = home.pygraphd("cache", "prune", "--gpu", "H200")
    assert (pruned.returncode, pruned.stderr) == (0, "")
    assert f"deleted {stored * 100} entries" in pruned.stdout
    assert home.status()["problems"] == []
    assert home.ask("POST", "/v3/record", encode(make_request("again")))[0] == 200


@pytest.mark.slow
def test_a_disk_filled_by_others(
    home: Home, small_disk: Path, make_request: Callable[..., RecordRequest]
) -> None:
    home.start()
    home.ask("POST", "/v3/record", encode(make_request(*map(str, range(300)))))
    with (small_disk / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
        while True:
            other.write(bytes(4096))
    statuses: list[int] = []
    while statuses[-2:] != [507] * 2 and len(statuses) < 40:
        names = [f"{len(statuses)}.{n}" for n in range(300)]
        statuses.append(home.ask("POST", "/v3/record", encode(make_request(*names)))[0])
    assert statuses[-2:] == [507] * 2
    assert _hits(home, make_request("0")) == 1
    assert ballast_file(home.locations.database).exists()
    assert home.pygraphd("cache", "prune", "--gpu", "H200").returncode == 0
    assert home.status()["entries"] == 0


@pytest.mark.slow
def test_a_full_disk_without_a_daemon(
    home: Home, tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    """With everything on it, as a full quota has: WAL's files are made of the ballast, and so are deletions."""
    small = tmp_path / "small"
    with _mounted(small, "-t", "tmpfs", "-o", "size=12m,mode=700", "tmpfs"):
        home.variables = {"PYGRAPHD_HOME": str(small)}
        with Store(home.locations.database) as store:
            for part in range(5):
                store.record(make_request(*(f"{part}.{n}" for n in range(200))), 0)
        with (small / "other").open("wb", buffering=0) as other, contextlib.suppress(OSError):
            while True:
                other.write(bytes(4096))

        (problem,) = home.status()["problems"]
        assert "the disk is full: free some room or run: pygraphd cache prune" in problem
        assert "damaged" not in problem
        pruned = home.pygraphd("cache", "prune", "--gpu", "H200")

        assert (pruned.returncode, pruned.stderr) == (0, "")
        assert "deleted 1000 entries" in pruned.stdout
        assert home.status()["problems"] == []


def test_a_read_only_home_is_why_a_daemon_does_not_start(home: Home, tmp_path: Path) -> None:
    """And no line that an earlier one left in the log."""
    readonly = tmp_path / "readonly"
    (readonly / "spool").mkdir(mode=0o700, parents=True)
    readonly.chmod(0o700)
    (readonly / "pygraphd.log").write_text("an old line\n")
    home.variables = {"PYGRAPHD_HOME": str(readonly)}
    lock = readonly / "pygraphd.lock"
    lock.touch(0o600)
    with _mounted(readonly, "--bind", str(readonly)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(readonly)], check=True)

        started = home.pygraphd("start")
        stopped = home.pygraphd("stop")
        problems = home.status()["problems"]

    remedy = "set PYGRAPHD_HOME to a folder on a file system that can be written to"
    said = f"{lock}: cannot be locked: Read-only file system; {remedy}"
    assert (started.returncode, started.stderr) == (1, f"pygraphd: pygraphd did not start: {said}\n")
    unknown = "cannot be opened, so whether pygraphd runs is not known: Read-only file system"
    assert (stopped.returncode, stopped.stderr) == (1, f"pygraphd: {lock}: {unknown}; {remedy}\n")
    assert problems == [f"{lock}: the file system is read-only, so no daemon can be started; {remedy}"]


@pytest.mark.slow
def test_a_read_only_folder(home: Home, tmp_path: Path, make_request: Callable[..., RecordRequest]) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    home.variables = {"PYGRAPHD_HOME": "", "XDG_CACHE_HOME": str(cache), "XDG_RUNTIME_DIR": str(home.path)}
    home.locations.database.parent.mkdir(mode=0o700)
    with Store(home.locations.database) as store:
        store.record(make_request("a"), 0)
    with _mounted(cache, "--bind", str(cache)):
        subprocess.run(["mount", "-o", "remount,ro,bind", str(cache)], check=True)
        home.start()
        try:
            assert _hits(home, make_request("a")) == 1
            status, answer = home.ask("POST", "/v3/record", encode(make_request("b")))
            assert status == 503
            assert "cannot be written" in answer["error"]
            assert "cannot be written" in _problems(home)
            assert "KERNELS" in home.pygraphd("cache", "inspect").stdout
        finally:
            assert home.pygraphd("stop").returncode == 0


def test_a_read_only_folder_without_a_database(
    home: Home, tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    cache = tmp_path / "cache"
    home.variables = {"PYGRAPHD_HOME": "", "XDG_CACHE_HOME": str(cache), "XDG_RUNTIME_DIR": str(home.path)}
    with _mounted(cache, "-t", "tmpfs", "-o", "ro,size=1m,mode=700", "tmpfs"):
        home.start()
        try:
            assert _hits(home, make_request("a")) == 0
            assert home.ask("POST", "/v3/record", encode(make_request("a")))[0] == 503
            assert "nothing is stored" in _problems(home)
        finally:
            assert home.pygraphd("stop").returncode == 0
