"""The log goes on whatever is done to its file, and never grows without bound."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon import log_file
from pygraphd.daemon.log_file import LogFile

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pygraphd.log"


@pytest.fixture
def log(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LogFile]:
    monkeypatch.setattr(log_file, "LOG_BYTES", 1000)
    monkeypatch.setattr(log_file, "MOST_BYTES", 2000)
    opened = LogFile(path)
    yield opened
    opened.close()


def _say(log: LogFile, text: str) -> None:
    log.handle(logging.LogRecord("x", logging.INFO, __file__, 0, text, None, None))


def test_a_file_that_was_removed_or_replaced_is_begun_anew(log: LogFile, path: Path) -> None:
    _say(log, "one")
    path.unlink()
    _say(log, "two")
    assert path.read_text() == "two\n"
    assert path.stat().st_mode & 0o777 == 0o600
    path.rename(path.with_name("moved"))
    path.write_text("there\n")
    _say(log, "three")
    assert path.read_text() == "there\nthree\n"
    path.unlink()
    assert log.look() == []
    assert path.exists()


def test_no_link_is_followed(log: LogFile, path: Path, tmp_path: Path) -> None:
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    _say(log, "one")
    assert not (tmp_path / "elsewhere").exists()
    (problem,) = log.look()
    assert problem.startswith(f"{path}: cannot be opened: ")
    path.unlink()
    _say(log, "two")
    assert (path.read_text(), log.look()) == ("two\n", [])


def test_a_file_that_came_back_is_no_problem(log: LogFile, path: Path) -> None:
    moved = path.rename(path.with_name("moved"))
    path.mkdir()
    _say(log, "one")
    (problem,) = log.look()
    assert problem.startswith(f"{path}: cannot be opened: ")
    path.rmdir()
    moved.rename(path)
    assert (log.look(), path.read_text()) == ([], "one\n")


def test_what_python_prints_moves_too(log: LogFile, path: Path) -> None:
    printed = os.dup(2)
    try:
        before = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(before, 2)
        os.close(before)
        path.unlink()
        _say(log, "one")
        os.write(2, b"printed\n")
    finally:
        os.dup2(printed, 2)
        os.close(printed)
    assert path.read_text() == "one\nprinted\n"


def test_a_full_file_is_renamed(log: LogFile, path: Path) -> None:
    for number in range(15):
        _say(log, f"{number}{'x' * 90}")
    assert path.read_text().startswith("10x")
    assert path.with_name("pygraphd.log.1").read_text().startswith("0x")


def test_a_file_that_cannot_be_renamed_is_cut_off(
    log: LogFile, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    older = path.with_name("pygraphd.log.1")
    older.mkdir()
    for number in range(15):
        _say(log, f"{number}{'x' * 90}")
    assert path.read_text().count("cannot be renamed") == 1
    for number in range(100):
        _say(log, f"{number}{'x' * 90}")
        assert path.stat().st_size <= 2000
    text = path.read_text()
    assert text.startswith(f"{path}: cannot be renamed to pygraphd.log.1: Is a directory")
    assert (text.count("cannot be renamed"), text.count("99x")) == (1, 1)
    assert log.look() == [
        f"{path}: cannot be renamed to pygraphd.log.1: Is a directory; it is cut off at 2000 bytes"
    ]
    older.rmdir()
    for number in range(15):
        _say(log, f"{number}{'x' * 90}")
    assert older.is_file()
    assert log.look() == []
    assert capfd.readouterr().err == ""


def test_a_write_that_fails_is_a_problem_until_one_succeeds(
    log: LogFile, path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        _say(log, "one")
    assert log.look() == [f"{path}: cannot be written: No space left on device; lines are lost"]
    _say(log, "two")
    assert (path.read_text(), log.look()) == ("two\n", [])
    assert capfd.readouterr().err == ""
