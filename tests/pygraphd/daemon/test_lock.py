from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli import lifecycle
from pygraphd.daemon import control
from pygraphd.daemon.lock import Activity, acquire, holder, hung_text, is_held, not_locked_text, why_unknown
from pygraphd.errors import CommandError
from pygraphd.schema.locations import Locations, locate

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def locations(tmp_path: Path) -> Locations:
    return locate({"PYGRAPHD_HOME": str(tmp_path)})


def _acquired_elsewhere(home: Path) -> str:
    """Try to take the lock in another process; returns what that process saw."""
    code = "from pygraphd.daemon.lock import acquire; from pygraphd.schema.locations import locate; print(acquire(locate()))"
    answer = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYGRAPHD_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
    )
    return answer.stdout.strip()


def test_only_one_process_has_it(locations: Locations, tmp_path: Path) -> None:
    held = acquire(locations)
    assert held is not None
    assert _acquired_elsewhere(tmp_path) == "None"
    held.close()
    assert _acquired_elsewhere(tmp_path) != "None"


def test_a_disk_that_takes_no_name_keeps_nobody_from_it_and_is_left_as_it_was(
    locations: Locations, tmp_path: Path
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        held = acquire(locations)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert held is not None
    assert list(tmp_path.iterdir()) == [locations.lock]
    held.close()


def test_the_lock_file_outlives_its_holder(locations: Locations) -> None:
    # Deleting it would let two processes lock two files of one name.
    held = acquire(locations)
    assert held is not None
    inode = locations.lock.stat().st_ino
    held.close()
    assert locations.lock.stat().st_ino == inode


def test_the_holder_is_named_while_it_lives(locations: Locations) -> None:
    assert holder(locations) is None
    held = acquire(locations)
    assert held is not None
    assert holder(locations) == os.getpid()
    assert hung_text(locations).endswith(f"kill -9 {os.getpid()}")
    held.close()
    assert holder(locations) is None
    assert "fuser" in hung_text(locations)


def test_asking_takes_nothing(locations: Locations) -> None:
    assert not is_held(locations)
    assert not locations.lock.exists()
    held = acquire(locations)
    assert held is not None
    assert is_held(locations)
    held.close()
    assert not is_held(locations)


@pytest.mark.parametrize(
    ("activity", "text"),
    [
        (Activity.STARTING, "is starting"),
        (Activity.ENDING, "is ending"),
        (Activity.COMMAND, "changes the cache"),
    ],
)
def test_a_holder_that_is_about_to_answer_or_to_end_is_not_to_be_killed(
    locations: Locations, activity: Activity, text: str
) -> None:
    held = acquire(locations, activity=activity)
    assert held is not None
    assert f"process {os.getpid()} {text}" in hung_text(locations)
    assert "-9" not in hung_text(locations)
    held.say(Activity.SERVING)
    assert "-9" in hung_text(locations)
    held.close()


def test_a_holder_that_cannot_be_connected_to_is_not_to_be_killed(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_path: Path, _timeout_s: float) -> None:
        raise PermissionError(13, "Permission denied")

    held = acquire(locations)
    assert held is not None
    locations.socket.touch()
    monkeypatch.setattr(control, "connect", refuse)
    assert hung_text(locations) == (
        f"process {os.getpid()} holds the lock, but {locations.socket} cannot be connected to: Permission denied; "
        f"run: chmod 600 {locations.socket}"
    )
    held.close()


@pytest.mark.parametrize(
    ("status", "text"), [(503, "answers with status 503 (busy): try again later"), (200, "it answers now")]
)
def test_a_holder_that_answers_is_not_to_be_killed(
    locations: Locations, monkeypatch: pytest.MonkeyPatch, status: int, text: str
) -> None:
    held = acquire(locations)
    assert held is not None
    monkeypatch.setattr(control, "_ask", lambda *_words: (status, b'{"error": "busy"}'))
    assert text in hung_text(locations)
    assert "-9" not in hung_text(locations)
    held.close()


def test_a_lock_that_cannot_be_opened_leaves_unknown_whether_it_is_held(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_unknown(locations) is None
    locations.lock.touch()
    assert why_unknown(locations) is None

    def refuse(*_words: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert why_unknown(locations) == (
        f"{locations.lock}: cannot be opened, so whether pygraphd runs is not known: Permission denied; run: chmod 600 {locations.lock}"
    )
    with pytest.raises(CommandError, match="whether pygraphd runs is not known"):
        lifecycle.stop(locations)


def test_on_a_read_only_file_system_no_mode_is_to_be_changed(
    locations: Locations, monkeypatch: pytest.MonkeyPatch
) -> None:
    locations.lock.touch()
    error = OSError(errno.EROFS, os.strerror(errno.EROFS))

    def refuse(*_words: object) -> int:
        raise error

    monkeypatch.setattr(os, "open", refuse)
    remedy = "set PYGRAPHD_HOME to a folder on a file system that can be written to"
    said = "cannot be opened, so whether pygraphd runs is not known: Read-only file system"
    assert why_unknown(locations) == f"{locations.lock}: {said}; {remedy}"
    assert not_locked_text(locations, error).endswith(f"cannot be locked: Read-only file system; {remedy}")
