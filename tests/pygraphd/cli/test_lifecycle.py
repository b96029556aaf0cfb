"""What `start` says beside "started" and "already running": what is wrong with the daemon, and which options it does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.cli import lifecycle
from pygraphd.config import load_config
from pygraphd.daemon import control
from pygraphd.errors import CommandError
from pygraphd.schema.messages import Ping
from pygraphd.schema.version import VERSION
from tests.support.cli_command import locations, pygraphd

if TYPE_CHECKING:
    from pygraphd.schema.locations import Locations

__all__ = ["locations"]  # a fixture

RUNNING = Ping("pygraphd", VERSION, 1, 7, ())


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the answer that a daemon gives which runs already."""
    answer: dict[str, Any] = {"settings": load_config({}, {"idle_exit": "1h"}).settings(), "problems": []}
    monkeypatch.setattr(control, "ping", lambda path: RUNNING)
    monkeypatch.setattr(control, "stats", lambda path: answer)
    return answer


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--log debug", "--log debug"),
        ("--idle-exit 2h --log info", "--idle-exit 2h"),
        ("--team-url postgresql+psycopg://a:secret@h/d", "--team-url URL"),
    ],
)
def test_an_option_that_the_running_daemon_lacks_is_not_dropped_in_silence(
    locations: Locations,
    stats: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    given: str,
    said: str,
) -> None:
    assert pygraphd("start", *given.split()) == 0
    printed = capsys.readouterr()
    assert printed.out == "already running (pid 7)\n"
    assert printed.err == (
        f"pygraphd: not applied, as the daemon runs already: {said}; run: pygraphd restart {said}\n"
    )


@pytest.mark.parametrize("given", ["", "--log info", "--idle-exit 60m"])
def test_an_option_that_it_has_is_no_matter(
    locations: Locations, stats: dict[str, Any], capsys: pytest.CaptureFixture[str], given: str
) -> None:
    assert pygraphd("start", *given.split()) == 0
    assert capsys.readouterr().err == ""


def test_one_that_cannot_be_asked_may_lack_it(
    locations: Locations, stats: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object) -> None:
        raise CommandError("the daemon did not answer")

    monkeypatch.setattr(control, "stats", refuse)
    config = load_config({}, {"log": "info"})
    assert lifecycle.not_applied(locations, config, {"log": "info"}) == ["--log", "info"]
    assert lifecycle.problems(locations) == []


@pytest.mark.parametrize("command", ["start", "restart"])
def test_a_daemon_that_starts_with_a_problem_says_it(
    locations: Locations,
    stats: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
) -> None:
    stats["problems"] = ["cache.db: is not a regular file", "port 9: in use"]
    monkeypatch.setattr(lifecycle, "start", lambda *_words: (RUNNING, True))
    monkeypatch.setattr(lifecycle, "stop", lambda _locations: 7)

    assert pygraphd(command, "--log", "debug") == 0

    printed = capsys.readouterr()
    assert printed.out == "started (pid 7)\n"
    assert printed.err == "pygraphd: cache.db: is not a regular file\npygraphd: port 9: in use\n"
