"""Single flight over a real socket: one process measures, the others wait, and a dead one holds up nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.decisions.leases import Leases, LeaseState, PendingGraph
from pygraphd.schema.messages import LeaseAnswer, LeaseRequest, RecordRequest, decode, encode
from tests.support.patience import patient

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.daemon_home import Home

pytestmark = [pytest.mark.daemon, pytest.mark.usefixtures("patient")]

# Asks for the graphs it is told, says which it may measure, and lives on.
PROCESS = """
import json, sys
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.common.report import Report
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import locate

factors, graphs = json.loads(sys.argv[1])
cache = Cache(locate(), "here", Report())
answer = cache.lease(Environment(**factors), graphs)
print(json.dumps(answer and answer.granted), flush=True)
sys.stdin.read()
"""


def _start(home: Home, request: RecordRequest) -> subprocess.Popen[str]:
    what = json.dumps([request.environment.factors(), [each.graph.digest for each in request.records]])
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, what],
        env=patient(home.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _granted(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    answer = json.loads(process.stdout.readline())
    assert isinstance(answer, list)
    return answer


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def granted(cache: Cache, request: RecordRequest) -> int:
    """Ask for a lease; return how many graphs it is for."""
    answer = cache.lease(request.environment, [each.graph.digest for each in request.records])
    assert answer is not None
    return len(answer.granted)


def test_of_many_processes_one_measures(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    home.start()
    request = make_request("a", "b", "c")
    processes = [_start(home, request) for _ in range(4)]
    try:
        granted = [_granted(process) for process in processes]
    finally:
        _end(processes)

    *others, one = sorted(granted, key=len)
    assert others == [[]] * 3
    assert sorted(one) == sorted(each.graph.digest for each in request.records)
    assert home.ask("GET", "/v1/stats")[1]["leases"] == 3


@pytest.mark.slow
def test_status_says_who_measures_and_who_waits(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    home.start()
    request = make_request("a")
    processes = [_start(home, request) for _ in range(2)]
    try:
        measures = [len(_granted(process)) for process in processes]
        told = {
            each["pid"]: each for each in json.loads(home.pygraphd("status", "--json").stdout)["processes"]
        }
        text = home.pygraphd("status").stdout
    finally:
        _end(processes)

    digest = request.records[0].graph.digest
    assert sorted(measures) == [0, 1]
    for process, count in zip(processes, measures, strict=True):
        found = told[process.pid]
        assert (found["measures"], found["waits_for"]) == (([digest], []) if count else ([], [digest]))
    assert f"measures 1 graph ({digest[:12]})" in text
    assert f"waits for 1 graph ({digest[:12]})" in text


def test_a_measurer_that_is_killed_frees_its_graphs(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    home.start()
    request = make_request("a")
    first = _start(home, request)
    try:
        assert len(_granted(first)) == 1
        ours = Cache(home.locations, "here", Report())
        graphs = [each.graph.digest for each in request.records]
        held = ours.lease(request.environment, graphs)
        first.kill()  # and nobody asks for its exit code yet
        home.wait_until(lambda: granted(ours, request) == 1)
        free = ours.lease(request.environment, graphs)
    finally:
        _end([first])

    assert held is not None
    assert held.granted == ()
    assert free is not None
    assert free.granted == tuple(graphs)


def test_an_answer_frees_what_was_measured(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    home.start()
    request = make_request("a")
    ask = [
        encode(LeaseRequest(request.environment.digest(), name, (request.records[0].graph.digest,)))
        for name in ("first", "second")
    ]

    def asked(body: bytes) -> int:
        status, answer = home.ask("POST", "/v3/lease", body)
        assert status == 200
        return len(decode(LeaseAnswer, json.dumps(answer).encode()).granted)

    assert [asked(body) for body in ask] == [1, 0]
    assert home.ask("POST", "/v3/record", encode(request))[0] == 200
    assert asked(ask[1]) == 1


def test_a_lease_has_an_end(home: Home, make_request: Callable[..., RecordRequest]) -> None:
    home.variables["PYGRAPHD_LEASE"] = "0.5s"
    home.start()
    request = make_request("a")
    graphs = [request.records[0].graph.digest]
    first, second = (Cache(home.locations, "here", Report()) for _ in range(2))

    answer = first.lease(request.environment, graphs)
    home.wait_until(lambda: granted(second, request) == 1)

    assert answer is not None
    assert (answer.granted, answer.seconds) == (tuple(graphs), 0.5)


def _asking(cache: Cache, request: RecordRequest, now: Callable[[], float]) -> tuple[Leases, PendingGraph]:
    """Return the leases of a process that has asked for the one graph of a request, by a clock of its own."""
    process = Leases(cache, lambda _entry: True, now)
    process.add(pending := PendingGraph(request.records[0].graph, request.environment))
    process.acquire(pending)
    return process, pending


def test_a_lease_is_renewed_once_a_daemon_is_back(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    """The new daemon knows of no leases, and another process would measure the same graph."""
    home.variables["PYGRAPHD_LEASE"] = "1h"
    request, hours = make_request("a"), [0.0]
    home.start()
    process, pending = _asking(
        Cache(home.locations, "here", report := Report()), request, lambda: hours[0] * 3600
    )
    home.pygraphd("stop")
    hours[0] = 0.5
    process.renew(pending)
    home.start()
    hours[0] = 1.0
    process.renew(pending)

    assert (pending.state, report.failures) == (LeaseState.OURS, {"daemon: no daemon": 1})
    _, other = _asking(Cache(home.locations, "there", Report()), request, lambda: hours[0] * 3600)
    assert other.state is LeaseState.OTHERS


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"environment": "x", "holder": "a", "graphs": []}', "environment"),
        (b'{"environment": "%s", "graphs": []}' % (b"a" * 64), "holder is missing"),
        (b'{"environment": "%s", "holder": "%s", "graphs": []}' % (b"a" * 64, b"h" * 65), "holder"),
    ],
)
def test_bad_requests_are_refused_by_name(shared_home: Home, body: bytes, why: str) -> None:
    status, answer = shared_home.ask("POST", "/v3/lease", body)
    assert status == 400
    assert why in answer["error"]
