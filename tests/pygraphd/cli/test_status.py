from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli import lifecycle
from pygraphd.cli.render import status_text
from pygraphd.cli.status import collect
from pygraphd.daemon import lock
from pygraphd.daemon.lock import acquire
from pygraphd.daemon.store import Store
from pygraphd.daemon.team.queue import Queue, publications
from pygraphd.schema import offline
from pygraphd.schema.locations import Locations, locate
from tests.support.warm_python import commands

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.schema.messages import RecordRequest


def _locations(home: Path) -> Locations:
    return locate({"PYGRAPHD_HOME": str(home)})


def test_nothing_there_is_no_problem_and_makes_nothing(tmp_path: Path) -> None:
    status = collect(_locations(tmp_path / "none"))
    assert (status.running, status.entries, status.problems) == (False, 0, [])
    assert list(tmp_path.iterdir()) == []


def test_without_a_daemon_the_files_speak(tmp_path: Path, make_request: Callable[..., RecordRequest]) -> None:
    locations = _locations(tmp_path)
    with Store(locations.database) as store:
        store.record(make_request("a", "b"), uid=0)
    locations.spool.mkdir()
    (locations.spool / "1.json").touch()
    (locations.spool / "2.bad").touch()
    status = collect(locations)
    assert (status.entries, status.spool_waiting, status.spool_bad) == (2, 1, 1)
    assert "1 unreadable files" in status.problems[0]


@pytest.mark.parametrize(("is_first", "too"), [(False, ""), (True, ", and entries of the cache")])
def test_records_that_wait_for_a_team_are_counted(
    tmp_path: Path, make_request: Callable[..., RecordRequest], is_first: bool, too: str
) -> None:
    locations = _locations(tmp_path)
    queue = Queue(locations.team_queue)
    queue.put(publications(make_request("a", "b"), uid=0, now=1000.0))
    if is_first:
        queue.note_team(2000.0)
    queue.close()
    content = locations.team_queue.read_bytes()

    status = collect(locations)

    assert (status.team_waiting, status.problems) == (2, [])
    said = f"team      2 records wait to be published{too}; a daemon with a team does so"
    assert said in status_text(status)
    assert locations.team_queue.read_bytes() == content


@pytest.mark.parametrize(
    ("content", "problem"), [(b"", None), (b"garbage" * 1000, "not a database"), (None, "regular file")]
)
def test_a_queue_that_cannot_be_counted_is_a_problem(
    tmp_path: Path, content: bytes | None, problem: str | None
) -> None:
    locations = _locations(tmp_path)
    if content is None:
        os.mkfifo(locations.team_queue)
    else:
        locations.team_queue.write_bytes(content)

    status = collect(locations)

    assert status.team_waiting == 0
    assert [problem in each for each in status.problems if problem] == ([True] if problem else [])


def test_a_holder_that_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    held = acquire(_locations(tmp_path))
    assert held is not None
    with held:
        assert "holds the lock but does not answer" in collect(_locations(tmp_path)).problems[0]
    assert collect(_locations(tmp_path)).problems == []


def test_a_damaged_file_is_said_before_and_after_it_is_set_aside(tmp_path: Path) -> None:
    locations = _locations(tmp_path)
    locations.database.write_bytes(b"garbage" * 1000)
    before = collect(locations)
    assert before.entries is None
    assert "cannot be read: file is not a database" in before.problems[0]
    Store(locations.database).close()
    after = collect(locations)
    assert after.entries == 0
    assert "was damaged and set aside" in after.problems[0]


@pytest.mark.parametrize(
    "name", ["cache.db", "cache.db-wal", "pygraphd.lock", "pygraphd.pid", "pygraphd.log"]
)
def test_no_pipe_is_waited_for(tmp_path: Path, make_request: Callable[..., RecordRequest], name: str) -> None:
    """Not by `status`, by the store, by the lock, or by a daemon that starts its log."""
    locations = _locations(tmp_path)
    with Store(locations.database) as store:
        store.record(make_request("a"), uid=0)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    is_database = name.startswith("cache.db")

    said = [each for each in collect(locations).problems if "is not a regular file" in each]
    assert bool(said) is (name != "pygraphd.pid")
    with Store(locations.database) as store:
        assert store.can_store is not is_database
    with contextlib.suppress(OSError):
        held = acquire(locations)
        assert held is not None
        held.close()
    lifecycle._Log(locations.log).close()
    assert lock.holder(locations) is None


@pytest.mark.parametrize(
    "words", ["inspect", f"show {'a' * 64}", f"explain {'a' * 64}", "export FILE", "inspect --graph aaaa"]
)
def test_no_listing_waits_for_a_pipe(tmp_path: Path, words: str) -> None:
    os.mkfifo(tmp_path / "cache.db")

    named = words.replace("FILE", str(tmp_path / "file")).split()
    environ = {**os.environ, "PYGRAPHD_HOME": str(tmp_path)}
    done = commands().run(["-m", "pygraphd", "cache", *named], environ, Path.cwd(), 60.0)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"pygraphd: {tmp_path / 'cache.db'}: is not a regular file; move it away\n"


def test_a_sound_database_is_never_called_damaged(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    locations = _locations(tmp_path)
    with Store(locations.database) as store:
        store.record(make_request("a"), uid=0)
    with contextlib.closing(sqlite3.connect(locations.database)) as connection:
        connection.execute("PRAGMA user_version=2")
    status = collect(locations)

    assert (status.entries, status.problems) == (
        None,
        [
            f"{locations.database}: is of version 2, and this pygraphd reads {offline.DATABASE_VERSION}; `pygraphd start` sets it aside"
        ],
    )


def test_what_is_wrong_with_spool_and_socket_is_said(tmp_path: Path) -> None:
    locations = _locations(tmp_path)
    locations.spool.mkdir(mode=0o500)
    locations.socket.touch()
    keeps_out, in_the_way = collect(locations).problems
    assert keeps_out == f"{locations.spool}: its mode 500 keeps you out; run: chmod 700 {locations.spool}"
    assert in_the_way == f"{locations.socket}: is in the way and no socket; move it away"

    locations.spool.chmod(0o777)
    assert "others can write to it" in collect(locations).problems[0]


def test_folders_that_cannot_be_made_are_said() -> None:
    """As those of another user's XDG_RUNTIME_DIR, or below a home that is read-only or none."""
    with tempfile.TemporaryDirectory() as name:  # one that another user may look into
        base = Path(name)
        base.chmod(0o755)
        (base / "file").touch()
        (base / "closed").mkdir()
        (base / "closed").chmod(0o555)  # whatever the umask
        if os.geteuid() == 0:
            os.seteuid(65534)  # root may write everywhere
        try:
            problems = [collect(_locations(base / each / "home")).problems for each in ("file", "closed")]
        finally:
            os.seteuid(os.getuid())

    remedy = "set PYGRAPHD_HOME to a folder of yours"
    assert problems == [
        [f"{base}/file/home: cannot be made, as {base}/file is not a folder; {remedy}"],
        [f"{base}/closed/home: cannot be made, as you may not write to {base}/closed; {remedy}"],
    ]


def test_a_folder_open_to_others_is_said(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    assert "chmod 700" in collect(_locations(tmp_path)).problems[0]
