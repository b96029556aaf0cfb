"""A running daemon under management: settings read anew, metrics, statistics, logs, socket activation."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.cli import main
from pygraphd.schema import ownership
from pygraphd.schema.messages import LOOKUP_PATH, RECORD_PATH, LookupRequest, encode
from tests.support.daemon_home import HANGS_S
from tests.support.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.schema.messages import RecordRequest
    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon


def metrics(connection: http.client.HTTPConnection) -> str:
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.status == 200
    assert response.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    return response.read().decode()


def settings_of(home: Home) -> dict[str, dict[str, object]]:
    settings: dict[str, dict[str, object]] = home.ask("GET", "/v1/stats")[1]["settings"]
    return settings


def test_sighup_reads_the_settings_and_opens_the_log_anew(home: Home) -> None:
    pid = home.start()
    file, log, port = home.path / "config.toml", home.locations.log, free_port()
    log.rename(moved := log.with_name("moved.log"))

    file.write_text(f"lease = 5\nlog = 'debug'\nmetrics_port = {port}\nidle_exit = '1h'")
    os.kill(pid, signal.SIGHUP)
    home.wait_until(lambda: settings_of(home)["lease"]["value"] == 5)

    assert "settings read anew" in log.read_text()
    assert "settings read anew" not in moved.read_text()
    assert settings_of(home)["idle_exit"] == {"value": 3600.0, "origin": f"{file}: idle_exit"}
    home.wait_until(lambda: _connects(port))
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        assert "pygraphd_entries 0\n" in metrics(connection)
        connection.request("GET", "/v1/stats")
        assert connection.getresponse().status == 404  # numbers only

    file.write_text("lease = 'soon'")
    os.kill(pid, signal.SIGHUP)
    home.wait_until(lambda: "settings stay as they were" in log.read_text())
    assert settings_of(home)["lease"]["value"] == 5
    file.write_text("")
    os.kill(pid, signal.SIGHUP)
    home.wait_until(lambda: not _connects(port))
    assert home.processes[0].poll() is None


def _connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.mark.slow
def test_commands_see_what_a_daemon_counts(
    home: Home,
    make_request: Callable[..., RecordRequest],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert home.pygraphd("start", "--metrics-port", str(port), "--log", "debug").returncode == 0
        (problem,) = home.status()["problems"]
        assert problem.startswith(f"metrics_port: 127.0.0.1:{port} cannot be bound")
    request = make_request("a")
    lookup = LookupRequest(request.environment.digest(), (request.records[0].graph.digest,))
    assert home.ask("POST", LOOKUP_PATH, encode(lookup))[0] == 200
    assert home.ask("POST", RECORD_PATH, encode(request))[0] == 200
    with ownership.connect(home.locations.socket, HANGS_S) as connected:
        connection = http.client.HTTPConnection("pygraphd")
        connection.sock = connected
        assert 'pygraphd_misses_total{reason="unknown"} 1\n' in metrics(connection)
    for name, value in home.environ.items():
        monkeypatch.setenv(name, value)
    assert ran(capsys, "stats", "--json")["since_ever"]["unknown"] == 1
    told = ran(capsys, "stats", "--zero", "--json")
    assert [told[part]["unknown"] for part in ("since_start", "since_ever")] == [0, 0]
    assert (
        ran(capsys, "cache", "delete", request.records[0].graph.digest, "--dry-run", "--json")["entries"] == 1
    )
    assert ran(capsys, "cache", "clear", "--yes", "--json")["entries"] == 1
    assert home.status()["entries"] == 0


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Run a command here; return what it says."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    captured = capsys.readouterr()
    assert caught.value.code == 0, captured.err
    value: dict[str, Any] = json.loads(captured.out)
    return value


ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
os.execv(sys.executable, [sys.executable, "-m", "pygraphd", "start", "--foreground"])
"""


def activate(home: Home, listening: socket.socket) -> subprocess.Popen[bytes]:
    """Start a daemon as systemd does: its socket is descriptor 3."""
    process = subprocess.Popen(
        [sys.executable, "-c", ACTIVATE, str(listening.fileno())],
        env=home.environ,
        pass_fds=[listening.fileno()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )
    home.processes.append(process)
    return process


@pytest.mark.slow
def test_a_socket_of_systemd_is_served_and_left_in_place(home: Home) -> None:
    path = home.locations.socket
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen()
        for _ in range(2):
            with ownership.connect(path, HANGS_S) as waiting:
                # It has come before the daemon, and is served all the same.
                process = activate(home, listening)
                connection = http.client.HTTPConnection("pygraphd")
                connection.sock = waiting
                connection.request("GET", "/v1/ping")
                assert json.loads(connection.getresponse().read())["pid"] == process.pid
            assert home.pygraphd("stop").stdout == f"stopped (pid {process.pid})\n"
            assert process.wait(HANGS_S) == 0
            assert path.exists()


def test_another_socket_of_systemd_is_refused(home: Home) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(home.path / "other.sock"))
        listening.listen()
        process = activate(home, listening)
        _, told = process.communicate(timeout=HANGS_S)
    assert process.returncode == 1
    assert b"other.sock', but programs look for" in told
