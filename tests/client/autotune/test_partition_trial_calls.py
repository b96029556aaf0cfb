"""Which calls of a partition are measured: those of threads, of other sizes, in captures, and calls that fail."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pygraphd.client.autotune.candidates import Candidates
from pygraphd.client.autotune.partition_trial import (
    FAILED,
    OTHER_THREAD,
    WARM_UP_CALLS,
    State,
)
from pygraphd.client.autotune.trial import RECORDING_CALLS, SAMPLES
from pygraphd.client.backend.errors import PROFILED
from pygraphd.client.decisions import rules
from pygraphd.client.decisions.decision_service import Outcome
from pygraphd.schema.messages import Deployment, Measurement
from tests.support.clock import Clock
from tests.support.trial_host import ENOUGH, Host, Measured, Relocating, gpu, host, partition_trial, trial_of

if TYPE_CHECKING:
    from pygraphd.client.autotune.trial import Trial

__all__ = ["gpu", "host"]  # fixtures

pytestmark = pytest.mark.torch


@pytest.mark.usefixtures("gpu")
def test_two_dozen_calls_lead_to_a_decision(host: Host) -> None:
    one = partition_trial(host)
    before = [one([]) for _ in range(ENOUGH - 1)]
    assert host.results == []

    assert one([]) == "relocated"

    assert {each: before.count(each) for each in before} == {
        "kernels": WARM_UP_CALLS + 2 + SAMPLES,
        "relocated": RECORDING_CALLS + 1 + SAMPLES,
    }
    assert one.state is State.DEPLOYED
    (result,) = host.results
    assert (result.decision.deployment, result.decision.final) == (Deployment.GRAPH, True)
    assert {each.samples for each in result.measurements} == {SAMPLES}
    assert host.report.failures == {}


@pytest.mark.usefixtures("gpu")
def test_a_server_with_a_thread_for_each_request_is_measured_too(host: Host) -> None:
    one = partition_trial(host)
    for _ in range(ENOUGH):
        thread = threading.Thread(target=one, args=([],))
        thread.start()
        thread.join()

    assert one.state is State.DEPLOYED
    assert host.report.fallbacks == {}


@pytest.mark.usefixtures("gpu")
def test_a_call_while_another_thread_is_in_a_measured_one_runs_as_kernels(host: Host) -> None:
    seen: list[str] = []

    def call_in_another_thread() -> None:
        other = threading.Thread(target=lambda: seen.append(one([])))
        other.start()
        other.join()

    one = partition_trial(host, relocate=Relocating(meanwhile=call_in_another_thread))
    for _ in range(WARM_UP_CALLS + 1):
        one([])

    assert one([]) == "relocated"
    assert seen == ["kernels"]
    assert host.report.fallbacks == {OTHER_THREAD: 1}


@pytest.mark.usefixtures("gpu")
def test_calls_of_many_threads_at_once_end_in_one_decision(host: Host) -> None:
    one = partition_trial(host)
    threads = [threading.Thread(target=lambda: [one([]) for _ in range(200)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert one.state is State.DEPLOYED
    assert len(host.results) == 1
    assert host.report.failures == {}
    assert one([]) == "relocated"


@pytest.mark.usefixtures("gpu")
def test_calls_with_other_sizes_run_as_kernels_and_do_not_count(host: Host) -> None:
    one = partition_trial(host)
    for _ in range(WARM_UP_CALLS + 2):
        one([3])
    results = []
    while one.state is State.MEASURE:
        assert one([4]) == "kernels"
        results.append(one([3]))

    assert len(results) == ENOUGH - WARM_UP_CALLS - 2
    assert host.report.fallbacks == {"called with other sizes while it was measured": len(results)}


@pytest.mark.usefixtures("gpu")
def test_calls_within_a_capture_of_the_users_run_as_kernels_and_are_not_timed(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = partition_trial(host)
    for _ in range(WARM_UP_CALLS + 2):
        one([])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Clock, "start", lambda self, deployment: pytest.fail("an event in the user's graph"))

    assert [one([]) for _ in range(3 * ENOUGH)] == ["kernels"] * 3 * ENOUGH
    assert one.state is State.MEASURE
    assert host.report.failures == {}


@pytest.mark.usefixtures("gpu")
def test_calls_that_a_profiler_watches_run_as_kernels_and_are_not_timed(host: Host) -> None:
    one, many = partition_trial(host), 3 * ENOUGH
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        assert [one([]) for _ in range(many)] == ["kernels"] * many
    states = [one.state]
    one([])
    states.append(one.state)
    assert states == [State.WARM_UP, State.MEASURE]
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        assert [one([]) for _ in range(many)] == ["kernels"] * many
    assert host.report.fallbacks == {PROFILED: many}

    for _ in range(ENOUGH):
        one([])
    assert one.state is State.DEPLOYED
    assert one([]) == "relocated"


@pytest.mark.usefixtures("gpu")
def test_calls_that_can_be_no_graph_for_now_run_as_kernels_and_are_not_timed(host: Host) -> None:
    """As in a dispatch mode of the program: the times of KERNELS would count as those of a GRAPH."""
    relocate, many = Relocating(), 3 * ENOUGH
    one = partition_trial(host, relocate=relocate)
    relocate.not_now = "seen by a mode"
    assert [one([]) for _ in range(many)] == ["kernels"] * many
    states = [one.state]
    relocate.not_now = None
    one([])
    states.append(one.state)
    assert states == [State.WARM_UP, State.MEASURE]
    relocate.not_now = "seen by a mode"
    assert [one([]) for _ in range(many)] == ["kernels"] * many
    assert host.report.fallbacks == {"seen by a mode": many}

    relocate.not_now = None
    for _ in range(ENOUGH):
        one([])
    assert one.state is State.DEPLOYED
    assert one([]) == "relocated"


def test_an_error_of_ours_is_counted_and_the_call_goes_on(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = partition_trial(host)
    for _ in range(WARM_UP_CALLS):
        one([])

    def fail(trial: Trial) -> None:
        raise ValueError("ours")

    monkeypatch.setattr(one, "_judge", fail)
    one._enter(State.MEASURE)
    one._decide(Measured())

    assert one([]) == "kernels"
    assert host.report.failures == {"measuring: ValueError": 1}
    assert host.results[0].decision.reason == FAILED


def test_an_error_of_the_users_is_the_users(host: Host) -> None:
    def fail(inputs: list[Any]) -> None:
        raise ZeroDivisionError

    one = trial_of(host, Candidates(fail, 0, Relocating()))
    with pytest.raises(ZeroDivisionError):
        one([])


def test_a_partition_that_was_measured_too_little_runs_as_kernels_and_says_how_often_it_ran(
    host: Host,
) -> None:
    one = partition_trial(host)
    one.pending.calls = 17
    few = tuple(
        Measurement(each, 3, 100.0, 0.0, 100.0, 100.0, 0.0) for each in (Deployment.KERNELS, Deployment.GRAPH)
    )
    assert one._judge(Measured(*few)) == Outcome(rules.too_few_calls(17), few)


@pytest.mark.usefixtures("gpu")
def test_a_trial_whose_end_cannot_be_told_ends(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its partition would be measured for ever."""

    def query(_: object) -> bool:
        raise RuntimeError("no event")

    monkeypatch.setattr("tests.support.clock._Timed.is_known", query)
    one = partition_trial(host)
    results = [one([]) for _ in range(ENOUGH)]

    assert one.state is State.DEPLOYED
    assert host.results[0].decision.reason == FAILED
    assert results[-1] == "kernels"
    assert host.report.failures == {"measuring: RuntimeError": 2}
