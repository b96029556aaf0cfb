"""A program that begins while its daemon starts: what it does not find yet is a miss, and no failure."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions.service import Cache
from pygraphd.daemon import control
from tests.support.patience import patient

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.schema.messages import RecordRequest
    from tests.support.daemon_home import Home

pytestmark = [pytest.mark.daemon, pytest.mark.usefixtures("patient")]

# Starts the daemon as the hook does, and asks it from then on, as fast as it can, until it answers.
PROGRAM = """
import json, sys, time
from pygraphd.client.decisions import daemon_start
from pygraphd.client.decisions.service import Cache
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
