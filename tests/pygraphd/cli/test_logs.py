from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pygraphd.cli.logs import follow, last_lines
from pygraphd.daemon import control
from pygraphd.errors import CommandError
from pygraphd.schema.messages import Ping
from pygraphd.schema.version import VERSION
from tests.support.cli_command import locations, pygraphd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pygraphd.schema.locations import Locations

__all__ = ["locations"]  # a fixture


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "pygraphd.log"
    file.write_text("".join(f"line {number}\n" for number in range(10)))
    return file


def test_the_last_lines_go_on_into_the_file_before(log: Path) -> None:
    assert last_lines(log, 2) == ["line 8", "line 9"]
    assert last_lines(log, 0) == []
    assert len(last_lines(log, 50)) == 10
    log.with_name("pygraphd.log.1").write_text("older\nold\n")
    assert last_lines(log, 11)[:2] == ["old", "line 0"]


def test_nothing_reaches_the_terminal_raw(log: Path) -> None:
    log.write_bytes(b"\x1b[31mred\xff\r\n")
    assert last_lines(log, 1) == ["?[31mred\N{REPLACEMENT CHARACTER}"]


def test_no_log_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="none: there is no log yet; a daemon in the background writes it"):
        last_lines(tmp_path / "none", 1)
    with pytest.raises(CommandError, match="there is no log yet"):
        next(follow(tmp_path / "none", 1))


@pytest.mark.parametrize("words", [(), ("-f",)])
def test_where_the_log_would_be_is_said(
    locations: Locations, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert pygraphd("logs", *words) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"pygraphd: {locations.log}: there is no log yet; a daemon in the background writes it: run pygraphd start\n"
    )


def test_a_daemon_that_logs_elsewhere_is_not_to_be_started_once_more(
    locations: Locations, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "ping", lambda path: Ping("pygraphd", VERSION, 1, 7, ()))
    assert pygraphd("logs") == 1
    said = capsys.readouterr().err
    assert f"{locations.log}: there is no log, though pid 7 runs: in the foreground of a terminal" in said
    assert "pygraphd start" not in said
    assert "`pygraphd restart` starts one in the background" in said


def test_what_is_added_follows_through_a_rotation_and_a_cut(log: Path) -> None:
    def add(text: str) -> None:
        with log.open("a") as stream:
            stream.write(text)

    longer = "new " * 100  # than all of the old file, so that its size tells nothing

    def rotate() -> None:
        add("the last of the old\n")
        log.rename(log.with_name("pygraphd.log.1"))

    def cut() -> None:
        log.write_text("cut off\n")

    happens: Iterator[Callable[[], None]] = iter(
        [
            lambda: add("half a "),
            lambda: add("line\n"),
            rotate,
            lambda: add(f"{longer}\n"),
            cut,
        ]
    )
    lines = follow(log, 1, wait=lambda: next(happens)())
    assert [next(lines) for _ in range(5)] == [
        "line 9",
        "half a line",
        "the last of the old",
        longer,
        "cut off",
    ]
    lines.close()
