"""A graph that is called in few steps of a training does not keep the others in measurement, on a machine with two clocks.

Regions, rota, attendance, profiler, timeline and policy are the real ones; host and GPU are simulated.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.attendance import PATIENCE
from pygraphd.client.region import SELDOM, Region
from pygraphd.schema.messages import Deployment, Graph, Kind
from tests.client.simulated import Machine
from tests.client.test_choice_of_a_step import Times, candidates
from tests.client.test_region import Host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.candidates import Deployed

pytestmark = pytest.mark.torch

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
FORWARD, BACKWARD, INFERENCE = Kind.FORWARD, Kind.BACKWARD, Kind.INFERENCE
MOST = 51
"""Steps that measuring takes a program of which each graph is called in each step, at most."""
EACH = Times(launch_us=200, relocate_us=30, gpu_us=150, captured_gpu_us=150)
PROGRAMS = 150
FIRST, TIMED = 20, 60

GRAPHS = {
    "f": (FORWARD, 1),
    "b": (BACKWARD, 1),
    "F": (FORWARD, 2),
    "B": (BACKWARD, 2),
    "o": (INFERENCE, 3),
    "s": (INFERENCE, 4),
    "S": (FORWARD, 5),
    "T": (BACKWARD, 5),
}
"""Kind and family of each graph of the programs below, which name one for each call."""
STEPS = {
    "a training": "fb",
    "twelve layers that share a graph, and a head": "f" * 12 + "FB" + "b" * 12,
    "two models": "fbFB",
    "micro-batches": "fbfbfbfb",
    "an optimizer of its own": "fbo",
}
SELDOM_ONES = {"a graph for logging": "s", "an evaluation": "s" * 10, "a loss of its own": "ST"}


@dataclass
class Program:
    """A program of which each graph takes some time; `decided` says in which step each was."""

    times: Mapping[str, Times]
    random_: random.Random = field(default_factory=lambda: random.Random(1))
    gap_us: float = 10
    synchronizes: int = 7
    decided: dict[str, int] = field(default_factory=dict)
    ways: dict[str, Deployment] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(Region, "_why_not_measure", lambda region: None)
        self.machine, self.host = Machine(self.patch), Host()
        self._regions: dict[str, Region] = {}
        self.steps = 0

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.undo()
        assert self.host.report.failures == {}

    def step(self, calls: str) -> None:
        self.steps += 1
        for name in calls:
            if name not in self._regions:
                self._regions[name] = self._region(name)
            self._regions[name]([])
            self.machine.host_us += self.gap_us
        if self.steps % self.synchronizes == 0:
            self.machine.synchronize()

    def _region(self, name: str) -> Region:
        def deployed(region: Region, made: Deployed) -> None:
            self.decided[name], self.ways[name] = self.steps, made.deployment

        kind, family = GRAPHS[name]
        ways = candidates(self.times[name], self.machine, self.random_)
        return Region(Graph(f"{ord(name):064x}", kind, 0, 1, 9), ways, self.host, deployed, family)


def run(often: str, seldom: str, period: int, most: int = 5_000) -> Program:
    """Run a program until all is decided."""
    with Program(dict.fromkeys(GRAPHS, EACH)) as program:
        while len(program.decided) < len({*often, *seldom}):
            program.step(often + (seldom if program.steps % period == 0 else ""))
            assert program.steps < most
    return program


@pytest.mark.parametrize("period", [2, 3, 5, 10, 20, 50, 100])
@pytest.mark.parametrize("seldom", SELDOM_ONES.values(), ids=SELDOM_ONES)
@pytest.mark.parametrize("often", STEPS.values(), ids=STEPS)
def test_what_is_called_in_each_step_is_decided_as_soon_as_ever(often: str, seldom: str, period: int) -> None:
    program = run(often, seldom, period)

    assert max(program.decided[name] for name in often) <= MOST
    assert max(program.decided[name] for name in seldom) <= 26 * period + MOST
    assert {program.ways[name] for name in often} == {GRAPH}


def test_what_is_measured_later_is_counted_with_the_reason() -> None:
    assert run("fb", "s", period=5).host.report.fallbacks == {SELDOM: 3}
    assert run("fb", "s", period=2).host.report.fallbacks == {}


@pytest.mark.parametrize("often", ["fb", "fbFB"])
def test_what_was_called_seldom_is_measured_when_all_else_is_called_no_more(often: str) -> None:
    """As when a program trains for a few steps, and only evaluates from then on."""
    with Program(dict.fromkeys(GRAPHS, EACH)) as program:
        for step in range(12):
            program.step(often + ("s" if step % 4 == 0 else ""))
        begun = program.steps
        while "s" not in program.decided:
            program.step("s")
            assert program.steps < begun + 2 * PATIENCE + MOST


# --- what is chosen ---


@dataclass(frozen=True)
class Drawn:
    """A random training with a graph that is called now and then, and what a step takes in the long run."""

    times: Mapping[str, Times]
    layers: int
    period: int
    burst: int
    gap_us: float
    synchronizes: int

    def calls(self, step: int) -> str:
        seldom = "s" * self.burst if step % self.period == 0 else ""
        return "f" * self.layers + "b" * self.layers + seldom

    def step_us(self, ways: Mapping[str, Deployment]) -> float:
        with pytest.MonkeyPatch.context() as patch:
            machine, begun_us = Machine(patch), 0.0
            for step in range(FIRST + TIMED):
                if step == FIRST:
                    begun_us = max(machine.host_us, machine.free_us)
                for name in self.calls(step):
                    self.times[name].run(machine, ways[name])
                    machine.host_us += self.gap_us
                if step % self.synchronizes == 0:
                    machine.synchronize()
            return (max(machine.host_us, machine.free_us) - begun_us) / TIMED


def some_times(random_: random.Random) -> Times:
    launch_us, gpu_us = 10 ** random_.uniform(1.5, 3.2), 10 ** random_.uniform(1, 3.7)
    relocate_us = min(launch_us * 0.9, random_.uniform(15, 80))
    return Times(launch_us, relocate_us, gpu_us, gpu_us * random_.choice([1, 1, 1.02, 1.1, 1.4]))


def drawn(random_: random.Random) -> Drawn:
    return Drawn(
        {name: some_times(random_) for name in "fbs"},
        layers=random_.choice([1, 1, 4, 12]),
        period=random_.choice([2, 3, 5, 10, 20]),
        burst=random_.choice([1, 1, 1, 5]),
        gap_us=random_.choice([2, 10, 50]),
        synchronizes=random_.choice([1, 1, 3, 10]),
    )


def ratio(seed: int) -> float:
    """Return what a step takes as was chosen, of the better of all captured and none."""
    random_ = random.Random(seed)
    one = drawn(random_)
    with Program(one.times, random_, one.gap_us, one.synchronizes) as program:
        while len(program.decided) < len(one.times):
            program.step(one.calls(program.steps))
    all_or_none = [one.step_us(dict.fromkeys(one.times, way)) for way in (KERNELS, GRAPH)]
    return one.step_us(program.ways) / min(all_or_none)


def test_the_choice_is_no_worse_for_being_made_apart() -> None:
    """Measured together, 3 of these 150 took over 5 % longer, 20 were faster by over 2 %, and all took 0.989 in the mean."""
    ratios: Sequence[float] = [ratio(seed) for seed in range(PROGRAMS)]

    assert sum(each > 1.05 for each in ratios) <= 4
    assert sum(each < 0.98 for each in ratios) >= 20
    assert statistics.fmean(ratios) < 0.99
