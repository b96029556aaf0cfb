"""What is timed of calls, with CUDA's events and streams on a clock of the test's; tests/gpu/test_measuring.py has the real ones."""

from __future__ import annotations

import time

import pytest
import torch

from pygraphd.client.profiler import Profiler
from pygraphd.client.timeline import Timeline
from pygraphd.schema.messages import Deployment

pytestmark = pytest.mark.torch

LAUNCH, RELOCATE = Deployment.LAUNCH, Deployment.RELOCATE


class Machine:
    """A host and a GPU that works through its queue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host_us = self.free_us = 0.0
        self.cuda_stream = 7
        monkeypatch.setattr(time, "perf_counter_ns", lambda: self.host_us * 1e3)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))

    def query(self) -> bool:
        return self.free_us <= self.host_us

    def call(self, profiler: Profiler, deployment: Deployment, host_us: float, span_us: float) -> None:
        call = profiler.start(deployment)
        begun_us = max(self.free_us, self.host_us)
        self.host_us += host_us
        self.free_us = max(begun_us + span_us, self.host_us)
        profiler.stop(call)

    def synchronize(self) -> None:
        self.host_us = max(self.host_us, self.free_us)


class Event:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._at_us = 0.0

    def record(self, stream: object) -> None:
        assert stream is self._machine
        self._at_us = max(self._machine.free_us, self._machine.host_us)

    def query(self) -> bool:
        return self._at_us <= self._machine.host_us

    def elapsed_time(self, end: Event) -> float:
        return (end._at_us - self._at_us) / 1e3


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_a_sample_is_there_when_the_gpu_has_got_to_it(machine: Machine) -> None:
    profiler = Profiler(0)
    machine.call(profiler, LAUNCH, host_us=10, span_us=100)
    profiler.collect()
    assert profiler.fewest([LAUNCH]) == 0

    machine.synchronize()
    profiler.collect()
    (measurement,) = profiler.measurements()
    assert (measurement.host_us, measurement.span_us, measurement.median_us) == (10, 100, 100)
    assert (measurement.samples, measurement.busy) == (1, 0)


def test_what_is_not_fair_is_laid_out_and_no_sample(machine: Machine) -> None:
    profiler = Profiler(0)
    profiler.stop(profiler.start(LAUNCH, fair=False))
    profiler.collect()

    assert profiler.fewest([LAUNCH]) == 0
    assert profiler.measurements() == ()


def test_what_the_host_does_between_calls_hides_the_gpu_as_well(machine: Machine) -> None:
    """To launch a call takes the host as long as it takes the GPU, and what is around it makes the host the one to be waited for."""
    profiler = Profiler(0)
    for step in range(6):
        for call in range(10):
            deployment = (RELOCATE, LAUNCH, LAUNCH, RELOCATE)[(10 * step + call) // 5 % 4]
            machine.call(profiler, deployment, 40 if deployment is RELOCATE else 330, span_us=340)
            machine.host_us += 200
        machine.synchronize()
    profiler.collect()

    costs = {each.deployment: each.median_us for each in profiler.measurements()}
    assert costs == {LAUNCH: 330, RELOCATE: 140}


def test_a_short_queue_is_none(machine: Machine) -> None:
    """Inputs are drawn on the GPU, the graph is called, and its result is waited for: what the host does next hides nothing."""
    profiler = Profiler(0)
    for _ in range(10):
        machine.free_us = machine.host_us + 5
        machine.call(profiler, LAUNCH, host_us=100, span_us=150)
        machine.host_us += 1_000
        machine.synchronize()
    profiler.collect()

    (measurement,) = profiler.measurements()
    assert (measurement.median_us, measurement.busy) == (150, 0)


def test_no_two_profilers_are_taken_for_one(machine: Machine) -> None:
    timeline, seen = Timeline(), set()
    for _ in range(50):
        seen.add(Profiler(0, timeline).start(LAUNCH).entry.region)  # each is gone when the next is made

    assert len(seen) == 50


def test_a_call_that_cannot_be_read_is_in_nobodys_way(machine: Machine) -> None:
    profiler = Profiler(0)
    machine.call(profiler, LAUNCH, host_us=10, span_us=1)
    call = profiler.start(LAUNCH)
    call.begin.elapsed_time = None
    profiler.stop(call)
    machine.call(profiler, LAUNCH, host_us=10, span_us=1)
    machine.synchronize()

    with pytest.raises(TypeError):
        profiler.collect()
    profiler.collect()
    assert profiler.fewest([LAUNCH]) == 2


def test_host_time_behind_a_long_queue_costs_nothing(machine: Machine) -> None:
    timeline = Timeline()
    long, short = Profiler(0, timeline), Profiler(0, timeline)
    for _ in range(10):
        machine.call(long, LAUNCH, host_us=10, span_us=5_000)
        machine.call(short, LAUNCH, host_us=100, span_us=7)
        machine.synchronize()
    for each in (long, short):
        each.collect()

    (measurement,) = short.measurements()
    assert (measurement.median_us, measurement.host_us, measurement.busy) == (7, 100, 1)
