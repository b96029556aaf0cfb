"""A region's states: what may follow what, and what it does before it may measure. Timing itself needs a GPU: tests/gpu."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client import policy
from pygraphd.client.region import TRANSITIONS, WARM_UP_CALLS, Candidates, Decided, Region, State
from pygraphd.client.report import Report
from pygraphd.client.rota import Rota
from pygraphd.schema.messages import Decision, Deployment, Graph, Kind, Measurement

if TYPE_CHECKING:
    from pygraphd.client._torch import Runnable

pytestmark = pytest.mark.torch


class Host:
    """A session that keeps what it is told."""

    def __init__(self) -> None:
        self.rota = Rota()
        self.report = Report()
        self.results: list[Decided] = []

    def settle(self, region: Region, decision: Decision, measurements: tuple[Measurement, ...]) -> Decision:
        return decision

    def agree(self, region: Region, result: Decided, offered: tuple[Deployment, ...]) -> Decision:
        return result.decision

    def decided(self, region: Region, result: Decided) -> None:
        self.results.append(result)


def launch(inputs: list[Any]) -> str:
    return "launched"


def trees(inputs: list[Any]) -> str:
    return "captured"


@pytest.fixture
def host() -> Host:
    return Host()


def region(host: Host, warm_up_calls: int = 0) -> Region:
    graph = Graph("a" * 64, Kind.INFERENCE, 0, 1, 1)
    deployed: list[Runnable] = []
    return Region(
        graph,
        Candidates(launch, trees, device_index=0, is_backward=False),
        host,
        lambda region, runnable, deployment: deployed.append(runnable),
        1,
        warm_up_calls,
    )


def test_the_table_of_transitions_is_complete_and_ends() -> None:
    assert set(TRANSITIONS) == set(State)
    assert TRANSITIONS[State.DEPLOYED] == frozenset()
    assert all(State.WARM_UP not in following for following in TRANSITIONS.values())


@pytest.mark.parametrize("state", State)
def test_what_is_not_in_the_table_is_refused(host: Host, state: State) -> None:
    one = region(host)
    one.state = State.DEPLOYED

    with pytest.raises(RuntimeError, match=f"DEPLOYED to {state.name}"):
        one._enter(state)


def test_the_first_calls_are_launched(host: Host) -> None:
    one = region(host)

    assert [one([]) for _ in range(WARM_UP_CALLS)] == ["launched"] * WARM_UP_CALLS
    assert (one.state, one.tally.calls) == (State.WARM_UP, WARM_UP_CALLS)


def test_a_region_that_was_too_short_before_waits_for_more_calls(host: Host) -> None:
    one = region(host, warm_up_calls=30)
    for _ in range(30):
        one([])

    assert one.state is State.WARM_UP


def test_sizes_that_never_come_back_are_never_measured(host: Host) -> None:
    one = region(host)
    for size in range(200):
        assert one([size]) == "launched"

    assert one.state is State.WARM_UP


def test_without_memory_to_spare_nothing_is_tried(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    one = region(host)
    monkeypatch.setattr(one, "_why_not_measure", lambda: policy.NO_MEMORY)
    for _ in range(10):
        assert one([]) == "launched"

    assert one.state is State.DEPLOYED
    (result,) = host.results
    assert result.measurements == ()
    assert result.decision == policy.not_measured(policy.NO_MEMORY, WARM_UP_CALLS + 1)
    assert host.report.summary()["reasons"] == {policy.NO_MEMORY: 1}


def test_of_several_threads_one_begins_and_the_others_are_launched(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = region(host)
    for _ in range(WARM_UP_CALLS):
        one([])

    def why_not_measure() -> str:
        time.sleep(0.05)
        return policy.NO_MEMORY

    monkeypatch.setattr(one, "_why_not_measure", why_not_measure)
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(one([]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == ["launched"] * 8
    assert len(host.results) == 1
    assert host.report.failures == {}


def test_an_error_of_ours_is_counted_and_the_call_goes_on(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = region(host)
    for _ in range(WARM_UP_CALLS):
        one([])

    def fail() -> None:
        raise ValueError("ours")

    monkeypatch.setattr(one, "_judge", fail)
    one._enter(State.MEASURE)
    one._decide()

    assert one([]) == "launched"
    assert host.report.failures == {"measuring: ValueError": 1}
    assert host.results[0].decision.reason == policy.FAILED


def test_an_error_of_the_users_is_the_users(host: Host) -> None:
    def fail(inputs: list[Any]) -> None:
        raise ZeroDivisionError

    one = Region(
        Graph("a" * 64, Kind.INFERENCE, 0, 1, 1),
        Candidates(fail, fail, 0, is_backward=False),
        host,
        lambda *_: None,
        1,
    )
    with pytest.raises(ZeroDivisionError):
        one([])


def measured(launch: float, trees: float, relocate: float | None = None) -> list[Measurement]:
    times = {Deployment.LAUNCH: launch, Deployment.TREES: trees, Deployment.RELOCATE: relocate}
    return [
        Measurement(deployment, 10, time, 0.1, time, time, 0.0)
        for deployment, time in times.items()
        if time is not None
    ]


@pytest.mark.parametrize(
    ("measurements", "in_trees", "out_of_trees"),
    [
        (measured(100, 200), Deployment.LAUNCH, Deployment.LAUNCH),
        (measured(100, 50), Deployment.TREES, Deployment.LAUNCH),
        (measured(100, 50, 70), Deployment.TREES, Deployment.RELOCATE),
        (measured(100, 50, 99.9), Deployment.TREES, Deployment.LAUNCH),
        (measured(100, 50, 40), Deployment.RELOCATE, Deployment.RELOCATE),
    ],
)
def test_a_backward_runs_in_trees_only_if_its_forward_does(
    measurements: list[Measurement], in_trees: Deployment, out_of_trees: Deployment
) -> None:
    decision = policy.decide(measurements)

    settled = [
        policy.settle_backward(decision, measurements, forward_in_trees=each).deployment
        for each in (True, False)
    ]

    assert settled == [in_trees, out_of_trees]
