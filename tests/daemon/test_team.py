"""A daemon whose team cannot be reached: it works as one without a team, and says what is the matter."""

from __future__ import annotations

import http.client
import json
import os
import socket
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.daemon import control
from pygraphd.schema import ownership
from pygraphd.schema.messages import RECORD_PATH, encode
from tests.support.daemon_home import HANGS_S
from tests.support.record_requests import lookup_body, record_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon


@pytest.fixture
def nobody() -> Iterator[str]:
    """Return the URL of a port on which nobody listens, and nobody else will."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"postgresql+psycopg://me:s3cret@127.0.0.1:{bound.getsockname()[1]}/team"


def _team(home: Home) -> dict[str, Any]:
    state = home.ask("GET", "/v1/stats")[1]["team"]
    assert isinstance(state, dict)
    return state


def _queued(home: Home) -> int:
    connection = sqlite3.connect(home.locations.team_queue)
    try:
        (count,) = connection.execute("SELECT count(*) FROM waiting").fetchone()
    finally:
        connection.close()
    assert isinstance(count, int)
    return count


@pytest.mark.slow
def test_records_and_lookups_go_on_and_what_is_to_be_published_waits(home: Home, nobody: str) -> None:
    started = home.pygraphd("start", f"--team-url={nobody}")
    assert started.returncode == 0, started.stderr
    assert home.ask("POST", RECORD_PATH, encode(record_request(["a"])))[0] == 200
    assert len(home.ask("POST", "/v3/lookup", lookup_body("a", "b"))[1]["entries"]) == 1
    home.wait_until(lambda: _team(home)["problem"] != "")

    said = home.pygraphd("status")
    metrics = _metrics(home)
    assert "not usable for" in said.stdout
    assert "onnection refused" in said.stdout
    assert "1 record queued" in said.stdout
    assert "pygraphd_team_reached 0" in metrics
    assert "pygraphd_team_queued 1" in metrics
    peer = control.listener(home.locations.socket)
    assert peer is not None
    words = Path(f"/proc/{peer.pid}/cmdline").read_text()
    assert "start" in words
    everything = [words, said.stdout, metrics, home.locations.log.read_text()]
    everything.append(json.dumps(home.ask("GET", "/v1/stats")[1]))
    assert "s3cret" not in "".join(everything)
    assert _queued(home) == 1


def test_without_psycopg_it_says_what_to_install(home: Home, nobody: str, tmp_path: Path) -> None:
    (tmp_path / "psycopg.py").write_text("raise ImportError('not here')\n")
    home.variables |= {"PYGRAPHD_TEAM_URL": nobody, "PYTHONPATH": str(tmp_path)}
    home.start()
    assert home.ask("POST", RECORD_PATH, encode(record_request(["a"])))[0] == 200
    home.wait_until(lambda: "pip install 'pygraphd[team]'" in home.pygraphd("status").stdout)
    assert "pip install 'pygraphd[team]'" in home.locations.log.read_text()
    assert _queued(home) == 1


def test_a_reload_begins_and_ends_the_exchange(home: Home, nobody: str) -> None:
    pid = home.start()
    assert home.ask("GET", "/v1/stats")[1]["team"] is None
    assert home.ask("POST", RECORD_PATH, encode(record_request(["a"])))[0] == 200
    assert not home.locations.team_queue.exists()

    settings = home.path / "config.toml"
    settings.write_text(f"team_url = {json.dumps(nobody)}\n")
    os.kill(pid, 1)
    home.wait_until(lambda: home.ask("GET", "/v1/stats")[1]["team"] is not None)
    assert home.ask("POST", RECORD_PATH, encode(record_request(["b"])))[0] == 200
    assert _queued(home) == 1

    settings.write_text("")
    os.kill(pid, 1)
    home.wait_until(lambda: home.ask("GET", "/v1/stats")[1]["team"] is None)


@pytest.mark.slow
def test_a_url_that_is_given_as_an_option_is_told_to_be(home: Home, nobody: str) -> None:
    """Over a variable that names another, after the settings were read anew, and without its password in any process's words."""
    home.variables["PYGRAPHD_TEAM_URL"] = "postgresql+psycopg://elsewhere/team"
    shown = nobody.replace("s3cret", "***")

    def told() -> Any:
        return home.ask("GET", "/v1/stats")[1]["settings"]["team_url"]

    for command in ("restart", "start"):  # neither finds a daemon
        assert home.pygraphd(command, "--team-url", nobody).returncode == 0
        assert told() == {"value": shown, "origin": "--team-url"}
        assert f"{shown} (--team-url)" in home.pygraphd("status").stdout
        peer = control.listener(home.locations.socket)
        assert peer is not None
        assert "s3cret" not in Path(f"/proc/{peer.pid}/cmdline").read_text()
        if command == "restart":
            assert home.pygraphd("stop").returncode == 0

    log = home.locations.log
    os.kill(home.status()["pid"], 1)
    home.wait_until(lambda: "settings read anew" in log.read_text())
    assert told()["origin"] == "--team-url"

    assert home.pygraphd("restart", "--team-url=").returncode == 0
    assert told() == {"value": "", "origin": "--team-url"}


@pytest.mark.slow
def test_records_that_wait_are_told_without_a_daemon(home: Home, nobody: str) -> None:
    home.variables["PYGRAPHD_TEAM_URL"] = nobody
    home.start()
    assert home.ask("POST", RECORD_PATH, encode(record_request(["a", "b"])))[0] == 200
    assert home.pygraphd("stop").returncode == 0
    said = home.pygraphd("status")
    assert said.returncode == 3
    assert "2 records wait to be published" in said.stdout
    assert _queued(home) == 2


def test_init_says_in_one_line_why_it_fails(home: Home, nobody: str) -> None:
    refused = home.pygraphd("team", "init", "--team-url", nobody)
    assert refused.returncode == 1
    assert "refused" in refused.stderr
    assert "s3cret" not in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def _metrics(home: Home) -> str:
    with ownership.connect(home.locations.socket, HANGS_S) as connected:
        connection = http.client.HTTPConnection("pygraphd")
        connection.sock = connected
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
