"""What is timed of calls, with CUDA's events and streams on a clock of the test's; tests/gpu/test_measuring.py has the real ones."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.profiler import Profiler, as_of, summarize
from pygraphd.client.timeline import Entry, Timeline
from pygraphd.schema.messages import Conditions, Deployment, Measurement
from pygraphd.schema.policy import decide
from tests.client import simulated

pytestmark = pytest.mark.torch

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH


class Machine(simulated.Machine):
    """A host and a GPU that works through its queue, and what a profiler times there."""

    def call(
        self,
        profiler: Profiler,
        deployment: Deployment,
        host_us: float,
        span_us: float,
        *,
        steady: bool = True,
        part: int = 0,
    ) -> None:
        call = profiler.start(deployment, part=part)
        begun_us = max(self.free_us, self.host_us)
        self.host_us += host_us
        self.free_us = max(begun_us + span_us, self.host_us)
        profiler.stop(call, steady=steady)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_sample_is_there_when_the_gpu_has_got_to_it(machine: Machine) -> None:
    profiler = Profiler(0)
    machine.call(profiler, KERNELS, host_us=10, span_us=100)
    profiler.collect()
    assert profiler.fewest([KERNELS]) == 0

    machine.synchronize()
    profiler.collect()
    (measurement,) = profiler.measurements()
    assert (measurement.host_us, measurement.span_us, measurement.median_us) == (10, 100, 100)
    assert (measurement.samples, measurement.busy) == (1, 0)


def test_what_is_not_fair_is_laid_out_and_no_sample(machine: Machine) -> None:
    profiler = Profiler(0)
    profiler.stop(profiler.start(KERNELS, fair=False))
    profiler.collect()

    assert profiler.fewest([KERNELS]) == 0
    assert profiler.measurements() == ()


def test_what_the_host_does_between_calls_hides_the_gpu_as_well(machine: Machine) -> None:
    """To launch a call takes the host as long as it takes the GPU, and what is around it makes the host the one to be waited for."""
    profiler = Profiler(0)
    for step in range(6):
        for call in range(10):
            deployment = (GRAPH, KERNELS, KERNELS, GRAPH)[(10 * step + call) // 5 % 4]
            machine.call(profiler, deployment, 40 if deployment is GRAPH else 330, span_us=340)
            machine.host_us += 200
        machine.synchronize()
    profiler.collect()

    costs = {each.deployment: each.median_us for each in profiler.measurements()}
    assert costs == {KERNELS: 330, GRAPH: 140}


def test_a_short_queue_is_none(machine: Machine) -> None:
    """Inputs are drawn on the GPU, the graph is called, and its result is waited for: what the host does next hides nothing."""
    profiler = Profiler(0)
    for _ in range(10):
        machine.free_us = machine.host_us + 5
        machine.call(profiler, KERNELS, host_us=100, span_us=150)
        machine.host_us += 1_000
        machine.synchronize()
    profiler.collect()

    (measurement,) = profiler.measurements()
    assert (measurement.median_us, measurement.busy) == (150, 0)


def test_no_two_profilers_are_taken_for_one(machine: Machine) -> None:
    timeline, seen = Timeline(), set()
    for _ in range(50):
        seen.add(Profiler(0, timeline).start(KERNELS).entry.region)  # each is gone when the next is made

    assert len(seen) == 50


def test_a_call_that_cannot_be_read_is_in_nobodys_way(machine: Machine) -> None:
    profiler = Profiler(0)
    machine.call(profiler, KERNELS, host_us=10, span_us=1)
    call = profiler.start(KERNELS)
    call.begin.elapsed_time = None
    profiler.stop(call)
    machine.call(profiler, KERNELS, host_us=10, span_us=1)
    machine.synchronize()

    with pytest.raises(TypeError):
        profiler.collect()
    profiler.collect()
    assert profiler.fewest([KERNELS]) == 2


def test_host_time_behind_a_long_queue_costs_nothing(machine: Machine) -> None:
    timeline = Timeline()
    long, short = Profiler(0, timeline), Profiler(0, timeline)
    for _ in range(10):
        machine.call(long, KERNELS, host_us=10, span_us=5_000)
        machine.call(short, KERNELS, host_us=100, span_us=7)
        machine.synchronize()
    for each in (long, short):
        each.collect()

    (measurement,) = short.measurements()
    assert (measurement.median_us, measurement.host_us, measurement.busy) == (7, 100, 1)


def test_what_later_calls_need_not_do_is_in_no_cost(machine: Machine) -> None:
    profiler = Profiler(0)
    for number in range(8):
        is_steady = number not in {1, 2, 5}
        machine.call(profiler, GRAPH, 30 if is_steady else 700, span_us=10, steady=is_steady)
        machine.synchronize()
    profiler.collect()

    (measurement,) = profiler.measurements()
    assert (measurement.samples, measurement.median_us, measurement.mad_us) == (8, 30, 0)


def test_what_is_hardly_ever_steady_costs_what_it_costs(machine: Machine) -> None:
    profiler = Profiler(0)
    for number in range(8):
        machine.call(profiler, GRAPH, 700, span_us=10, steady=number > 5)
        machine.synchronize()
    profiler.collect()

    assert [each.median_us for each in profiler.measurements()] == [700]


def test_a_capture_is_known_as_well_as_the_launches_that_it_is_held_against(machine: Machine) -> None:
    profiler = Profiler(0)
    for part, deployment, calls in [(0, GRAPH, 3), (0, KERNELS, 4), (1, KERNELS, 2), (1, TREES, 5)]:
        for _ in range(calls):
            machine.call(profiler, deployment, host_us=100 * (1 + part), span_us=300 * (1 + part), part=part)
            machine.synchronize()
    profiler.collect()

    found = {each.deployment: each for each in profiler.measurements()}
    counts = {each: profiler.fewest([each]) for each in found}
    assert counts == {GRAPH: 3, KERNELS: 4, TREES: 2}
    assert {each: found[each].samples for each in found} == counts
    assert {(each.median_us, each.host_us, each.span_us) for each in found.values()} == {(300, 100, 300)}


def test_what_is_brought_to_another_time_keeps_the_noise_of_what_it_was_held_against() -> None:
    now, then = (Measurement(KERNELS, 8, cost, mad, cost, 10, 0) for cost, mad in ((100, 1), (200, 4)))
    trees = Measurement(TREES, 8, median_us=100, mad_us=3, host_us=100, span_us=10, busy=0)

    brought = as_of(now, trees, then)

    assert (brought.median_us, brought.host_us, brought.span_us) == (50, 50, 10)
    assert brought.mad_us == pytest.approx(math.hypot(3, 4 / 2) / 2)


def sample(host_us: float, span_us: float, *, exposed: bool | None) -> Entry:
    return Entry(1, KERNELS, True, False, 0.0, host_us, span_us, exposed=exposed)


def test_a_share_of_hidden_calls_is_no_noise() -> None:
    """A small graph behind a heavy one on the H200: a call that was hidden, eight that were not, of which one by chance took long."""
    exposed = [79, 79, 75, 72, 168, 72, 64, 75]
    samples = [sample(each, 14, exposed=True) for each in exposed] + [sample(79, 14, exposed=False)]

    found = summarize(GRAPH, samples, hidden=0.1)

    assert found.median_us == pytest.approx(0.9 * 75 + 0.1 * 14)
    assert found.mad_us == pytest.approx(0.9 * 3.5 * math.sqrt(9 / 8))


def test_what_rests_on_few_calls_is_the_less_certain() -> None:
    calls = [sample(host_us, 1, exposed=True) for host_us in (80, 90, 100, 110, 120, 130, 140, 150)]
    for each in calls[:4]:
        each.steady = False

    found = summarize(GRAPH, calls, hidden=0)

    assert (found.samples, found.median_us, found.host_us) == (8, 135, 135)
    assert found.mad_us == pytest.approx(10 * math.sqrt(8 / 4))


def test_a_deployment_that_met_only_one_kind_of_calls_is_held_against_both() -> None:
    met_only_busy = summarize(KERNELS, [sample(130, 18, exposed=False)] * 8, hidden=0.25)
    met_only_idle = summarize(KERNELS, [sample(130, 131, exposed=True)] * 8, hidden=0.25)

    assert met_only_busy.median_us == 0.75 * 130 + 0.25 * 18
    assert met_only_idle.median_us == 131, "how long the GPU takes without waiting for the host is not known"


COSTS = st.floats(1, 1e6)
SAMPLES = st.lists(st.builds(sample, COSTS, COSTS, exposed=st.sampled_from([True, False, None])), min_size=1)


@given(SAMPLES, st.floats(0, 1))
def test_a_cost_is_between_the_least_and_the_most_that_a_call_may_have_cost(
    samples: list[Entry], hidden: float
) -> None:
    found = summarize(KERNELS, samples, hidden)

    least = min(min(each.host_us, each.span_us) for each in samples)
    most = max(max(each.host_us, each.span_us) for each in samples)
    assert least * (1 - 1e-9) <= found.median_us <= most * (1 + 1e-9)
    assert 0 <= found.mad_us <= (most - least) * math.sqrt(len(samples)) + 1e-6


@given(st.lists(st.tuples(COSTS, COSTS), min_size=1), st.booleans())
def test_calls_of_one_kind_cost_their_median(times: list[tuple[float, float]], hidden: bool) -> None:
    samples = [sample(host_us, span_us, exposed=not hidden) for host_us, span_us in times]
    found = summarize(KERNELS, samples, float(hidden))

    costs = [span_us if hidden else max(host_us, span_us) for host_us, span_us in times]
    assert found.median_us == pytest.approx(statistics.median(costs))
    assert found.mad_us == pytest.approx(statistics.median(abs(each - found.median_us) for each in costs))


NEARLY_ONE = st.floats(0.995, 1.005)
EIGHT = st.lists(NEARLY_ONE, min_size=8, max_size=8)
CLEARLY_FASTER_OR_NOT = st.floats(0.1, 0.9) | st.floats(1.0, 10.0)
"""Closer to what a capture must win by, one sample in eight may turn the scales."""


def decided(launched: list[Entry], relocated: list[Entry], *, hidden: bool) -> Deployment:
    found = [summarize(KERNELS, launched, float(hidden)), summarize(GRAPH, relocated, float(hidden))]
    return decide(found, Conditions()).deployment


@given(
    EIGHT, EIGHT, CLEARLY_FASTER_OR_NOT, st.floats(1e-4, 1e4) | st.just(1e4),
    st.integers(0, 15), st.sampled_from(["host_us", "span_us", "both"]), st.booleans(),
)  # fmt: skip
def test_one_outlier_of_any_size_among_eight_samples_leaves_the_decision_as_it_was(
    launched: list[float],
    relocated: list[float],
    ratio: float,
    times: float,
    which: int,
    clock: str,
    hidden: bool,
) -> None:
    samples = [sample(each, each, exposed=not hidden) for each in launched]
    samples += [sample(ratio * each, ratio * each, exposed=not hidden) for each in relocated]
    before = decided(samples[:8], samples[8:], hidden=hidden)

    for name in ("host_us", "span_us") if clock == "both" else (clock,):
        setattr(samples[which], name, times * getattr(samples[which], name))

    assert before is (GRAPH if ratio < 1 else KERNELS)
    assert decided(samples[:8], samples[8:], hidden=hidden) is before
