"""One trial for all sizes of a graph: at which it begins, and what becomes of it if that size never comes back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.autotune.partition_trial import (
    MAX_OTHER_SIZES,
    MAX_SEEN_SIZES,
    OTHER_SIZES,
    WARM_UP_CALLS,
    State,
)
from pygraphd.client.autotune.trial import SAMPLES
from pygraphd.client.decisions.leases import LeaseState
from pygraphd.schema.messages import Deployment
from pygraphd.schema.reasons import ReasonCode
from tests.support.clock import Clock
from tests.support.trial_host import ENOUGH, Host, Relocating, gpu, host, partition_trial

if TYPE_CHECKING:
    from pygraphd.client.autotune.partition_trial import PartitionTrial
    from pygraphd.client.decisions.leases import PendingGraph

__all__ = ["gpu", "host"]  # fixtures

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("gpu")]

TRIAL = ENOUGH - WARM_UP_CALLS - 1
"""Calls from the beginning of a trial to the one that finds it over."""


class Leasing(Host):
    """Counts what is asked about the lease."""

    acquired = renewed = 0

    def acquire(self, pending: PendingGraph) -> Any:
        self.acquired += 1
        return LeaseState.OURS

    def renew(self, pending: PendingGraph) -> None:
        self.renewed += 1


def call(one: PartitionTrial, size: int, times: int) -> list[Any]:
    return [one([size]) for _ in range(times)]


def begun(host: Host) -> PartitionTrial:
    """Return a trial that has begun at size 8, and made samples of GRAPH."""
    one = partition_trial(host)
    call(one, 8, WARM_UP_CALLS + 1 + SAMPLES)
    assert one.state is State.MEASURE
    return one


@pytest.mark.parametrize("more", [0, 1, 1000])
def test_after_a_warm_up_of_many_sizes_one_that_stays_is_measured(host: Host, more: int) -> None:
    one = partition_trial(host)
    for size in range(MAX_SEEN_SIZES + more):
        assert one([size]) == "kernels"

    call(one, 10_000, 2 + TRIAL)

    assert (one.state, one([10_000])) == (State.DEPLOYED, "relocated")
    assert len(host.results) == 1
    assert (host.report.fallbacks, host.report.failures) == ({}, {})


def test_the_sizes_seen_last_are_those_that_come_back(host: Host) -> None:
    one = partition_trial(host)
    for size in range(2 * MAX_SEEN_SIZES):
        one([size])
    states = []
    for size in (0, 2 * MAX_SEEN_SIZES - 1):  # the first one is forgotten
        one([size])
        states.append(one.state)

    assert states == [State.WARM_UP, State.MEASURE]


def test_while_another_process_measures_sizes_may_be_many_too(host: Host) -> None:
    host.leases = [LeaseState.OTHERS]
    one = partition_trial(host)
    call(one, 0, WARM_UP_CALLS + 1)
    for size in range(1, 2 * MAX_SEEN_SIZES):
        one([size])
    states = [one.state]

    call(one, 10_000, 2)

    assert [*states, one.state] == [State.WAIT, State.MEASURE]


def test_a_trial_whose_size_does_not_come_back_begins_anew_at_one_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Leasing()
    monkeypatch.setitem(Clock.times_us, Deployment.GRAPH, 1000.0)
    one = begun(host)
    monkeypatch.setitem(Clock.times_us, Deployment.GRAPH, 50.0)
    renewed = host.renewed

    assert call(one, 9, MAX_OTHER_SIZES + 1) == ["kernels"] * (MAX_OTHER_SIZES + 1)
    assert (one._sizes, host.report.measuring_ms) == ((8,), 0.0)
    one([9])
    assert (one.state, one._sizes) == (State.MEASURE, (9,))
    spent_ms = host.report.measuring_ms
    assert spent_ms > 0  # that of the samples that are dropped
    assert (host.acquired, host.renewed) == (1, renewed + 1)

    call(one, 9, TRIAL)
    assert one([9]) == "relocated"

    (result,) = host.results
    assert (result.decision.deployment, result.decision.final) == (Deployment.GRAPH, True)
    measured = {each.deployment: (each.samples, each.host_us) for each in result.measurements}
    assert measured == {Deployment.KERNELS: (SAMPLES, 100.0), Deployment.GRAPH: (SAMPLES, 50.0)}
    assert host.report.measuring_ms >= spent_ms
    assert host.report.fallbacks == {OTHER_SIZES: MAX_OTHER_SIZES + 2}
    assert (host.acquired, host.report.failures) == (1, {})


class OneRefused(Relocating):
    """Has no recording at size 9."""

    def __call__(self, inputs: list[Any]) -> str:
        return "kernels" if inputs == [9] else super().__call__(inputs)


def test_a_size_that_is_refused_beside_a_recording_of_another_one_is_not_taken_for_a_graph(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KERNELS would be compared with themselves, and GRAPH would seem to save nothing for good."""
    monkeypatch.setitem(Clock.times_us, Deployment.GRAPH, 100.0)
    one = partition_trial(host, relocate=OneRefused())
    call(one, 8, WARM_UP_CALLS + 1 + SAMPLES)
    call(one, 9, MAX_OTHER_SIZES + 2 + TRIAL + 1)

    (result,) = host.results
    assert (result.decision.deployment, result.decision.final) == (Deployment.KERNELS, False)
    assert result.decision.reason.code is ReasonCode.TOO_FEW_CALLS
    assert [each.deployment for each in result.measurements] == [Deployment.KERNELS]


def test_a_trial_whose_size_comes_back_now_and_then_goes_on(host: Host) -> None:
    one = begun(host)
    calls = 0
    while one.state is State.MEASURE:
        call(one, 9, MAX_OTHER_SIZES)
        one([8])
        calls += 1

    assert calls == TRIAL - SAMPLES
    assert host.report.fallbacks == {OTHER_SIZES: calls * MAX_OTHER_SIZES}


def test_a_trial_begins_anew_only_at_a_size_that_comes_back(host: Host) -> None:
    one = begun(host)
    for size in range(10, 4 * MAX_OTHER_SIZES):
        one([size])

    assert one._sizes == (8,)


def test_each_time_it_takes_more_calls_at_other_sizes_to_begin_anew(host: Host) -> None:
    """Each beginning may cost a recording."""
    one = begun(host)
    began, at = [], one._sizes
    for number in range(8 * MAX_OTHER_SIZES):
        one([100 + (at[0] == 100)])  # always one of two sizes, which is not the measured one
        if one._sizes != at:
            at = one._sizes
            began.append(number + 1)

    assert began == [258, 258 + 514, 258 + 514 + 1026]


def test_no_sample_is_taken_of_a_size_that_another_thread_has_left_meanwhile(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = begun(host)
    candidates = one._candidates
    assert candidates is not None

    def begin_anew_meanwhile(sizes: tuple[int, ...], inputs: list[Any]) -> None:
        one._begin_trial(candidates, (9,))

    monkeypatch.setattr(one, "_why_not_measured", begin_anew_meanwhile)

    assert one([8]) == "kernels"
    assert host.report.fallbacks == {OTHER_SIZES: 1}
    assert one._trial is not None
    assert one._trial._calls == 0


def test_a_trial_does_not_begin_anew_while_another_thread_is_in_a_measured_call(host: Host) -> None:
    sizes: list[tuple[int, ...]] = []

    def call_others() -> None:
        if len(sizes) == 0:
            sizes.append(())
            thread = threading.Thread(target=lambda: call(one, 9, 2 * MAX_OTHER_SIZES))
            thread.start()
            thread.join()
            sizes.append(one._sizes)

    one = partition_trial(host, relocate=Relocating(meanwhile=call_others))
    call(one, 8, WARM_UP_CALLS + 2)

    assert sizes == [(), (8,)]
    assert one.state is State.MEASURE


def test_threads_with_a_size_each_come_to_one_decision(host: Host) -> None:
    one = begun(host)

    def serve(size: int) -> None:
        for _ in range(20_000):
            if one.state is State.DEPLOYED:
                return
            one([size])

    threads = [threading.Thread(target=serve, args=(100 + number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert one.state is State.DEPLOYED
    assert len(host.results) == 1
    assert host.report.failures == {}
