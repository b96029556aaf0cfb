"""What is chosen for the graphs of a step, and what the step then takes: random programs on a machine with two clocks.

Trials, sampler and policy are the real ones; host and GPU are simulated. Many a GRAPH takes longer on the GPU here, which is rare.
"""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.autotune.candidates import Candidates
from pygraphd.schema.messages import Deployment
from tests.support.simulated import Machine
from tests.support.trial_host import Host, trial_of

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.torch

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
Ways = tuple[Deployment, ...]
PROGRAMS = 400
NOISY_PROGRAMS = 120
FIRST, TIMED = 5, 20
"""Steps that fill the queue, and those that are timed."""
MOST_STEPS = 700
Noise = Callable[[Machine], tuple[float, float]]
"""Returns by what factors a call takes longer now, on the host and on the GPU."""


# --- machines ---


def jitter(share: float, random_: random.Random) -> Noise:
    """The host is slower now and then, by a share that is normal."""
    return lambda machine: (1 + share * abs(random_.gauss(0, 1)), 1.0)


def bursts(random_: random.Random) -> Noise:
    """A third of the time others keep the host busy, which takes up to five times as long for some milliseconds."""
    until_us, factor = -1.0, 1.0

    def noise(machine: Machine) -> tuple[float, float]:
        nonlocal until_us, factor
        if machine.host_us >= until_us:
            factor = random_.uniform(1.5, 5) if random_.random() < 1 / 3 else 1.0
            until_us = machine.host_us + random_.uniform(500, 20_000)
        return factor * (1 + 0.05 * abs(random_.gauss(0, 1))), 1.0

    return noise


def preemption(random_: random.Random) -> Noise:
    """One call of seven is preempted, and takes many times as long."""
    return lambda machine: (random_.uniform(3, 40) if random_.random() < 0.15 else 1.0, 1.0)


def shared_gpu(random_: random.Random) -> Noise:
    """One call of four finds others at work on the GPU."""
    return lambda machine: (1.0, random_.uniform(1.5, 4) if random_.random() < 0.25 else 1.0)


NOISES: dict[str, Callable[[random.Random], Noise]] = {
    "a host that varies by 5 %": functools.partial(jitter, 0.05),
    "a host that varies by 30 %": functools.partial(jitter, 0.3),
    "a host that varies by 100 %": functools.partial(jitter, 1.0),
    "bursts of work on the host": bursts,
    "a host that is preempted": preemption,
    "a GPU that is shared": shared_gpu,
}


# --- programs ---


@dataclass(frozen=True)
class Times:
    """What a graph takes, in microseconds: as KERNELS and as GRAPH, on the host and on the GPU."""

    kernels_us: float
    graph_us: float
    gpu_us: float
    graph_gpu_us: float

    def run(self, machine: Machine, way: Deployment, host: float = 1.0, gpu: float = 1.0) -> None:
        """Be called once, by a host and on a GPU that are slower by some factors."""
        if way is KERNELS:
            machine.run_kernels(self.kernels_us * host, self.gpu_us * gpu)
        else:
            machine.submit(self.graph_us * host, self.graph_gpu_us * gpu)


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


def inference(random_: random.Random) -> Program:
    """Draw two or three graphs, some called many times, of 30 us to 1.6 ms on the host and 10 us to 5 ms on the GPU."""
    graphs = []
    for _ in range(random_.choice([2, 2, 3])):
        kernels_us, gpu_us = 10 ** random_.uniform(1.5, 3.2), 10 ** random_.uniform(1, 3.7)
        graphs.append(graph(random_, kernels_us, gpu_us, [1, 1, 1.02, 1.1, 1.4]))
    order = [number for number in range(len(graphs)) for _ in range(random_.choice([1, 1, 4, 12, 24]))]
    if random_.random() < 0.3:
        random_.shuffle(order)
    return Program(tuple(graphs), tuple(order), random_.choice([2, 10, 50]), random_.random() < 0.6)


def training(random_: random.Random) -> Program:
    """Draw forwards, some called for many layers, and their backwards, which come in the opposite order and take longer."""
    graphs: list[Times] = []
    counts = [random_.choice([1, 1, 4, 12, 24]) for _ in range(random_.choice([1, 2, 3]))]
    for _ in counts:
        kernels_us, gpu_us = 10 ** random_.uniform(1.5, 3.2), 10 ** random_.uniform(1, 3.7)
        backward_us = kernels_us * random_.uniform(0.9, 1.6), gpu_us * random_.choice([1.5, 2, 2.5])
        both = (kernels_us, gpu_us), backward_us
        graphs.extend(graph(random_, *times_us, [1, 1, 1, 1.02, 1.1, 1.4]) for times_us in both)
    layers = [number for number, count in enumerate(counts) for _ in range(count)]
    order = [2 * number for number in layers] + [2 * number + 1 for number in reversed(layers)]
    return Program(tuple(graphs), tuple(order), random_.choice([2, 10, 50]), random_.random() < 0.6)


def graph(random_: random.Random, kernels_us: float, gpu_us: float, slower: list[float]) -> Times:
    graph_us = min(kernels_us * 0.9, random_.uniform(15, 80))
    return Times(kernels_us, graph_us, gpu_us, gpu_us * random_.choice(slower))


def usual(random_: random.Random) -> Program:
    """Draw a program whose GRAPHs take as long on the GPU as KERNELS do, within 1 %, as nearly all do."""
    program = random_.choice([inference, training])(random_)
    graphs = [
        Times(each.kernels_us, each.graph_us, each.gpu_us, each.gpu_us * random_.uniform(0.99, 1.01))
        for each in program.graphs
    ]
    return Program(tuple(graphs), program.order, program.gap_us, program.synchronizes)


# --- choices ---


class Relocating:
    """A graph that is recorded at once, and never refuses."""

    refusal = why_refused = None
    refused_for_good = is_awaited = False
    not_now: str | None = None
    run_kernels_or_record = None
    one_time_work = replayed = 0
    recording_us = 0.0

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run

    def why_not(self, inputs: list[Any]) -> str | None:
        return self.not_now

    @property
    def run(self) -> Relocating:
        return self

    def __call__(self, inputs: list[Any]) -> None:
        self.replayed += 1
        self._run()

    def empty_cache(self, *, workspaces: bool = False) -> None:
        pass

    def trim(self) -> None:
        pass

    def close(self) -> None:
        pass


def candidates(times: Times, machine: Machine, noise: Noise) -> Candidates:
    def run(way: Deployment) -> None:
        times.run(machine, way, *noise(machine))

    return Candidates(lambda _: run(KERNELS), 0, Relocating(lambda: run(GRAPH)))


def chosen(program: Program, noise: Noise) -> tuple[Ways, bool]:
    """Return what the trials of a program decide, and whether all of that is for good."""
    found: dict[str, Deployment] = {}

    def deploy(digest: str, candidates: Candidates, deployment: Deployment) -> None:
        found[digest] = deployment

    with pytest.MonkeyPatch.context() as patch:
        machine, host, calls = Machine(patch), Host(), []
        digests = [f"{number:064x}" for number in range(len(program.graphs))]
        for digest, times in zip(digests, program.graphs, strict=True):
            ways, noted = candidates(times, machine, noise), functools.partial(deploy, digest)
            calls.append(functools.partial(trial_of(host, ways, noted, digest=digest), []))
        steps = 0
        while len(found) < len(calls):
            program.step(machine, calls)
            steps += 1
            assert steps < MOST_STEPS
    assert host.report.failures == {}
    return tuple(found[digest] for digest in digests), all(each.decision.final for each in host.results)


@dataclass(frozen=True)
class Outcome:
    """What a step of a program takes: as was chosen, with all graphs as GRAPH, and with none; and whether the choice is for good."""

    seed: int
    ways: Ways
    is_final: bool
    chosen_us: float
    all_us: float
    none_us: float

    @property
    def ratio(self) -> float:
        """Of the choice to the better of all and none."""
        return self.chosen_us / min(self.all_us, self.none_us)


def outcome(draw: Callable[[random.Random], Program], noise: str, seed: int) -> Outcome:
    program = draw(random.Random(seed))
    ways, is_final = chosen(program, NOISES[noise](random.Random(f"{noise} {seed}")))
    count = len(program.graphs)
    found = {each: program.step_us(each) for each in {ways, (KERNELS,) * count, (GRAPH,) * count}}
    return Outcome(seed, ways, is_final, found[ways], found[(GRAPH,) * count], found[(KERNELS,) * count])


def worse(outcomes: Sequence[Outcome], limit: float) -> dict[int, float]:
    return {each.seed: round(each.ratio, 3) for each in outcomes if each.ratio > limit}


QUIET, *NOISY = NOISES


@pytest.fixture(scope="module")
def outcomes() -> list[Outcome]:
    return [outcome(inference, QUIET, seed) for seed in range(PROGRAMS)]


@pytest.fixture(scope="module")
def trainings() -> list[Outcome]:
    return [outcome(training, QUIET, seed) for seed in range(PROGRAMS)]


@pytest.mark.slow
def test_the_choice_is_hardly_ever_worse_than_all_or_none(
    outcomes: list[Outcome], trainings: list[Outcome]
) -> None:
    assert len(worse(outcomes, 1.05)) <= 1, worse(outcomes, 1.05)
    assert len(worse(trainings, 1.05)) <= 3, worse(trainings, 1.05)
    assert len(worse(outcomes, 1.02)) <= 10, worse(outcomes, 1.02)
    assert len(worse(trainings, 1.02)) <= 10, worse(trainings, 1.02)
    assert max(each.ratio for each in outcomes + trainings) < 1.15


@pytest.mark.slow
def test_the_choice_often_beats_both(outcomes: list[Outcome]) -> None:
    assert sum(each.ratio < 0.98 for each in outcomes) >= 35


@pytest.mark.slow
def test_the_choice_is_faster_on_average(outcomes: list[Outcome], trainings: list[Outcome]) -> None:
    assert statistics.fmean(each.ratio for each in outcomes) < 0.993, "than the better of the two"
    assert statistics.fmean(each.ratio for each in trainings) < 0.995
    assert statistics.fmean(each.chosen_us / each.all_us for each in outcomes) < 0.95
    assert statistics.fmean(each.chosen_us / each.none_us for each in outcomes) < 0.75


@pytest.mark.parametrize("noise", NOISES)
def test_where_a_graph_takes_no_longer_on_the_gpu_noise_makes_no_program_slow(noise: str) -> None:
    found = [outcome(usual, noise, seed) for seed in range(NOISY_PROGRAMS)]

    final = [each for each in found if each.is_final]
    assert len(worse(found, 1.05)) <= 3, worse(found, 1.05)
    assert len(worse(final, 1.05)) <= 1, worse(final, 1.05)
    assert statistics.fmean(each.ratio for each in found) < 1.005
    assert statistics.fmean(each.chosen_us / each.none_us for each in found) < 0.8


@pytest.mark.parametrize("noise", NOISY)
def test_noise_makes_hardly_any_choice_bad_and_of_those_most_provisional(noise: str) -> None:
    found = [outcome(inference, noise, seed) for seed in range(NOISY_PROGRAMS)]

    assert len(worse(found, 1.05)) <= 8, worse(found, 1.05)
    assert len(worse([each for each in found if each.is_final], 1.05)) <= 4
    assert statistics.fmean(each.ratio for each in found) < 1.0


@pytest.mark.parametrize(
    "seed",
    [
        273,  # a heavy graph with 19 small ones behind it, which take longer on the host
        278,  # a graph of 130 us on the host and 172 on the GPU, in a step of 505 us on the host and 232 on the GPU
        398,  # a small graph after a heavy one, and the host is what the step waits for
        102,  # 24 calls of 65 us on the host as KERNELS and 43 as GRAPH, of 62 and 86 on the GPU: 2.85 ms and 2.37
    ],
)
def test_a_step_that_the_host_bounds_is_chosen_by_the_hosts_time(seed: int) -> None:
    assert outcome(inference, QUIET, seed).ratio < 1.01
