"""What `start` says beside "started" and "already running": what is wrong with the daemon, and which options it does not have."""

from __future__ import annotations

import shlex
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
    stats["settings"] = {}
    stats["problems"] = ["cache.db: is not a regular file", "port 9: in use"]
    monkeypatch.setattr(lifecycle, "start", lambda *_words: (RUNNING, True))
    monkeypatch.setattr(lifecycle, "stop", lambda _locations: 7)

    assert pygraphd(command, "--log", "debug") == 0

    printed = capsys.readouterr()
    assert printed.out == "started (pid 7)\n"
    assert printed.err == "pygraphd: cache.db: is not a regular file\npygraphd: port 9: in use\n"


@pytest.fixture
def started(stats: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Return the flags and variables of each daemon that is started from now on, instead of one that has `stats`."""
    made: list[tuple[list[str], dict[str, str]]] = []

    def start(_locations: Locations, flags: list[str], variables: dict[str, str], _say: object) -> object:
        made.append((flags, variables))
        return RUNNING, True

    monkeypatch.setattr(lifecycle, "start", start)
    monkeypatch.setattr(lifecycle, "stop", lambda _locations: 7)
    return made


@pytest.mark.parametrize(
    ("had", "given", "flags", "kept"),
    [
        ({"log": "debug", "idle_exit": "1h"}, "", ["--idle-exit=3600", "--log=debug"], "--idle-exit 3600 --log debug"),
        ({"log": "debug", "idle_exit": "1h"}, "--log info", ["--idle-exit=3600", "--log=info"], "--idle-exit 3600"),
        ({"metrics_port": "9123"}, "--log info", ["--log=info", "--metrics-port=9123"], "--metrics-port 9123"),
        ({"idle_exit": "0"}, "", ["--idle-exit=0"], "--idle-exit 0"),
        ({}, "", [], ""),
    ],
)  # fmt: skip
def test_a_restart_keeps_the_options_of_the_daemon_before(
    locations: Locations,
    stats: dict[str, Any],
    started: list[tuple[list[str], dict[str, str]]],
    capsys: pytest.CaptureFixture[str],
    had: dict[str, str],
    given: str,
    flags: list[str],
    kept: str,
) -> None:
    # What it had from a variable or the file, the next one reads there.
    stats["settings"] = load_config({"PYGRAPHD_LEASE": "30s", "PYGRAPHD_LOG": "warning"}, had).settings()

    assert pygraphd("restart", *given.split()) == 0

    assert [(sorted(words), variables) for words, variables in started] == [(flags, {})]
    said = f"pygraphd: kept from the daemon before: {kept}; `pygraphd stop` and then `start` drops it\n"
    assert capsys.readouterr().err == (said if kept else "")


def test_a_url_is_kept_unless_it_has_a_password_that_the_daemon_does_not_tell(
    locations: Locations,
    stats: dict[str, Any],
    started: list[tuple[list[str], dict[str, str]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    def restarted_from(url: str) -> str:
        stats["settings"] = load_config({}, {"team_url": url}).settings()
        assert pygraphd("restart") == 0
        return capsys.readouterr().err

    for place in ("role@host/team", "/team?host=/run/postgresql", "role@/team?host=/run/postgresql&options="):
        url = f"postgresql+psycopg://{place}"
        said = f"kept from the daemon before: --team-url {shlex.quote(url)};"
        assert said in restarted_from(url)
        assert started.pop() == ([], {"PYGRAPHD_FLAG_TEAM_URL": url})
    url = "postgresql+psycopg://role@host/team"
    for secret in ("postgresql://role:s3cret@host/team", f"{url}?password=s3cret"):
        said = restarted_from(secret)
        assert said == (
            "pygraphd: not kept, as the daemon does not tell all of it: --team-url=...; run: pygraphd restart --team-url=...\n"
        )
        assert started.pop() == ([], {})


@pytest.mark.parametrize("told", [None, [], {"log": 1}, {"log": {"origin": "--log"}}, {"idle_exit": {"origin": "--idle-exit", "value": [1e999]}}])  # fmt: skip
def test_what_a_daemon_tells_of_its_options_ends_no_restart(
    locations: Locations, stats: dict[str, Any], started: list[tuple[list[str], dict[str, str]]], told: object
) -> None:
    stats["settings"] = told

    assert pygraphd("restart") == 0
    assert started == [([], {})]
