"""A program that begins while its daemon starts: what it does not find yet is a miss, and no failure."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli import lifecycle
from pygraphd.client.common.report import Report
from pygraphd.client.decisions.cache import Cache
from pygraphd.daemon import control
from pygraphd.daemon.lock import Activity, activity_of_holder
from pygraphd.schema.messages import encode
from tests.support.daemon_home import COMMAND
from tests.support.patience import patient

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import RecordRequest
    from tests.support.daemon_home import Home

pytestmark = [pytest.mark.daemon, pytest.mark.usefixtures("patient")]

# Starts the daemon as the hook does, and asks it from then on, as fast as it can, until it answers.
PROGRAM = """
import json, sys, time
from pygraphd.client.decisions import daemon_start
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.common.report import Report
from pygraphd.client.decisions.transport import Transport
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import locate

environment, graphs = Environment(**json.loads(sys.argv[1])), ["a" * 64]
report = Report()
cache = Cache(locate(), "here", report)
reason = daemon_start.ensure(Transport(locate().socket))
asked, deadline = 0, time.monotonic() + 60
while report.daemon_version is None and time.monotonic() < deadline:
    cache.lookup(environment, graphs)
    cache.lease(environment, graphs)
    asked += 1
print(json.dumps([reason, asked, report.daemon_version, dict(report.failures)]))
"""


def test_a_program_that_starts_its_daemon_counts_no_failure(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    home.variables["PYGRAPHD_AUTOSTART"] = "1"
    factors = json.dumps(make_request().environment.factors())

    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, factors],
        env=patient(home.environ),
        capture_output=True,
        text=True,
        check=True,
    )

    reason, asked, version, failures = json.loads(done.stdout)
    assert (reason, failures) == (None, {})
    assert version is not None
    assert asked > 1, "it answered at once, so nothing was seen of its start"


def test_a_program_whose_daemon_somebody_else_starts_counts_none_either(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    environment = make_request().environment
    cache = Cache(home.locations, "here", report := Report())
    holder = home.locations.lock.with_suffix(".pid")

    home.spawn()
    home.wait_until(holder.exists)  # from here on the lock is held
    while control.ping(home.locations.socket) is None:
        cache.lookup(environment, ["a" * 64])
        assert not home.processes[0].poll()
    cache.lookup(environment, ["a" * 64])

    assert (dict(report.failures), report.daemon_version is not None) == ({}, True)


# A daemon whose database takes as long to check as the file of the gate is not there.
SLOW = """
import sys, time
from pathlib import Path
from pygraphd.cli import main
from pygraphd.daemon import database
check, gate = database._check_health, Path(sys.argv[1])
def slow(connection):
    while not gate.exists():
        time.sleep(0.02)
    check(connection)
database._check_health = slow
main(sys.argv[2:])
"""


@pytest.fixture
def gate(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file for which every daemon that `start` starts in this process waits."""
    gate = tmp_path / "gate"

    def spawn(*_: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", SLOW, str(gate), "start", "--foreground"]
        process = subprocess.Popen(command, env=home.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        home.processes.append(process)
        return process

    monkeypatch.setattr(lifecycle, "_spawn", spawn)
    monkeypatch.setattr(lifecycle, "SAY_S", 0.0)
    return gate


def test_a_start_waits_for_the_check_of_the_database_and_says_so(
    home: Home, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def say(text: str) -> None:
        monkeypatch.setattr(lifecycle, "START_S", 0.0)  # as if all of it had passed
        told.append(text)
        threading.Timer(0.3, gate.touch).start()

    running, started = lifecycle.start(home.locations, say=say)
    assert (started, running.pid) == (True, home.processes[0].pid)
    assert told == [f"pygraphd checks its database {home.locations.database}; waiting for it"]


def test_a_daemon_that_serves_from_one_look_to_the_next_is_met(
    home: Home, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it has been starting: it is not taken for one that does not answer."""

    def say(_: str) -> None:
        monkeypatch.setattr(lifecycle, "START_S", 0.0)
        gate.touch()

    def activity_once_it_serves(locations: Locations) -> Activity:
        if gate.exists():
            home.wait_until(lambda: control.ping(locations.socket) is not None)
        return activity_of_holder(locations)

    monkeypatch.setattr(lifecycle, "activity_of_holder", activity_once_it_serves)
    running, _ = lifecycle.start(home.locations, say=say)
    assert running.pid == home.processes[0].pid


@pytest.mark.slow
def test_a_starting_daemon_is_not_to_be_killed(home: Home, gate: Path) -> None:
    process = lifecycle._spawn(lifecycle._Log(home.locations.log), ())
    home.wait_until(lambda: activity_of_holder(home.locations) is Activity.STARTING)
    stopped = home.pygraphd("stop")
    assert stopped.returncode == 1
    assert f"process {process.pid} is starting" in stopped.stderr
    assert "-9" not in stopped.stderr
    gate.touch()
    home.wait_until(lambda: control.ping(home.locations.socket) is not None)
    assert activity_of_holder(home.locations) is Activity.SERVING


@pytest.mark.slow
def test_stop_ends_a_prune(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    home.start()
    for first in range(0, 4000, 1000):
        names = map(str, range(first, first + 1000))
        assert home.ask("POST", "/v3/record", encode(make_request(*names)))[0] == 200
    prune = subprocess.Popen(
        [*COMMAND, "cache", "prune", "--gpu", "H200"], env=home.environ, stderr=subprocess.PIPE, text=True
    )
    home.wait_until(lambda: home.ask("GET", "/v1/stats")[1]["entries"] < 4000)
    stopped = home.pygraphd("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    _, told = prune.communicate()
    assert prune.returncode == 1
    assert "pygraphd is ending" in told
