"""Settings on the command line, in variables and in the file: where each comes from, and what is said of bad ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon import control
from pygraphd.schema.messages import Ping
from pygraphd.schema.version import VERSION
from tests.support.cli_command import locations, pygraphd

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.schema.locations import Locations

__all__ = ["locations"]  # a fixture


def test_each_setting_is_shown_with_its_origin(
    locations: Locations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = locations.runtime / "config.toml"
    file.write_text("max_unused = '1w'")
    monkeypatch.setenv("PYGRAPHD_MAX_SIZE", "1GB")
    assert pygraphd("config", "show") == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["max_size", "1", "GB", "PYGRAPHD_MAX_SIZE", "PYGRAPHD_MAX_SIZE"] in lines
    assert ["max_unused", "7d", f"{file}:", "max_unused", "PYGRAPHD_MAX_UNUSED"] in lines
    assert ["lease", "1m", "default", "PYGRAPHD_LEASE"] in lines
    assert lines[-1] == ["file:", str(file)]
    assert pygraphd("config", "show", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["max_size"] == {"value": 10**9, "origin": "PYGRAPHD_MAX_SIZE"}


def test_beside_a_setting_that_is_not_valid_the_others_are_shown(
    locations: Locations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (locations.runtime / "config.toml").write_text("foo = 1\nlog = 'debug'")
    monkeypatch.setenv("PYGRAPHD_LEASE", "x")
    assert pygraphd("config", "show") == 2
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines()]
    assert ["lease", "not", "valid", "PYGRAPHD_LEASE", "PYGRAPHD_LEASE"] in lines
    assert ["idle_exit", "30m", "default", "PYGRAPHD_IDLE_EXIT"] in lines
    assert ["log", "debug"] in [line[:2] for line in lines]
    assert [line.partition(": give")[0] for line in captured.err.splitlines()] == [
        "pygraphd: PYGRAPHD_LEASE: 'x' is no length of time",
        f"pygraphd: {locations.runtime}/config.toml: unknown setting 'foo', known are "
        "idle_exit, housekeeping, lease, log, max_size, max_unused, metrics_port, team_url, shipped",
    ]
    assert pygraphd("config", "show", "--json") == 2
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["lease"]["value"] is None
    assert "no length of time" in told["settings"]["lease"]["error"]
    assert len(told["problems"]) == 2


def test_a_bad_configuration_is_a_usage_error(
    locations: Locations, capsys: pytest.CaptureFixture[str]
) -> None:
    (locations.runtime / "config.toml").write_text("idle_exit = 'x'")
    assert pygraphd("start") == 2
    assert "config.toml: idle_exit: 'x' is no length of time" in capsys.readouterr().err
    assert pygraphd("start", "--idle-exit", "never") == 2
    assert "--idle-exit: 'never'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["start", "restart", "status"])
def test_a_setting_that_keeps_the_daemon_from_starting_is_named(
    locations: Locations,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    monkeypatch.setenv("PYGRAPHD_LEASE", "foo")
    assert pygraphd(command) == 2
    captured = capsys.readouterr()
    assert captured.err == (
        "pygraphd: PYGRAPHD_LEASE: 'foo' is no length of time: give seconds, or 30m, 12h, 30d, 4w\n"
    )
    assert ("not running" in captured.out) == (command == "status")  # it still says the rest
    assert pygraphd("stop") == 3
    assert pygraphd("cache", "inspect") == 0


def test_the_settings_here_concern_the_next_daemon_where_one_runs(
    locations: Locations, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYGRAPHD_LEASE", "foo")
    monkeypatch.setattr(control, "ping", lambda path: Ping("pygraphd", VERSION, 1, 1, ()))
    monkeypatch.setattr(
        control, "stats", lambda path: {"settings": {"lease": {"value": 60.0, "origin": "default"}}}
    )
    assert pygraphd("status", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["settings"]["lease"]["origin"] == "default"
    assert captured.err == ""
    # It will keep the next one from starting, and nobody else says so while this one runs.
    (problem,) = json.loads(captured.out)["problems"]
    assert "the next start will fail: correct or remove it" in problem


def test_a_folder_open_to_others_is_refused(locations: Locations, capsys: pytest.CaptureFixture[str]) -> None:
    locations.runtime.chmod(0o777)
    assert pygraphd("start") == 2
    assert "others can write to it" in capsys.readouterr().err


def test_a_line_break_in_the_home_begins_no_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "a\nlease 1s forged"
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text("log = 'debug'")
    monkeypatch.setenv("PYGRAPHD_HOME", str(home))
    assert pygraphd("config", "show") == 0
    shown = capsys.readouterr().out
    assert "/a?lease 1s forged/config.toml" in shown
    assert not [line for line in shown.splitlines() if line.startswith("lease 1s")]


@pytest.mark.parametrize("words", ["config show", "start", "status", "start --metrics-port 0", "doctor"])
@pytest.mark.parametrize("what", ["file", "variable"])
def test_a_setting_of_any_length_is_a_usage_error(
    locations: Locations,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    what: str,
) -> None:
    monkeypatch.setattr("pygraphd.cli.doctor_probe.probe", dict)
    if what == "file":
        (locations.runtime / "config.toml").write_text(f"lease = {'[' * 100_000}")
    else:
        monkeypatch.setenv("PYGRAPHD_METRICS_PORT", "9" * 5000)

    assert pygraphd(*words.split()) == (1 if words == "doctor" else 2)
    said = capsys.readouterr()
    named = "config.toml: not TOML" if what == "file" else "PYGRAPHD_METRICS_PORT: "
    assert named in said.out + said.err
    assert max(map(len, said.err.splitlines()), default=0) < 300
