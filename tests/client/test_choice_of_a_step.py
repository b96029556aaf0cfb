"""What is chosen for the graphs of a step, and what the step then takes: random programs on a machine with two clocks.

Regions, rota, profiler, timeline and policy are the real ones; host and GPU are simulated.
"""

from __future__ import annotations

import functools
import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.candidates import Candidates, Deployed
from pygraphd.client.region import Region
from pygraphd.schema.messages import Deployment, Graph, Kind
from tests.client.simulated import Machine
from tests.client.test_region import Host

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

pytestmark = pytest.mark.torch

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
Ways = tuple[Deployment, ...]
PROGRAMS = 400
JITTER = 0.05
"""Of the host's times while they are measured."""
FIRST, TIMED = 10, 40
"""Steps that fill the queue, and those that are timed."""
MOST_STEPS = 500


@dataclass(frozen=True)
class Times:
    """What a graph takes, in microseconds: launched and captured, on the host and on the GPU."""

    launch_us: float
    relocate_us: float
    gpu_us: float
    captured_gpu_us: float

    def run(self, machine: Machine, deployment: Deployment, slower: float = 1.0) -> None:
        """Be called once."""
        if deployment is KERNELS:
            machine.launch(self.launch_us * slower, self.gpu_us)
        else:
            machine.submit(self.relocate_us * slower, self.captured_gpu_us)


@dataclass(frozen=True)
class Program:
    """The graphs of a step in the order of their calls; what the host does after each, and whether it waits for the step."""

    graphs: tuple[Times, ...]
    order: tuple[int, ...]
    gap_us: float
    synchronizes: bool

    def step(self, machine: Machine, calls: Sequence[Callable[[], Any]]) -> None:
        """Run a step."""
        for number in self.order:
            calls[number]()
            machine.host_us += self.gap_us
        if self.synchronizes:
            machine.synchronize()

    def step_us(self, ways: Ways) -> float:
        """Return what a step takes in the long run."""
        with pytest.MonkeyPatch.context() as patch:
            machine = Machine(patch)
            calls = [
                functools.partial(graph.run, machine, way)
                for graph, way in zip(self.graphs, ways, strict=True)
            ]
            for _ in range(FIRST):
                self.step(machine, calls)
            begun_us = max(machine.host_us, machine.free_us)
            for _ in range(TIMED):
                self.step(machine, calls)
            return (max(machine.host_us, machine.free_us) - begun_us) / TIMED


class Relocating:
    """A graph that is recorded at once, and never refuses."""

    refusal = None
    refused_for_good = False
    refused_for_now = None
    prepared = 0

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def __call__(self, inputs: list[Any]) -> None:
        self._run()

    @property
    def bytes(self) -> int:
        return 0

    def at(self, sizes: tuple[int, ...]) -> Relocating:
        return self

    def close(self) -> None:
        pass


def drawn(random_: random.Random) -> Program:
    """Draw a program: two or three graphs, some called many times, of 30 us to 1.6 ms on the host and 10 us to 5 ms on the GPU."""
    graphs = []
    for _ in range(random_.choice([2, 2, 3])):
        launch_us, gpu_us = 10 ** random_.uniform(1.5, 3.2), 10 ** random_.uniform(1, 3.7)
        relocate_us = min(launch_us * 0.9, random_.uniform(15, 80))
        graphs.append(Times(launch_us, relocate_us, gpu_us, gpu_us * random_.choice([1, 1, 1.02, 1.1, 1.4])))
    order = [number for number in range(len(graphs)) for _ in range(random_.choice([1, 1, 4, 12, 24]))]
    if random_.random() < 0.3:
        random_.shuffle(order)
    return Program(tuple(graphs), tuple(order), random_.choice([2, 10, 50]), random_.random() < 0.6)


def candidates(graph: Times, machine: Machine, random_: random.Random) -> Candidates:
    """Return the ways to run a graph on a host that is now and then slower."""

    def run(way: Deployment) -> None:
        graph.run(machine, way, 1 + JITTER * abs(random_.gauss(0, 1)))

    return Candidates(lambda _: run(KERNELS), None, 0, False, Relocating(lambda: run(GRAPH)))


def chosen(program: Program, random_: random.Random) -> Ways:
    """Return what the regions of a program decide."""
    found: dict[int, Deployment] = {}

    def deployed(region: Region, made: Deployed) -> None:
        found[region.family] = made.deployment

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Region, "_why_not_measure", lambda region: None)
        machine, host, calls = Machine(patch), Host(), []
        for number, graph in enumerate(program.graphs):
            key, ways = Graph(f"{number:064x}", Kind.INFERENCE, 0, 1, 9), candidates(graph, machine, random_)
            calls.append(functools.partial(Region(key, ways, host, deployed, number), []))
        steps = 0
        while len(found) < len(calls):
            program.step(machine, calls)
            steps += 1
            assert steps < MOST_STEPS
    assert host.report.failures == {}
    return tuple(found[number] for number in range(len(calls)))


@dataclass(frozen=True)
class Outcome:
    """What a step of a program takes: as was chosen, with all graphs captured, and with none."""

    seed: int
    chosen_us: float
    all_us: float
    none_us: float

    @property
    def ratio(self) -> float:
        """Of the choice to the better of all and none."""
        return self.chosen_us / min(self.all_us, self.none_us)


def outcome(seed: int) -> Outcome:
    random_ = random.Random(seed)
    program = drawn(random_)
    ways = chosen(program, random_)
    count = len(program.graphs)
    found = {each: program.step_us(each) for each in {ways, (KERNELS,) * count, (GRAPH,) * count}}
    return Outcome(seed, found[ways], found[(GRAPH,) * count], found[(KERNELS,) * count])


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [outcome(seed) for seed in range(PROGRAMS)]


def test_the_choice_is_hardly_ever_worse_than_to_capture_all_or_none(outcomes: list[Outcome]) -> None:
    worse = {each.seed: round(each.ratio, 3) for each in outcomes if each.ratio > 1.05}

    assert len(worse) <= 1, worse


def test_the_choice_often_beats_both(outcomes: list[Outcome]) -> None:
    assert sum(each.ratio < 0.98 for each in outcomes) >= 45


def test_the_choice_is_faster_on_average(outcomes: list[Outcome]) -> None:
    assert statistics.fmean(each.ratio for each in outcomes) < 0.991, "than the better of the two"
    assert statistics.fmean(each.chosen_us / each.all_us for each in outcomes) < 0.95
    assert statistics.fmean(each.chosen_us / each.none_us for each in outcomes) < 0.75


@pytest.mark.parametrize(
    "seed",
    [
        273,  # a heavy graph with 19 small ones behind it, which take longer on the host
        278,  # a graph of 130 us on the host and 172 on the GPU, in a step of 505 us on the host and 232 on the GPU
        398,
        # 24 calls of 65 us on the host launched and 43 captured, of 62 and 86 on the GPU: 2.85 ms launched, 2.37 captured. The policy
        # takes no capture that loses more on the GPU than a quarter of what it saves on the host, whether or not that is hidden.
        pytest.param(102, marks=pytest.mark.xfail(reason="refused for its span", strict=True)),
        # 4 calls of 65 us on the host launched and 44 captured, and the GPU is done before the next one comes: as if the host waited for
        # it each time, where 23 us on the GPU after 44 on the host are no faster.
        pytest.param(1201, marks=pytest.mark.xfail(reason="taken for a wait", strict=True)),
    ],
)
def test_a_step_that_the_host_bounds_is_chosen_by_the_hosts_time(seed: int) -> None:
    assert outcome(seed).ratio < 1.01
