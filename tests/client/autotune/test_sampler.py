"""What is timed of calls, with CUDA's events and streams on a clock of the test's; tests/gpu has the real ones."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.autotune.sampler import Sampler
from pygraphd.schema.messages import Deployment, Measurement
from tests.support import simulated

pytestmark = pytest.mark.torch

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH


class Machine(simulated.Machine):
    """A host and a GPU that works through its queue, and a sampler of what is called there."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__(patch)
        self.sampler = Sampler(0)

    def call(self, host_us: float, gpu_us: float, way: Deployment = KERNELS, *, counts: bool = True) -> None:
        """Time a call of which the GPU can begin as soon as the host does."""
        sample = self.sampler.start(way)
        begun_us = max(self.free_us, self.host_us)
        self.host_us += host_us
        self.free_us = begun_us + gpu_us
        self.sampler.stop(sample, counts=counts)

    def measured(self) -> Measurement:
        """Return what is known of the one deployment that was called."""
        (found,) = self.sampler.measurements()
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_sample_is_known_when_the_gpu_has_come_to_the_next_call(machine: Machine) -> None:
    machine.call(host_us=10, gpu_us=100)
    machine.synchronize()
    assert not machine.sampler.is_complete()
    assert machine.sampler.measurements() == ()

    machine.host_us += 30
    machine.call(host_us=10, gpu_us=100, counts=False)

    assert machine.sampler.is_complete()
    assert machine.measured() == Measurement(
        KERNELS, 1, 130.0, 0.0, 10.0, 100.0, 0.0, host_mad_us=0.0, span_mad_us=0.0
    )


def test_what_the_gpu_has_not_reached_is_not_waited_for(machine: Machine) -> None:
    for _ in range(10):
        machine.call(host_us=10, gpu_us=1_000)

    assert not machine.sampler.is_complete()
    assert machine.sampler.measurements() == (), "the GPU is at the first of them"
    machine.host_us = 5_500
    assert machine.measured().samples == 5


def test_what_does_not_count_is_no_sample_and_ends_the_interval_of_the_one_before(machine: Machine) -> None:
    for counts in (True, False, False):
        machine.call(host_us=10, gpu_us=20, counts=counts)
        machine.host_us += 40
        machine.synchronize()

    assert (machine.measured().samples, machine.measured().median_us) == (1, 50)


@pytest.mark.parametrize(
    ("host_us", "gpu_us", "pause_us", "interval_us"),
    [
        (100, 20, 50, 150),  # the GPU waits for the host
        (10, 300, 50, 300),  # the queue grows
        (100, 120, 50, 150),  # what the host does after the call hides the GPU's time
    ],
)
def test_the_interval_is_what_a_step_takes_whoever_holds_it_up(
    machine: Machine, host_us: float, gpu_us: float, pause_us: float, interval_us: float
) -> None:
    for _ in range(20):
        machine.call(host_us, gpu_us)
        machine.host_us += pause_us
    machine.synchronize()
    machine.call(host_us, gpu_us, counts=False)

    assert machine.measured().median_us == interval_us
    assert machine.measured().host_us == host_us
    assert machine.measured().span_us == max(host_us, gpu_us), (
        "what is launched kernel by kernel ends no sooner than the host"
    )


def test_a_program_that_waits_for_each_step_pays_for_the_host_and_the_gpu(machine: Machine) -> None:
    for _ in range(10):
        machine.call(host_us=10, gpu_us=300)
        machine.synchronize()
        machine.host_us += 50
    machine.call(host_us=10, gpu_us=300, counts=False)

    assert machine.measured().median_us == 350


def test_a_queue_that_was_filled_before_runs_dry_by_the_hosts_clock(machine: Machine) -> None:
    """Earlier graphs have left work for ten calls: the GPU hides the host's time for now, and not in the long run."""
    machine.free_us = 1_000.0
    for _ in range(10):
        machine.call(host_us=100, gpu_us=20)
    machine.synchronize()
    machine.call(host_us=100, gpu_us=20, counts=False)

    assert machine.measured().median_us == 100
    assert machine.measured().busy > 0.8


def test_the_gpu_is_busy_with_what_was_before_and_not_with_a_call_itself(machine: Machine) -> None:
    for _ in range(5):
        machine.call(host_us=10, gpu_us=30)
        machine.free_us += 5
        machine.synchronize()
    machine.call(host_us=10, gpu_us=30)
    machine.call(host_us=10, gpu_us=30, counts=False)
    machine.synchronize()

    assert machine.measured().busy == 0


def test_the_users_drawing_of_inputs_is_no_queue(machine: Machine) -> None:
    for _ in range(5):
        machine.free_us = machine.host_us + 5
        machine.call(host_us=100, gpu_us=30)
        machine.synchronize()
    machine.call(host_us=10, gpu_us=30, counts=False)

    assert machine.measured().busy == 0


def test_both_deployments_are_told_apart(machine: Machine) -> None:
    for way in (GRAPH, KERNELS, KERNELS, GRAPH):
        machine.call(10 if way is GRAPH else 100, 20, way)
        machine.synchronize()
    machine.call(10, 20, counts=False)

    found = {each.deployment: each for each in machine.sampler.measurements()}
    assert {way: (each.samples, each.host_us) for way, each in found.items()} == {
        GRAPH: (2, 10.0),
        KERNELS: (2, 100.0),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.floats(1, 1e4), min_size=1, max_size=30))
def test_medians_and_their_spread_are_those_of_the_samples(
    monkeypatch: pytest.MonkeyPatch, times_us: list[float]
) -> None:
    machine = Machine(monkeypatch)
    for time_us in times_us:
        machine.call(time_us, 0.5)
    machine.call(1, 0.5, counts=False)

    measured, median = machine.measured(), statistics.median(times_us)
    assert measured.host_us == pytest.approx(median)
    assert measured.host_mad_us == pytest.approx(
        statistics.median(abs(each - median) for each in times_us), abs=1e-6
    )


def test_the_interval_of_a_call_that_others_came_after_is_left_out_and_its_times_are_not(
    machine: Machine,
) -> None:
    for number in range(8):
        machine.call(host_us=10, gpu_us=20)
        machine.host_us += 40
        if number in {2, 5}:
            machine.sampler.interrupt()
            machine.host_us += 5_000
        machine.synchronize()
    machine.call(host_us=10, gpu_us=20, counts=False)

    measured = machine.measured()
    assert (measured.samples, measured.host_us, measured.span_us) == (8, 10.0, 20.0)
    assert (measured.median_us, measured.mad_us) == (50.0, 0.0)


def test_fewer_intervals_than_samples_tell_less(machine: Machine) -> None:
    for number in range(8):
        machine.call(host_us=10, gpu_us=20)
        machine.host_us += 100 + 10 * (number % 4)
        if number < 4:
            machine.sampler.interrupt()
    machine.synchronize()
    machine.call(host_us=10, gpu_us=20, counts=False)

    measured = machine.measured()
    assert (measured.samples, measured.median_us) == (8, 125)  # of 110, 120, 130 and 140
    # Their deviation is 10; the error of their median is that of four samples, and the policy divides by the root of eight.
    assert measured.mad_us == pytest.approx(10 * 2**0.5)


def test_too_few_intervals_are_none_for_either_deployment(machine: Machine) -> None:
    for way in (GRAPH, KERNELS):
        for number in range(8):
            machine.call(10 if way is GRAPH else 30, 20, way)
            machine.host_us += 70
            machine.synchronize()
            if way is KERNELS and number >= 3:
                machine.sampler.interrupt()
    machine.call(10, 20, counts=False)

    found = {each.deployment: (each.median_us, each.mad_us) for each in machine.sampler.measurements()}
    assert found == {GRAPH: (20.0, 20.0), KERNELS: (30.0, 30.0)}
