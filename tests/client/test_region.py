"""A region's states: what may follow what, and what it does before it may measure. Timing itself needs a GPU: tests/gpu."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client import policy
from pygraphd.client.candidates import Candidates, Deployed
from pygraphd.client.claims import Turn
from pygraphd.client.costs import Cost
from pygraphd.client.region import (
    CPU_INPUT,
    OTHER_THREAD,
    TRANSITIONS,
    WAITING,
    WARM_UP_CALLS,
    Before,
    Decided,
    Region,
    State,
)
from pygraphd.client.report import Report
from pygraphd.client.rota import Rota
from pygraphd.client.timeline import Timeline
from pygraphd.schema.messages import Conditions, Decision, Deployment, Entry, Graph, Kind, Measurement
from pygraphd.schema.policy import POLICY_VERSION

if TYPE_CHECKING:
    from pygraphd.client._torch import Runnable

pytestmark = pytest.mark.torch


class Host:
    """A session that keeps what it is told."""

    def __init__(self) -> None:
        self.rota = Rota()
        self.timeline = Timeline()
        self.report = Report()
        self.results: list[Decided] = []
        self.told = Conditions()
        self.turns: list[Entry | Turn] = []
        self.calls_until_helper = 0

    def helper_is_coming(self) -> bool:
        self.calls_until_helper -= 1
        return self.calls_until_helper >= 0

    def turn(self, region: Region) -> Entry | Turn:
        return self.turns.pop(0) if self.turns else Turn.OURS

    def keep_turn(self, region: Region) -> None:
        pass

    def decided_as_refused(self, region: Region, refusal: str) -> Entry | None:
        return None

    def conditions(self, region: Region) -> Conditions:
        return self.told

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
        lambda region, made: deployed.append(made.run),
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


@pytest.mark.parametrize("relocates", [True, False])
def test_what_may_be_relocated_is_launched_until_the_helper_is_there(
    host: Host, monkeypatch: pytest.MonkeyPatch, relocates: bool
) -> None:
    host.calls_until_helper = 20
    one = region(host)
    monkeypatch.setattr(one, "_why_not_measure", lambda: policy.NO_MEMORY)
    one._candidates = Candidates(
        launch, trees, device_index=0, is_backward=False, relocate=Relocating() if relocates else None
    )

    calls = 0
    while one.state is State.WARM_UP:
        assert one([]) == "launched"
        calls += 1

    assert calls == WARM_UP_CALLS + 1 + (20 if relocates else 0)


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


class Relocating:
    """Stands where relocatable graphs do; the second call makes an executable."""

    refusal = None
    refused_for_good = False
    refused_for_now = None
    prepared = 0
    calls = 0

    def __call__(self, inputs: list[Any]) -> str:
        self.calls += 1
        self.prepared += self.calls == 2
        return "relocated"

    @property
    def bytes(self) -> int:
        return 0

    def at(self, sizes: tuple[int, ...]) -> Relocating:
        return self

    def close(self) -> None:
        pass


def test_a_call_that_prepares_what_later_ones_have_is_timed_as_such(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[bool] = []
    one = region(host)
    one._candidates = Candidates(launch, None, device_index=0, is_backward=False, relocate=Relocating())
    monkeypatch.setattr(one._profiler, "start", lambda *_, **__: "a call")
    monkeypatch.setattr(one._profiler, "stop", lambda _, steady: timed.append(steady))

    results = [one._timed_call(each, []) for each in [Deployment.GRAPH] * 3 + [Deployment.KERNELS]]

    assert results == ["relocated"] * 3 + ["launched"]
    assert timed == [True, False, True, True]


LAUNCHED = Measurement(Deployment.KERNELS, 8, 100.0, 1.0, 80.0, 100.0, 0.0)


def refusing(refusal: str | None, *, for_now: bool) -> Any:
    made: Any = Relocating()
    made.refusal, made.refused_for_now = refusal, refusal if for_now else None
    return made


def judged(one: Any, *measurements: Measurement) -> Region:
    one.state = State.MEASURE
    one._profiler = Measured(measurements)
    one._decide()
    made: Region = one
    return made


def test_what_is_measured_after_drift_counts_though_relocating_is_refused_for_now(host: Host) -> None:
    slow = Measurement(Deployment.TREES, 8, 300.0, 1.0, 80.0, 300.0, 0.0)
    ways = Candidates(launch, trees, 0, False, refusing("no room", for_now=True))
    graph = Graph("a" * 64, Kind.INFERENCE, 0, 1, 1)
    one = Region(graph, ways, host, lambda *_: None, 1, before=Before(Deployment.TREES, None))

    assert judged(one, LAUNCHED, slow)([]) == "launched"

    (result,) = host.results
    assert result.measurements == (LAUNCHED, slow)
    assert "could not be relocated: no room" in result.decision.reason
    assert not result.decision.final


def test_what_has_come_to_refuse_is_not_chosen(host: Host) -> None:
    fast = Measurement(Deployment.GRAPH, 8, 10.0, 0.1, 10.0, 10.0, 0.0)
    slow = Measurement(Deployment.TREES, 8, 300.0, 1.0, 80.0, 300.0, 0.0)
    ways = Candidates(launch, trees, 0, False, refusing("a driver's call failed", for_now=False))
    one = Region(Graph("a" * 64, Kind.INFERENCE, 0, 1, 1), ways, host, lambda *_: None, 1)

    assert judged(one, LAUNCHED, slow, fast)([]) == "launched"

    (result,) = host.results
    assert result.decision.deployment is Deployment.KERNELS
    assert result.measurements == (LAUNCHED, slow)


def test_samples_of_before_something_refused_are_not_held_against_later_ones(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, relocating = region(host), refusing(None, for_now=False)
    one._candidates = Candidates(launch, trees, device_index=0, is_backward=False, relocate=relocating)
    one.turns.choose_from(one._candidates.possible)
    begun: list[str] = []
    monkeypatch.setattr(one._profiler, "begin_again", lambda: begun.append("again"))
    monkeypatch.setattr(one._profiler, "start", lambda *_, **__: None)

    for refusal in (None, None, "a driver's call failed", "a driver's call failed"):
        relocating.refusal = refusal
        one._timed_call(Deployment.KERNELS, [])

    assert begun == ["again"]
    assert one.turns.candidates == (Deployment.TREES, Deployment.KERNELS)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_trees_are_not_tried_where_a_part_takes_a_tensor_on_the_cpu(
    host: Host, monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    one = region(host)
    ways: Any = Candidates(launch, trees, device_index=0, is_backward=False, make_trees=lambda: trees)
    monkeypatch.setattr(one, "_candidates", ways)
    monkeypatch.setattr(one, "_why_not_measure", lambda: None)
    value = torch.ones(2, device="cpu" if on_cpu else "meta")
    for _ in range(WARM_UP_CALLS):
        one([3, value])
    one._begin_measuring((3,), [3, value])

    tried = (Deployment.KERNELS,) if on_cpu else (Deployment.TREES, Deployment.KERNELS)
    assert one.state is State.MEASURE
    assert one.turns.candidates == tried
    assert one._candidates is not None
    assert one._candidates.renewed().offered == tried
    assert host.report.summary()["left_on_cpu"] == ({CPU_INPUT: 1} if on_cpu else {})


def test_a_graph_that_another_process_measures_is_launched_until_its_answer_is_there(host: Host) -> None:
    one = region(host)
    answer = Entry("a" * 64, Decision(Deployment.TREES, "TREES is faster", POLICY_VERSION))
    host.turns = [Turn.OTHERS, Turn.OTHERS, Turn.OTHERS, answer]

    results = [one([]) for _ in range(WARM_UP_CALLS + 5)]

    assert results == ["launched"] * (WARM_UP_CALLS + 3) + ["captured"] * 2
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
    one._begin_measuring((), [])
    states.append(one.state)

    assert states == [State.WAIT, State.MEASURE]


def test_an_answer_that_cannot_be_run_here_is_measured_anew(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = region(host)
    monkeypatch.setattr(one, "_why_not_measure", lambda: policy.NO_MEMORY)
    host.turns = [Entry("a" * 64, Decision(Deployment.GRAPH, "", POLICY_VERSION))]
    for _ in range(WARM_UP_CALLS + 1):
        one([])

    assert host.results[0].decision == policy.not_measured(policy.NO_MEMORY, WARM_UP_CALLS + 1)


def test_while_it_waits_several_threads_are_launched(host: Host) -> None:
    one = region(host)
    answer = Entry("a" * 64, Decision(Deployment.TREES, "TREES is faster", POLICY_VERSION))
    host.turns = [Turn.OTHERS] * 50 + [answer]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.extend(one([]) for _ in range(100))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(results) == 800
    assert set(results) == {"launched", "captured"}
    assert (one.state, len(host.results)) == (State.DEPLOYED, 1)
    assert host.report.failures == {}


def test_while_ranks_agree_other_threads_are_launched(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    one = region(host)
    answer = Entry("a" * 64, Decision(Deployment.TREES, "TREES is faster", POLICY_VERSION))
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
    assert one([]) == "captured"
    assert host.report.failures == {}


@pytest.mark.parametrize("state", [State.WAIT, State.MEASURE])
def test_who_is_interrupted_while_it_is_decided_goes_on_launched(
    host: Host, monkeypatch: pytest.MonkeyPatch, state: State
) -> None:
    one = region(host)
    monkeypatch.setattr(one, "_why_not_measure", lambda: None)
    host.turns = [Turn.OTHERS if state is State.WAIT else Turn.OURS]
    host.turns.append(Entry("a" * 64, Decision(Deployment.TREES, "TREES is faster", POLICY_VERSION)))
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
    host: Host, monkeypatch: pytest.MonkeyPatch, trees: Runnable | None, requests: int
) -> Region:
    """Measure a region of which each call comes from a thread of its own, as of a server with one for each request."""
    monkeypatch.setattr(Region, "_why_not_measure", lambda region: None)
    monkeypatch.setattr("torch.cuda.device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    ways: Any = Candidates(launch, trees, device_index=0, is_backward=False, relocate=Relocating())
    one = Region(Graph("a" * 64, Kind.INFERENCE, 0, 1, 1), ways, host, lambda *_: None, 1)
    one._profiler = Timed()  # type: ignore[assignment]
    for number in range(requests):
        monkeypatch.setattr(threading, "get_ident", lambda number=number: number)
        one([])
    return one


def test_a_server_with_a_thread_for_each_request_is_measured_too(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_by_threads(host, monkeypatch, None, 200).state is State.DEPLOYED
    assert host.report.fallbacks[OTHER_THREAD] > 4 * 20


def test_trees_are_measured_by_one_thread_alone(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_by_threads(host, monkeypatch, trees, 200).state is State.MEASURE
    assert host.report.fallbacks == {OTHER_THREAD: 200 - WARM_UP_CALLS - 1}


def test_a_call_while_another_thread_is_in_a_measured_one_is_launched(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = measured_by_threads(host, monkeypatch, None, 10)
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
        Candidates(fail, fail, 0, is_backward=False),
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
        Measurement(each, 3, 100.0, 0.0, 100.0, 100.0, 0.0) for each in (Deployment.KERNELS, Deployment.TREES)
    )
    monkeypatch.setattr(one, "_profiler", Measured(few))

    assert one._judge() == Decided(one.graph, policy.too_few_calls(17), few)


@pytest.mark.parametrize(
    ("forward_in_trees", "deployment"),
    [(None, Deployment.TREES), (True, Deployment.TREES), (False, Deployment.KERNELS)],
)
def test_a_region_decides_under_the_conditions_of_its_host_and_passes_them_on(
    host: Host, monkeypatch: pytest.MonkeyPatch, forward_in_trees: bool | None, deployment: Deployment
) -> None:
    one = region(host)
    host.told = Conditions(forward_in_trees)
    measurements = tuple(
        Measurement(each, 10, time, 0.1, time, time, 0.0)
        for each, time in {Deployment.KERNELS: 100.0, Deployment.TREES: 50.0}.items()
    )
    monkeypatch.setattr(one, "_profiler", Measured(measurements))

    result = one._judge()

    assert (result.decision.deployment, result.decision.final) == (deployment, True)
    assert (result.measurements, result.conditions) == (measurements, host.told)


# --- what ran before it was measured anew ---

BEFORE_US = Cost(77.0)


def of_kind(
    host: Host, kind: Kind, before: Before | None, deployed: list[Deployed], refusal: str | None = None
) -> Region:
    ways = Candidates(launch, trees, 0, kind is Kind.BACKWARD, refusing(refusal, for_now=False))
    return Region(
        Graph("a" * 64, kind, 0, 1, 1), ways, host, lambda _, made: deployed.append(made), 1, before=before
    )


def in_trees(us: float, mad_us: float = 0.0, samples: int = 8) -> Measurement:
    return Measurement(Deployment.TREES, samples, us, mad_us, us, us, 0.0)


def launched_in(us: float, mad_us: float = 0.0, samples: int = 8) -> Measurement:
    return Measurement(Deployment.KERNELS, samples, us, mad_us, us, us, 0.0)


@pytest.fixture(autouse=True)
def no_backward_to_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pygraphd.client._torch.note_backward", lambda device: None)


def test_what_is_kept_costs_what_it_did(host: Host) -> None:
    deployed: list[Deployed] = []
    before = Before(Deployment.TREES, BEFORE_US, may_stay=True)
    noisy = launched_in(60.0, 20.0), in_trees(50.0, 20.0)

    assert judged(of_kind(host, Kind.INFERENCE, before, deployed), *noisy)([]) == "captured"

    (result,), (made,) = host.results, deployed
    assert result.kept
    assert result.measurements == noisy
    assert made.cost is BEFORE_US


def test_what_could_not_be_measured_anew_rests_on_no_measurement(host: Host) -> None:
    deployed: list[Deployed] = []
    before = Before(Deployment.TREES, BEFORE_US, may_stay=True)
    few = launched_in(60.0, samples=3), in_trees(50.0, samples=3)

    assert judged(of_kind(host, Kind.INFERENCE, before, deployed), *few)([]) == "captured"

    (result,), (made,) = host.results, deployed
    assert (result.decision.reason, result.kept, result.measurements) == (policy.AS_BEFORE, True, ())
    assert made.cost is BEFORE_US


@pytest.mark.parametrize(
    ("forward_in_trees", "runs"), [(None, "captured"), (True, "captured"), (False, "launched")]
)
def test_a_backward_does_not_stay_in_trees_that_its_forward_has_left(
    host: Host, forward_in_trees: bool | None, runs: str
) -> None:
    deployed: list[Deployed] = []
    host.told = Conditions(forward_in_trees)
    one = of_kind(host, Kind.BACKWARD, Before(Deployment.TREES, BEFORE_US, may_stay=True), deployed)

    assert judged(one, in_trees(50.0, samples=3))([]) == runs

    assert deployed[0].cost is (BEFORE_US if runs == "captured" else None), "that is not what a launch costs"


def test_a_forward_in_trees_that_was_in_doubt_is_decided_without_its_backward(host: Host) -> None:
    one = of_kind(host, Kind.FORWARD, Before(Deployment.TREES, BEFORE_US), [])

    assert judged(one, launched_in(50.0), in_trees(60.0))([]) == "launched"

    assert host.results[0].decision.final


@pytest.mark.parametrize(
    ("kind", "before", "runs"),
    [(Kind.FORWARD, Deployment.TREES, "captured"), (Kind.FORWARD, Deployment.GRAPH, "launched"),
     (Kind.INFERENCE, Deployment.TREES, "launched")],
)  # fmt: skip
def test_a_forward_in_trees_that_was_not_in_doubt_is_not(
    host: Host, kind: Kind, before: Deployment, runs: str
) -> None:
    one = of_kind(host, kind, Before(before, BEFORE_US, may_stay=True), [], "it does not fit")

    assert judged(one, launched_in(50.0), in_trees(60.0))([]) == runs


def test_an_answer_of_another_process_is_taken_up_though_it_is_not_final(host: Host) -> None:
    one: Any = of_kind(host, Kind.INFERENCE, Before(Deployment.TREES, BEFORE_US, may_stay=True), [])
    decision = Decision(Deployment.KERNELS, "refused there, too", POLICY_VERSION, final=False)
    entry = Entry("a" * 64, decision, None, "", cost_us=60.0, host_us=60.0, span_us=60.0)
    one.state = State.MEASURE

    one._deploy(Decided(one.graph, decision, adopted=entry))

    assert one([]) == "launched"
    assert not host.results[0].kept


@pytest.mark.parametrize(
    ("before", "gain_us"),
    [
        (None, 0.0),
        (Before(Deployment.TREES, None), 0.0),
        (Before(Deployment.GRAPH, None, may_stay=True), 0.0),
        (Before(Deployment.TREES, None, may_stay=True), 10.0),
    ],
)
def test_what_runs_in_trees_has_the_benefit_of_the_doubt(
    host: Host, before: Before | None, gain_us: float
) -> None:
    one: Any = of_kind(host, Kind.BACKWARD, before, [])
    one._profiler = Measured((launched_in(60.0, 20.0), in_trees(50.0, 20.0)))

    assert one.gain_in_trees_us() == gain_us


@pytest.mark.parametrize("before", [None, Before(Deployment.KERNELS, BEFORE_US)])
def test_what_is_measured_at_first_keeps_what_it_has_had_reserved(
    host: Host, monkeypatch: pytest.MonkeyPatch, before: Before | None
) -> None:
    """The allocator would have to get it anew from the device."""
    one: Any = of_kind(host, Kind.INFERENCE, before, [])
    monkeypatch.setattr(one, "_why_not_measure", lambda: None)

    one._start_measuring((), [])

    assert (one._reserved is not None) is (before is not None)
