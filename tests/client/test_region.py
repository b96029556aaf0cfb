"""A region's states: what may follow what, and what it does before it may measure. Timing itself needs a GPU: tests/gpu."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any

import pytest

from pygraphd.client import policy
from pygraphd.client.candidates import Candidates
from pygraphd.client.claims import Turn
from pygraphd.client.region import (
    OTHER_THREAD,
    OTHERS_CALLS,
    TRANSITIONS,
    WAITING,
    WARM_UP_CALLS,
    Decided,
    Region,
    State,
)
from pygraphd.client.report import Report
from pygraphd.client.rota import Rota
from pygraphd.client.timeline import Timeline
from pygraphd.schema.messages import Decision, Deployment, Entry, Graph, Kind, Measurement
from pygraphd.schema.policy import NOISY, POLICY_VERSION

pytestmark = pytest.mark.torch


class Host:
    """A session that keeps what it is told."""

    def __init__(self) -> None:
        self.rota = Rota()
        self.timeline = Timeline()
        self.report = Report()
        self.results: list[Decided] = []
        self.turns: list[Entry | Turn] = []
        self.calls_until_helper = 0

    def helper_is_coming(self) -> bool:
        self.calls_until_helper -= 1
        return self.calls_until_helper >= 0

    def turn(self, region: Region) -> Entry | Turn:
        return self.turns.pop(0) if self.turns else Turn.OURS

    def keep_turn(self, region: Region) -> None:
        pass

    def agree(self, region: Region, result: Decided, offered: tuple[Deployment, ...]) -> Decision:
        return result.decision

    def decided(self, region: Region, result: Decided, runs: Decision) -> None:
        self.results.append(result)


class Measured:
    """In place of a profiler, which needs a GPU: it has measured this."""

    def __init__(self, measurements: tuple[Measurement, ...]) -> None:
        self._measurements = measurements

    def measurements(self) -> tuple[Measurement, ...]:
        return self._measurements


def launch(inputs: list[Any]) -> str:
    return "launched"


class Relocating:
    """Stands where relocatable graphs do; the second call makes an executable."""

    refused_for_good = False
    prepared = 0
    calls = 0

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal = refusal

    def __call__(self, inputs: list[Any]) -> str:
        self.calls += 1
        self.prepared += self.calls == 2
        return "relocated"

    def at(self, sizes: tuple[int, ...]) -> Relocating:
        return self

    def close(self) -> None:
        pass


@pytest.fixture
def host() -> Host:
    return Host()


def region(host: Host, warm_up_calls: int = 0, relocate: Relocating | None = None) -> Region:
    ways = Candidates(launch, 0, relocate or Relocating())
    return Region(Graph("a" * 64, Kind.INFERENCE, 0, 1, 1), ways, host, lambda *_: None, 1, warm_up_calls)


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


def test_what_may_be_relocated_is_launched_until_the_helper_is_there(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.calls_until_helper = 20
    one = region(host)
    monkeypatch.setattr(one, "_why_not_measure", lambda: policy.NO_MEMORY)

    calls = 0
    while one.state is State.WARM_UP:
        assert one([]) == "launched"
        calls += 1

    assert calls == WARM_UP_CALLS + 1 + 20


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


def test_a_call_that_prepares_what_later_ones_have_is_timed_as_such(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[bool] = []
    one = region(host)
    monkeypatch.setattr(one._profiler, "start", lambda *_, **__: "a call")
    monkeypatch.setattr(one._profiler, "stop", lambda _, steady: timed.append(steady))

    results = [one._timed_call(each, []) for each in [Deployment.GRAPH] * 3 + [Deployment.KERNELS]]

    assert results == ["relocated"] * 3 + ["launched"]
    assert timed == [True, False, True, True]


LAUNCHED = Measurement(Deployment.KERNELS, 8, 100.0, 1.0, 80.0, 100.0, 0.0)
FAST = Measurement(Deployment.GRAPH, 8, 10.0, 0.1, 10.0, 10.0, 0.0)


def judged(one: Any, *measurements: Measurement) -> Region:
    one.state = State.MEASURE
    one._profiler = Measured(measurements)
    one._decide()
    made: Region = one
    return made


def test_what_has_come_to_refuse_is_not_chosen(host: Host) -> None:
    one = region(host, relocate=Relocating("a driver's call failed"))

    assert judged(one, LAUNCHED, FAST)([]) == "launched"

    (result,) = host.results
    assert result.decision == policy.only_launch_for_now("a driver's call failed")
    assert result.measurements == (LAUNCHED,)


@pytest.mark.parametrize("for_good", [True, False])
def test_what_refuses_is_launched_from_the_next_call_on(
    host: Host, monkeypatch: pytest.MonkeyPatch, for_good: bool
) -> None:
    relocate = Relocating()
    one = measured_by_threads(host, monkeypatch, 10, relocate)
    assert one.state is State.MEASURE
    relocate.refusal, relocate.refused_for_good = "it does not fit", for_good

    for _ in range(OTHERS_CALLS + 2):
        assert one([]) == "launched"

    (result,) = host.results
    assert (result.decision.reason, result.decision.final) == (
        "it cannot be relocated: it does not fit",
        for_good,
    )


def test_what_was_too_noisy_runs_as_it_was_found_and_is_provisional(host: Host) -> None:
    noisy = Measurement(Deployment.GRAPH, 8, 50.0, 20.0, 10.0, 50.0, 0.0)
    slow = Measurement(Deployment.KERNELS, 8, 300.0, 30.0, 300.0, 300.0, 0.0)

    assert judged(region(host), slow, noisy)([]) == "relocated"

    (result,) = host.results
    assert result.decision.reason.endswith(NOISY)
    assert (result.decision.final, result.decision.calls) == (False, 0)
    assert result.measurements == (slow, noisy)


def test_a_graph_that_another_process_measures_is_launched_until_its_answer_is_there(host: Host) -> None:
    one = region(host)
    answer = Entry("a" * 64, Decision(Deployment.GRAPH, "GRAPH is faster", POLICY_VERSION))
    host.turns = [Turn.OTHERS, Turn.OTHERS, Turn.OTHERS, answer]

    results = [one([]) for _ in range(WARM_UP_CALLS + 5)]

    assert results == ["launched"] * (WARM_UP_CALLS + 3) + ["relocated"] * 2
    assert host.results == [Decided(one.graph, answer.decision, adopted=answer)]
    assert host.report.counts == {"waited": 1}
    assert host.report.fallbacks == {WAITING: 2}
    assert host.report.failures == {}


def test_a_graph_that_was_left_to_nobody_is_measured_after_all(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = region(host)
    monkeypatch.setattr(one, "_why_not_measure", lambda: None)
    host.turns = [Turn.OTHERS, Turn.OURS]
    for _ in range(WARM_UP_CALLS + 1):
        one([])

    states = [one.state]
    one._begin_measuring(())
    states.append(one.state)

    assert states == [State.WAIT, State.MEASURE]


def test_an_answer_that_cannot_be_run_here_is_measured_anew(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = region(host)
    monkeypatch.setattr(one, "_why_not_measure", lambda: policy.NO_MEMORY)
    one._candidates = Candidates(launch, 0)
    host.turns = [Entry("a" * 64, Decision(Deployment.GRAPH, "", POLICY_VERSION))]
    for _ in range(WARM_UP_CALLS + 1):
        one([])

    assert host.results[0].decision == policy.not_measured(policy.NO_MEMORY, WARM_UP_CALLS + 1)


def test_while_it_waits_several_threads_are_launched(host: Host) -> None:
    one = region(host)
    answer = Entry("a" * 64, Decision(Deployment.GRAPH, "GRAPH is faster", POLICY_VERSION))
    host.turns = [Turn.OTHERS] * 50 + [answer]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.extend(one([]) for _ in range(100))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 800
    assert set(results) == {"launched", "relocated"}
    assert (one.state, len(host.results)) == (State.DEPLOYED, 1)
    assert host.report.failures == {}


def test_while_ranks_agree_other_threads_are_launched(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    one = region(host)
    answer = Entry("a" * 64, Decision(Deployment.GRAPH, "GRAPH is faster", POLICY_VERSION))
    host.turns = [Turn.OTHERS, answer]
    for _ in range(WARM_UP_CALLS + 1):
        one([])
    asking, seen = threading.Event(), threading.Event()

    def agree(region: Region, result: Decided, offered: tuple[Deployment, ...]) -> Decision:
        asking.set()
        assert seen.wait(10)
        return result.decision

    monkeypatch.setattr(host, "agree", agree)
    thread = threading.Thread(target=one, args=([],))
    thread.start()
    assert asking.wait(10)
    meanwhile = [one([]) for _ in range(10)]
    seen.set()
    thread.join()

    assert meanwhile == ["launched"] * 10
    assert one([]) == "relocated"
    assert host.report.failures == {}


@pytest.mark.parametrize("state", [State.WAIT, State.MEASURE])
def test_who_is_interrupted_while_it_is_decided_goes_on_launched(
    host: Host, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    one = region(host)
    monkeypatch.setattr(one, "_why_not_measure", lambda: None)
    host.turns = [Turn.OTHERS if state is State.WAIT else Turn.OURS]
    host.turns.append(Entry("a" * 64, Decision(Deployment.GRAPH, "GRAPH is faster", POLICY_VERSION)))
    for _ in range(WARM_UP_CALLS + 1):
        one([])
    assert one.state is state

    def interrupt(*_: object) -> Decision:
        raise KeyboardInterrupt

    monkeypatch.setattr(host, "agree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        one([]) if state is State.WAIT else one._decide()

    assert [one([]) for _ in range(3)] == ["launched"] * 3


class Timed:
    """In place of a profiler: each call is a sample at once."""

    def __init__(self) -> None:
        self.samples: dict[Deployment, int] = {}

    def start(self, deployment: Deployment, *, fair: bool = True, part: int = 0) -> Deployment | None:
        return deployment if fair else None

    def stop(self, call: Deployment, *, steady: bool = True) -> None:
        self.samples[call] = self.samples.get(call, 0) + 1

    def collect(self) -> None:
        pass

    def fewest(self, deployments: tuple[Deployment, ...]) -> int:
        return min(self.samples.get(each, 0) for each in deployments)

    def measurements(self) -> tuple[Measurement, ...]:
        return ()


def measured_by_threads(
    host: Host, monkeypatch: pytest.MonkeyPatch, requests: int, relocate: Relocating | None = None
) -> Region:
    """Measure a region of which each call comes from a thread of its own, as of a server with one for each request."""
    monkeypatch.setattr(Region, "_why_not_measure", lambda region: None)
    monkeypatch.setattr("torch.cuda.device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    one = region(host, relocate=relocate)
    one._profiler = Timed()  # type: ignore[assignment]
    for number in range(requests):
        monkeypatch.setattr(threading, "get_ident", lambda number=number: number)
        one([])
    return one


def test_a_server_with_a_thread_for_each_request_is_measured_too(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_by_threads(host, monkeypatch, 200).state is State.DEPLOYED
    assert host.report.fallbacks[OTHER_THREAD] > 4 * 20


def test_a_call_while_another_thread_is_in_a_measured_one_is_launched(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = measured_by_threads(host, monkeypatch, 10)
    monkeypatch.setattr(one, "_is_for_another_thread", lambda: False)
    seen: list[str] = []

    def run(deployment: Deployment, inputs: list[Any]) -> str:
        if not seen:
            seen.append("outer")
            seen.append(one([]))
        return "measured"

    monkeypatch.setattr(one, "_timed_call", run)

    assert one([]) == "measured"
    assert seen == ["outer", "launched"]
    assert one([]) == "measured"


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
        Candidates(fail, 0),
        host,
        lambda *_: None,
        1,
    )
    with pytest.raises(ZeroDivisionError):
        one([])


def test_a_region_that_was_measured_too_little_is_launched_and_says_how_often_it_ran(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = region(host)
    one.tally.calls = 17
    few = tuple(
        Measurement(each, 3, 100.0, 0.0, 100.0, 100.0, 0.0) for each in (Deployment.KERNELS, Deployment.GRAPH)
    )
    monkeypatch.setattr(one, "_profiler", Measured(few))

    assert one._judge() == Decided(one.graph, policy.too_few_calls(17), few)
