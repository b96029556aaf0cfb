"""`pygraphd cache export` and `import` as processes, with a real daemon over a real socket and without one."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.daemon import control
from pygraphd.schema.messages import encode
from tests.support.daemon_home import COMMAND, HANGS_S, Home
from tests.support.record_requests import record_request

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.daemon, pytest.mark.slow]

MANY = 150
"""More entries than one request takes."""
ONE = ("--graph", hashlib.sha256(b"0").hexdigest()[:12])
"""One of them, which fits into a buffer that is written when all else is done."""


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    """Return another machine's home with a running daemon, whose cache all tests of this file read."""
    opened = Home(tmp_path_factory.mktemp("elsewhere"))
    opened.path.chmod(0o700)
    try:
        opened.start()
        opened.ask("POST", "/v3/record", encode(record_request(list(map(str, range(MANY))))))
        yield opened
    finally:
        opened.close()


@pytest.fixture
def elsewhere(exporter: Home) -> Home:
    """Return the other machine's home, with variables of the test's own."""
    return Home(exporter.path)


@pytest.fixture(scope="module")
def file(exporter: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what another machine's cache has exported while its daemon ran."""
    path = tmp_path_factory.mktemp("exported") / "known.jsonl"
    done = exporter.pygraphd("cache", "export", str(path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"wrote {MANY} entries\n")
    return path


def listed(home: Home) -> list[dict[str, Any]]:
    entries = json.loads(home.pygraphd("cache", "inspect", "--json").stdout)["entries"]
    assert isinstance(entries, list)
    return entries


def test_a_running_daemon_takes_them_in(home: Home, file: Path) -> None:
    home.start()
    dry = home.pygraphd("cache", "import", str(file), "--dry-run")
    assert dry.stdout.splitlines() == [
        f"added     {MANY}",
        "replaced  0 that were not final, or imported before",
        "kept      0 that are known here",
        "dry run   nothing was written",
    ]
    assert listed(home) == []
    done = home.pygraphd("cache", "import", str(file), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    answer = {
        "schema": 1,
        "added": MANY,
        "replaced": 0,
        "kept": 0,
        "derived": 0,
        "left_out": 0,
        "dry_run": False,
    }
    assert json.loads(done.stdout) == answer
    again = json.loads(home.pygraphd("cache", "import", str(file), "--json").stdout)
    assert again == {**answer, "added": 0, "kept": MANY}
    assert len(listed(home)) == MANY
    shown = json.loads(home.pygraphd("cache", "show", listed(home)[0]["id"], "--json").stdout)
    assert [(each["host"], each["uid"]) for each in shown["measurements"]] == [("import:here", os.geteuid())]


def test_without_a_daemon_the_command_does_it_and_leaves_none(home: Home, file: Path) -> None:
    done = home.pygraphd("cache", "import", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    assert control.ping(home.locations.socket) is None
    assert [entry["uid"] for entry in listed(home)] == [os.geteuid()] * MANY
    assert home.locations.database.stat().st_mode & 0o077 == 0
    home.start()
    assert home.status()["entries"] == MANY


def test_a_dry_run_leaves_nothing_behind(home: Home, file: Path) -> None:
    done = home.pygraphd("cache", "import", str(file), "--dry-run", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["added"] == MANY
    assert list(home.path.iterdir()) == []


def test_a_daemon_that_starts_meanwhile_is_waited_for(home: Home, file: Path) -> None:
    process = home.spawn()
    done = home.pygraphd("cache", "import", str(file))
    assert (done.returncode, done.stderr) == (0, "")
    home.wait_until(lambda: control.ping(home.locations.socket) is not None)
    assert process.poll() is None
    assert home.status()["entries"] == MANY


def test_two_imports_at_once_take_turns(home: Home, file: Path) -> None:
    words = [*COMMAND, "cache", "import", str(file)]
    both = [
        subprocess.Popen(
            words, env=home.environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = [(each.communicate(timeout=HANGS_S)[1], each.returncode) for each in both]
    assert said == [("", 0)] * 2
    assert len(listed(home)) == MANY


def test_through_a_pipe(home: Home, elsewhere: Home, file: Path) -> None:
    written = elsewhere.pygraphd("cache", "export", "-")
    assert written.stdout == file.read_text()
    assert written.stderr == f"wrote {MANY} entries\n"
    taken = home.pygraphd_fed(written.stdout, "cache", "import", "-")
    assert (taken.returncode, len(listed(home))) == (0, MANY)


def test_an_export_overwrites_nothing(elsewhere: Home, file: Path) -> None:
    before = file.read_bytes()
    done = elsewhere.pygraphd("cache", "export", str(file))
    assert done.returncode == 2
    assert done.stderr == f"pygraphd: {file}: exists already; give another name, or delete it first\n"
    assert file.read_bytes() == before


def test_an_export_that_cannot_be_written_says_so(elsewhere: Home, file: Path) -> None:
    missing = file.parent / "missing" / "file"
    done = elsewhere.pygraphd("cache", "export", str(missing))
    assert done.returncode == 2
    assert f"{missing}: cannot be written, as there is no folder {missing.parent}" in done.stderr
    done = elsewhere.pygraphd("cache", "export", str(file / "within"))
    assert done.returncode == 2
    assert f"as there is no folder {file}" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")  # noqa: PTH110
def test_half_an_export_is_no_success(elsewhere: Home, file: Path) -> None:
    assert file.exists()
    elsewhere.variables["PYTHONUNBUFFERED"] = ""
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = elsewhere.pygraphd_into(full, "cache", "export", "-", *ONE)
    assert done.returncode == 1
    assert done.stderr == "pygraphd: standard output: cannot be written: No space left on device\n"


def test_a_reader_that_has_enough_is_told_nothing(elsewhere: Home, file: Path) -> None:
    assert file.exists()
    elsewhere.variables["PYTHONUNBUFFERED"] = ""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        done = elsewhere.pygraphd_into(gone, "cache", "export", "-", *ONE)
    assert (done.returncode, done.stderr) == (1, "")


def test_there_must_be_something_to_export(home: Home, tmp_path: Path) -> None:
    done = home.pygraphd("cache", "export", str(tmp_path / "new"))
    assert done.returncode == 1
    assert "there is no cache yet" in done.stderr
    assert not (tmp_path / "new").exists()


def test_what_waits_in_the_spool_is_told(home: Home, file: Path, tmp_path: Path) -> None:
    assert home.pygraphd("cache", "import", str(file)).returncode == 0
    home.put_in_spool("some.json", encode(record_request(["spooled"])))
    done = home.pygraphd("cache", "export", str(tmp_path / "new"))
    assert done.stderr == f"wrote {MANY} entries; 1 file waits in the spool: run `pygraphd start` first\n"


@pytest.mark.parametrize("running", [True, False])
def test_of_a_bad_file_nothing_is_stored(home: Home, file: Path, tmp_path: Path, running: bool) -> None:
    if running:
        home.start()
    lines = file.read_text().splitlines(keepends=True)
    bad = tmp_path / "bad.jsonl"
    bad.write_text("".join(lines[:-1]) + lines[-1].replace("sm_count", "cores"))
    done = home.pygraphd("cache", "import", str(bad))
    assert done.returncode == 2
    assert (
        done.stderr
        == f"pygraphd: {bad}: line {MANY + 1}: environment: sm_count is missing; nothing was imported\n"
    )
    assert listed(home) == []


def test_a_file_that_is_not_there_is_named(home: Home, tmp_path: Path) -> None:
    done = home.pygraphd("cache", "import", str(tmp_path / "missing"))
    assert (done.returncode, done.stderr) == (
        2,
        f"pygraphd: {tmp_path / 'missing'}: cannot be read: No such file or directory\n",
    )


@pytest.mark.parametrize("body", [b"", b"[]", b'{"entries": [{}]}', b'{"entries": 1}'])
def test_a_bad_request_is_refused(shared_home: Home, body: bytes) -> None:
    status, answer = shared_home.ask("POST", "/v3/import", body)
    assert (status, set(answer)) == (400, {"error"})


def test_a_daemon_that_hangs_is_named_and_nothing_is_done(home: Home, file: Path) -> None:
    pid = home.start()
    os.kill(pid, signal.SIGSTOP)
    done = home.pygraphd_soon("cli.writing.LOCK_WAIT_S", "cache", "import", str(file))
    assert done.returncode == 1
    assert f"process {pid} holds the lock but does not answer; end it with: kill -9 {pid}" in done.stderr
    os.kill(pid, signal.SIGCONT)
    assert listed(home) == []
