"""`pygraphd cache rederive` through a real daemon over a real socket, and without one."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sqlite3
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon import control
from pygraphd.daemon.store import Store
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    LookupAnswer,
    LookupRequest,
    Measurement,
    RecordRequest,
    decode,
    encode,
)
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon


@pytest.fixture
def outdated(make_request: Callable[..., RecordRequest]) -> RecordRequest:
    """One graph that an older policy ran as KERNELS, although GRAPH took half the time, and one without measurements."""
    request = make_request("a", "b")
    measurements = tuple(
        Measurement(each, 12, time, 1.0, time, 30.0, 0.5)
        for each, time in {Deployment.KERNELS: 100.0, Deployment.GRAPH: 50.0}.items()
    )
    decision = Decision(
        Deployment.KERNELS, Reason(ReasonCode.OTHER, "an older policy's reason"), POLICY_VERSION - 1
    )
    first, second = (
        dataclasses.replace(record, decision=decision, measurements=measured)
        for record, measured in zip(request.records, (measurements, ()), strict=True)
    )
    return dataclasses.replace(request, records=(first, second))


def _store(home: Home, request: RecordRequest) -> None:
    """Leave records as a daemon does that has ended."""
    with Store(home.locations.database) as store:
        store.record(request, os.geteuid())


def _decisions(home: Home, request: RecordRequest) -> list[tuple[str, int]]:
    asked = LookupRequest(request.environment.digest(), tuple(r.graph.digest for r in request.records))
    _, answer = home.ask("POST", "/v3/lookup", encode(asked))
    found = decode(LookupAnswer, json.dumps(answer).encode())
    by_graph = {entry.graph: entry.decision for entry in found.entries}
    return [(str(by_graph[g].deployment), by_graph[g].policy) for g in asked.graphs]


@pytest.mark.slow
def test_a_running_daemon_does_it(home: Home, outdated: RecordRequest) -> None:
    home.start()
    home.ask("POST", "/v3/record", encode(outdated))
    dry = home.pygraphd("cache", "rederive", "--dry-run")
    assert dry.stdout.splitlines() == [
        f"looked at         1 entry with measurements, policy {POLICY_VERSION}",
        "KERNELS -> GRAPH  1",
        "renewed           0 with the same deployment",
        "unchanged         0",
        "left alone        1 that rest on no measurement",
        "dry run           nothing was written",
    ]
    assert _decisions(home, outdated) == [("KERNELS", POLICY_VERSION - 1)] * 2
    done = home.pygraphd("cache", "rederive", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "schema": 1,
        "policy": POLICY_VERSION,
        "entries": 1,
        "unchanged": 0,
        "renewed": 0,
        "changed": [{"before": "KERNELS", "after": "GRAPH", "entries": 1}],
        "kept": [],
        "unmeasured": 1,
        "dry_run": False,
    }
    assert _decisions(home, outdated) == [("GRAPH", POLICY_VERSION), ("KERNELS", POLICY_VERSION - 1)]


def test_the_route_says_the_same_and_a_bad_request_changes_nothing(
    home: Home, outdated: RecordRequest
) -> None:
    home.start()
    home.ask("POST", "/v3/record", encode(outdated))
    for body in (b"", b"[]", b'{"dry_run": "no"}'):
        status, answer = home.ask("POST", "/v3/rederive", body)
        assert (status, set(answer)) == (400, {"error"})
        assert _decisions(home, outdated) == [("KERNELS", POLICY_VERSION - 1)] * 2
    status, answer = home.ask("POST", "/v3/rederive", b'{"dry_run": true}')
    assert (status, answer["changed"]) == (200, [{"before": "KERNELS", "after": "GRAPH", "entries": 1}])
    assert home.ask("POST", "/v3/rederive", b"{}")[1]["dry_run"] is False
    assert _decisions(home, outdated)[0] == ("GRAPH", POLICY_VERSION)
    ping = control.ping(home.locations.socket)
    assert ping is not None
    assert "rederive" in ping.capabilities


@pytest.mark.slow
def test_without_a_daemon_the_command_does_it_and_leaves_none(home: Home, outdated: RecordRequest) -> None:
    _store(home, outdated)
    done = home.pygraphd("cache", "rederive")
    assert (done.returncode, done.stderr) == (0, "")
    assert "KERNELS -> GRAPH  1" in done.stdout
    assert control.ping(home.locations.socket) is None
    listing = json.loads(home.pygraphd("cache", "inspect", "--json").stdout)
    assert sorted(entry["deployment"] for entry in listing["entries"]) == ["GRAPH", "KERNELS"]


@pytest.mark.slow
def test_a_daemon_does_it_by_itself_when_it_starts(home: Home, outdated: RecordRequest) -> None:
    _store(home, outdated)
    home.start()
    assert _decisions(home, outdated) == [("GRAPH", POLICY_VERSION), ("KERNELS", POLICY_VERSION - 1)]
    assert f"policy {POLICY_VERSION}: 1 entries looked at anew" in home.locations.log.read_text()


@pytest.mark.slow
def test_a_database_of_a_newer_version_keeps_no_daemon_from_starting(
    home: Home, outdated: RecordRequest
) -> None:
    _store(home, outdated)
    connection = sqlite3.connect(home.locations.database)
    connection.execute("PRAGMA user_version=99")
    connection.close()
    home.start()
    assert _decisions(home, outdated) == [("KERNELS", POLICY_VERSION - 1)] * 2
    done = home.pygraphd("cache", "rederive")
    # As without a daemon: the database is at fault.
    assert done.returncode == 2
    assert "database version 99" in done.stderr
    assert "upgrade pygraphd" in done.stderr


@pytest.mark.slow
def test_a_daemon_that_hangs_is_named_and_nothing_is_done(home: Home, outdated: RecordRequest) -> None:
    pid = home.start()
    home.ask("POST", "/v3/record", encode(outdated))
    os.kill(pid, signal.SIGSTOP)
    done = home.pygraphd_soon("cli.writing.LOCK_WAIT_S", "cache", "rederive")
    assert done.returncode == 1
    assert f"process {pid} holds the lock but does not answer; end it with: kill -9 {pid}" in done.stderr
    os.kill(pid, signal.SIGCONT)
    assert _decisions(home, outdated) == [("KERNELS", POLICY_VERSION - 1)] * 2
