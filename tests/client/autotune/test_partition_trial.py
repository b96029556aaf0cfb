"""How a partition comes to a decision: states, waiting for others, refusals and provisional answers."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from pygraphd.client.autotune.partition_trial import (
    PROPOSING,
    TRANSITIONS,
    UNTOLD,
    WAITING,
    WARM_UP_CALLS,
    State,
)
from pygraphd.client.decisions import rules
from pygraphd.client.decisions.decision_service import Outcome
from pygraphd.client.decisions.leases import LeaseState
from pygraphd.schema.messages import Decision, Deployment, Entry, Measurement
from pygraphd.schema.policy import POLICY_VERSION, only_kernels
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.trial_host import (
    FAST,
    OF_KERNELS,
    Host,
    Measured,
    Relocating,
    gpu,
    host,
    judged,
    partition_trial,
)

__all__ = ["gpu", "host"]  # fixtures

pytestmark = pytest.mark.torch


def test_the_table_of_transitions_is_complete_and_ends() -> None:
    assert set(TRANSITIONS) == set(State)
    assert TRANSITIONS[State.DEPLOYED] == frozenset()
    assert all(State.WARM_UP not in following for following in TRANSITIONS.values())


@pytest.mark.parametrize("state", State)
def test_a_transition_that_is_not_in_the_table_is_counted_and_not_made(host: Host, state: State) -> None:
    one = partition_trial(host)
    one.state = State.DEPLOYED

    one._enter(state)

    assert one.state is State.DEPLOYED
    assert host.report.failures == {f"measuring: a trial at DEPLOYED cannot go to {state.name}": 1}


def test_the_first_calls_run_as_kernels(host: Host) -> None:
    one = partition_trial(host)

    assert [one([]) for _ in range(WARM_UP_CALLS)] == ["kernels"] * WARM_UP_CALLS
    assert (one.state, one.pending.calls) == (State.WARM_UP, WARM_UP_CALLS)


def test_a_partition_that_was_too_short_before_waits_for_more_calls(host: Host) -> None:
    one = partition_trial(host, warm_up_calls=30)
    for _ in range(30):
        one([])

    assert one.state is State.WARM_UP


def test_what_may_be_relocated_runs_as_kernels_until_all_ranks_have_recorded(host: Host) -> None:
    asked = iter(range(100))

    class Awaited(Relocating):
        is_awaited = property(lambda _: next(asked) < 20)

    one = partition_trial(host, relocate=Awaited())

    calls = 0
    while one.state is State.WARM_UP:
        assert one([]) == "kernels"
        calls += 1

    assert calls == WARM_UP_CALLS + 1 + 20


def test_sizes_that_never_come_back_are_never_measured(host: Host) -> None:
    one = partition_trial(host)
    for size in range(200):
        assert one([size]) == "kernels"

    assert one.state is State.WARM_UP


def test_of_several_threads_one_begins_and_the_others_run_as_kernels(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = partition_trial(host)
    for _ in range(WARM_UP_CALLS):
        one([])

    results: list[Any] = []
    others_have_called = threading.Event()

    def call() -> None:
        results.append(one([]))
        if len(results) == 7:
            others_have_called.set()

    def acquire(_pending: object) -> Entry:
        assert others_have_called.wait(60)
        return Entry("a" * 64, Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER), POLICY_VERSION))

    monkeypatch.setattr(host, "acquire", acquire)
    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == ["kernels"] * 8
    assert len(host.results) == 1
    assert host.report.failures == {}


def test_what_has_come_to_refuse_is_not_chosen(host: Host) -> None:
    one = partition_trial(host, relocate=Relocating("a driver's call failed"))

    assert judged(one, OF_KERNELS, FAST)([]) == "kernels"

    (result,) = host.results
    assert result.decision == only_kernels(
        Reason(ReasonCode.CANNOT_BE_RECORDED, "a driver's call failed"), final=False
    )
    assert result.measurements == (OF_KERNELS,)


@pytest.mark.parametrize(("graph_us", "expected"), [(10.0, (1, 0)), (1000.0, (0, 1))])
def test_what_the_other_deployment_has_kept_is_given_back(
    host: Host, graph_us: float, expected: tuple[int, int]
) -> None:
    """KERNELS leave the workspaces of BLAS libraries, tens of megabytes for each thread; a GRAPH leaves its recordings."""
    relocate = Relocating()

    judged(
        partition_trial(host, relocate=relocate),
        OF_KERNELS,
        replace(FAST, median_us=graph_us, host_us=graph_us),
    )

    assert (relocate.trimmed, relocate.closed) == expected


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("for_good", [True, False])
def test_what_refuses_runs_as_kernels_from_the_next_call_on(host: Host, for_good: bool) -> None:
    relocate = Relocating()
    one = partition_trial(host, relocate=relocate)
    for _ in range(10):
        one([])
    relocate.refusal, relocate.refused_for_good = "it does not fit", for_good

    assert one([]) == "kernels"

    (result,) = host.results
    assert result.decision == only_kernels(
        Reason(ReasonCode.CANNOT_BE_RECORDED, "it does not fit"), final=for_good
    )
    assert str(result.decision.reason) == "it cannot be recorded: it does not fit"
    assert result.decision.final is for_good


def test_what_was_too_noisy_runs_as_it_was_found_and_is_provisional(host: Host) -> None:
    noisy = Measurement(Deployment.GRAPH, 8, 50.0, 150.0, 10.0, 290.0, 0.0)
    slow = Measurement(Deployment.KERNELS, 8, 300.0, 30.0, 300.0, 300.0, 0.0)

    assert judged(partition_trial(host), slow, noisy)([]) == "relocated"

    (result,) = host.results
    assert rules.is_noisy(result.decision)
    assert (result.decision.final, result.decision.calls) == (False, 0)
    assert result.measurements == (slow, noisy)


def test_a_graph_that_another_process_measures_runs_as_kernels_until_its_answer_is_there(host: Host) -> None:
    one = partition_trial(host)
    answer = Entry("a" * 64, Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), POLICY_VERSION))
    host.leases = [LeaseState.OTHERS, LeaseState.OTHERS, LeaseState.OTHERS, answer]

    results = [one([]) for _ in range(WARM_UP_CALLS + 5)]

    assert results == ["kernels"] * (WARM_UP_CALLS + 3) + ["relocated"] * 2
    assert host.results == [Outcome(answer.decision, adopted=answer)]
    assert host.report.counts == {"waited": 1}
    assert host.report.fallbacks == {WAITING: 2}
    assert host.report.failures == {}


def test_a_graph_that_was_left_to_nobody_is_measured_after_all(host: Host) -> None:
    one = partition_trial(host)
    host.leases = [LeaseState.OTHERS, LeaseState.OURS]
    for _ in range(WARM_UP_CALLS + 1):
        one([])

    states = [one.state]
    one._begin_measuring((), [])
    states.append(one.state)

    assert states == [State.WAIT, State.MEASURE]


def test_while_it_waits_several_threads_run_as_kernels(host: Host) -> None:
    one = partition_trial(host)
    answer = Entry("a" * 64, Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), POLICY_VERSION))
    host.leases = [LeaseState.OTHERS] * 50 + [answer]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.extend(one([]) for _ in range(100))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 800
    assert set(results) == {"kernels", "relocated"}
    assert (one.state, len(host.results)) == (State.DEPLOYED, 1)
    assert host.report.failures == {}


def test_while_ranks_agree_other_threads_run_as_kernels(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    one = partition_trial(host)
    answer = Entry("a" * 64, Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), POLICY_VERSION))
    host.leases = [LeaseState.OTHERS, answer]
    for _ in range(WARM_UP_CALLS + 1):
        one([])
    asking, seen = threading.Event(), threading.Event()

    def propose(graph: str, decision: Decision) -> Decision:
        asking.set()
        assert seen.wait(10)
        return decision

    monkeypatch.setattr(host, "propose", propose)
    thread = threading.Thread(target=one, args=([],))
    thread.start()
    assert asking.wait(10)
    meanwhile = [one([]) for _ in range(10)]
    seen.set()
    thread.join()

    assert meanwhile == ["kernels"] * 10
    assert one([]) == "relocated"
    assert host.report.failures == {}


def test_a_decision_that_the_other_ranks_cannot_be_told_is_proposed_again_until_they_can(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Decision | None] = [None, None, None]
    proposed: list[Decision] = []

    def propose(graph: str, decision: Decision) -> Decision | None:
        proposed.append(decision)
        return answers.pop() if answers else decision

    monkeypatch.setattr(host, "propose", propose)
    relocate = Relocating()
    one = judged(partition_trial(host, relocate=relocate), OF_KERNELS, FAST)

    assert (one.state, host.results) == (State.PROPOSE, [])
    assert one.pending.unfinished_as is not None
    assert one.pending.unfinished_as[0] == UNTOLD  # what is reported if the program ends now
    assert [one([]) for _ in range(5)] == ["kernels"] * 3 + ["relocated"] * 2
    assert one.state is State.DEPLOYED
    assert len(proposed) == 4
    assert [result.decision for result in host.results] == proposed[:1]
    assert host.recorded == host.results  # when it was first proposed
    assert (host.report.fallbacks, host.report.failures) == ({PROPOSING: 3}, {})
    assert relocate.closed == 0


@pytest.mark.parametrize("state", [State.WAIT, State.MEASURE])
def test_who_is_interrupted_while_it_is_decided_goes_on_as_kernels(
    host: Host, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    one = partition_trial(host)
    host.leases = [LeaseState.OTHERS if state is State.WAIT else LeaseState.OURS]
    host.leases.append(Entry("a" * 64, Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), POLICY_VERSION)))
    for _ in range(WARM_UP_CALLS + 1):
        one([])
    assert one.state is state

    def interrupt(*_: object) -> Decision:
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "propose", interrupt)
    with pytest.raises(KeyboardInterrupt):
        one([]) if state is State.WAIT else one._decide(Measured())

    assert [one([]) for _ in range(3)] == ["kernels"] * 3


def test_who_is_interrupted_while_memory_is_given_back_has_published_what_was_measured(host: Host) -> None:
    class Interrupted(Relocating):
        def trim(self) -> None:
            raise KeyboardInterrupt

    one = partition_trial(host, relocate=Interrupted())
    with pytest.raises(KeyboardInterrupt):
        judged(one, OF_KERNELS, FAST)

    assert (one.state, one([])) == (State.DEPLOYED, "relocated")
    (result,) = host.results
    assert (result.decision.deployment, result.measurements) == (Deployment.GRAPH, (OF_KERNELS, FAST))
    assert host.report.failures == {}
