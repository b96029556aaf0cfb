"""Whose host time counts, in programs that are played on two clocks: the host's, and that of a GPU with a queue."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.timeline import MAX_ENTRIES, MAX_KEPT, MAX_RUN_US, UNCHANGED, Entry, Run, Timeline
from pygraphd.schema.messages import Deployment

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
STREAM = (0, 0)
BLOCK = 5


@dataclass(frozen=True)
class Event:
    """A point in the GPU's time."""

    at_us: float

    def elapsed_time(self, end: Event, /) -> float:
        return (end.at_us - self.at_us) / 1e3


class Machine:
    """A host, and a GPU that works through its queue."""

    host_us = 0.0
    free_us = 0.0


@dataclass(frozen=True)
class Call:
    """A call, of which the GPU is done at some time, or never."""

    entry: Entry
    begin: Event
    done_us: float = 0.0
    machine: Machine = field(default_factory=Machine)

    def is_done(self) -> bool:
        return self.done_us <= self.machine.host_us

    def read(self, run: Run) -> None:
        assert run.base is not None
        reached_us = run.base.elapsed_time(self.begin) * 1e3
        self.entry.lead_us = reached_us - (self.entry.began_us - run.first.began_us)


@dataclass(frozen=True)
class Graph:
    """What calls of one region take: on the host by deployment, on the GPU in any, and on the host between calls."""

    launch_us: float
    relocate_us: float
    span_us: float
    number: int = 1
    gap_us: float = 10.0


class Program:
    """Calls of regions as they come, and the user's synchronisations."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.entries: list[Entry] = []
        self._machine = Machine()

    def call(self, graph: Graph, deployment: Deployment, *, known: bool = True) -> None:
        machine = self._machine
        host_us = graph.launch_us if deployment is KERNELS else graph.relocate_us
        reached_us = max(machine.free_us, machine.host_us)
        idle, apart = machine.free_us <= machine.host_us + host_us, self.timeline.is_done(STREAM)
        entry = Entry(graph.number, deployment, True, idle, machine.host_us, host_us, graph.span_us, apart)
        machine.free_us = max(reached_us + graph.span_us, machine.host_us + host_us)
        machine.host_us += host_us
        done_us = machine.free_us if known else math.inf
        self.timeline.add(Call(entry, Event(reached_us), done_us, machine), STREAM)
        machine.host_us += graph.gap_us
        self.entries.append(entry)

    def compute(self, host_us: float, gpu_us: float) -> None:
        """Do what is not compiled."""
        machine = self._machine
        begun_us = max(machine.free_us, machine.host_us)
        machine.host_us += host_us
        machine.free_us = max(begun_us + gpu_us, machine.host_us)

    def free_us(self) -> float:
        return self._machine.free_us

    def synchronize(self) -> None:
        self.wait_until(self._machine.free_us)

    def wait_until(self, us: float) -> None:
        self._machine.host_us = max(self._machine.host_us, us)

    def wait(self, us: float) -> None:
        self._machine.host_us += us

    def exposed(self, graph: Graph) -> float:
        """Return the share of a graph's calls whose host time counts."""
        mine = [entry for entry in self.entries if entry.region == graph.number]
        self.timeline.collect()
        self.timeline.expose(mine)
        return statistics.fmean(entry.exposed is not False for entry in mine)


def by_turns(calls: int) -> Deployment:
    """Return the deployment of the next call of a region in blocks of A B B A."""
    return (GRAPH, KERNELS, KERNELS, GRAPH)[calls // BLOCK % 4]


HEAVY = Graph(100, 30, 2_000, number=1)
SMALL = Graph(120, 30, 15, number=2, gap_us=50)


def heavy_then_small(program: Program, steps: int, small: int, *, synchronized: bool) -> None:
    calls = 0
    for step in range(steps):
        program.call(HEAVY, by_turns(step))
        for _ in range(small):
            program.call(SMALL, by_turns(calls))
            calls += 1
        if synchronized:
            program.synchronize()


@pytest.mark.parametrize("synchronized", [True, False])
def test_a_queue_that_launches_would_empty_hides_nothing(synchronized: bool) -> None:
    """While half of the small graphs are captured, the heavy one keeps the GPU busy for all of them."""
    program = Program()
    heavy_then_small(program, 20, 14, synchronized=synchronized)

    assert not any(entry.idle for entry in program.entries if entry.region == SMALL.number)
    assert program.exposed(SMALL) > 0.7


@pytest.mark.parametrize("synchronized", [True, False])
def test_a_gpu_that_is_never_done_hides_the_host(synchronized: bool) -> None:
    program = Program()
    heavy_then_small(program, 20, 6, synchronized=synchronized)

    assert program.exposed(SMALL) == 0
    assert program.exposed(HEAVY) == (1 if synchronized else 1 / 20)  # it comes first


def test_an_idle_gpu_exposes_every_call() -> None:
    program = Program()
    for call in range(40):
        program.call(SMALL, by_turns(call))

    assert program.exposed(SMALL) == 1


def test_one_graph_in_a_loop_is_exposed_though_captured_calls_run_ahead() -> None:
    """Ten calls to a step, each of 530 us by launching and 340 on the GPU: only launching leaves the GPU idle."""
    graph, program = Graph(530, 60, 340), Program()
    calls = 0
    for _ in range(6):
        for _ in range(10):
            program.call(graph, by_turns(calls))
            calls += 1
        program.synchronize()

    assert statistics.fmean(entry.idle for entry in program.entries) < 0.5
    assert program.exposed(graph) > 0.9


def test_waiting_for_data_with_work_in_the_queue_costs_nothing() -> None:
    program = Program()
    for step in range(10):
        program.call(HEAVY, by_turns(step))
        program.wait(1_500)
        program.call(SMALL, by_turns(step))
        program.synchronize()

    assert program.exposed(SMALL) == 0


def test_calls_that_the_gpu_has_not_come_to_are_not_judged_by() -> None:
    program = Program()
    program.call(HEAVY, GRAPH)
    program.call(SMALL, KERNELS, known=False)
    program.synchronize()

    program.exposed(SMALL)
    assert [entry.exposed for entry in program.entries] == [True, False]


def test_streams_are_apart() -> None:
    timeline = Timeline()
    first = Call(Entry(1, KERNELS, True, True, 0.0), Event(0.0), math.inf)
    other = Call(Entry(2, KERNELS, True, False, 1.0), Event(0.0))

    assert timeline.add(first, (0, 7)) is not timeline.add(other, (0, 8))
    timeline.collect()
    assert (first.entry.lead_us, other.entry.lead_us) == (None, 0), "one does not wait for the other"


@pytest.mark.parametrize(("calls", "apart_us"), [(MAX_ENTRIES + 1, 1.0), (2, MAX_RUN_US)])
def test_a_run_has_an_end_although_the_gpu_is_never_idle(calls: int, apart_us: float) -> None:
    timeline = Timeline()
    runs = [
        timeline.add(Call(Entry(1, KERNELS, True, False, number * apart_us), Event(0.0)), STREAM)
        for number in range(calls)
    ]

    assert runs[-1] is not runs[0]
    assert runs[-2] is runs[0]


def test_events_and_calls_are_not_kept_for_ever() -> None:
    timeline = Timeline()
    runs = []
    for number in range(MAX_KEPT + 10):
        runs.append(timeline.add(Call(Entry(1, KERNELS, True, True, float(number)), Event(0.0)), STREAM))
        timeline.collect()

    assert timeline.kept == MAX_KEPT
    assert {run.base for run in runs[:-1]} == {None}
    assert runs[-1].base is not None


def test_calls_that_are_not_kept_any_more_do_not_have_all_others_looked_at_by_each_region_that_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a thousand regions, deciding took a minute of the host's time."""
    looks: list[Run] = []
    timeline, entries = Timeline(), []
    for number in range(MAX_KEPT + 2_000):
        entries.append(Entry(number % 1_000, KERNELS, True, True, float(number)))
        timeline.add(Call(entries[-1], Event(0.0)), STREAM)
    timeline.collect()
    monkeypatch.setattr(Run, "expose", lambda run, *_: looks.append(run))
    for region in range(20):
        timeline.expose([entry for entry in entries[:2_000] if entry.region == region])

    assert len(looks) <= MAX_KEPT, "once"


def test_what_has_hardly_changed_is_not_looked_at_anew() -> None:
    program = Program()
    for _ in range(2 * UNCHANGED):
        program.call(SMALL, KERNELS)
    assert program.exposed(SMALL) == 1
    for entry in program.entries:
        entry.exposed = False

    program.call(SMALL, KERNELS)
    assert program.exposed(SMALL) == 1 / len(program.entries)
    for _ in range(3):
        program.call(SMALL, KERNELS)
    assert program.exposed(SMALL) == 1


def test_a_graph_that_comes_late_is_looked_at_however_many_there_were() -> None:
    program = Program()
    for _ in range(1_000):
        program.call(SMALL, KERNELS)
    program.exposed(SMALL)

    behind = Graph(100, 30, 15, number=3)
    for _ in range(20):
        program.call(HEAVY, KERNELS)
        program.call(behind, KERNELS)
        program.synchronize()
    assert program.exposed(behind) == 0


def test_the_wait_for_a_result_is_no_work_of_the_hosts() -> None:
    """What is not compiled is queued before the graph is called, so that the queue is never found empty."""
    program, graph = Program(), Graph(500, 60, 340)
    for step in range(40):
        program.compute(30, 900)
        program.call(graph, by_turns(step))
        program.synchronize()
        program.wait(200)

    assert program.exposed(graph) == 0
    assert {entry.cost_us for entry in program.entries} == {graph.span_us}


def test_a_host_that_waits_for_an_earlier_step_would_wait_less() -> None:
    program, graph, done = Program(), Graph(500, 60, 2_000), [0.0, 0.0]
    for step in range(40):
        program.wait_until(done[step])
        program.call(graph, by_turns(step))
        done.append(program.free_us())

    assert program.exposed(graph) < 0.1
    assert statistics.median(entry.cost_us for entry in program.entries) == graph.span_us


def test_the_host_time_of_later_calls_hides_a_graph_in_a_step_that_the_host_bounds() -> None:
    """Captured, it saves 100 us on the host, and takes as long on the GPU as launched; the GPU has done it while later calls are made."""
    program, large, small = Program(), Graph(130, 30, 170, number=1, gap_us=50), Graph(220, 55, 13, number=2)
    for step in range(20):
        for _ in range(4):
            program.call(small, by_turns(step))
        program.call(large, by_turns(step))

    assert program.exposed(large) == 1
    costs = {
        deployment: statistics.median(
            entry.cost_us
            for entry in program.entries
            if (entry.region, entry.deployment) == (large.number, deployment)
        )
        for deployment in (KERNELS, GRAPH)
    }
    assert costs == {KERNELS: 130, GRAPH: 30}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), min_size=1, max_size=60),
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=4, max_size=4),
)
def test_what_an_idle_gpu_meets_is_exposed_and_so_is_all_before_it_in_the_run(
    calls: list[tuple[int, int, bool]], times: list[tuple[int, int]]
) -> None:
    graphs = [Graph(launch, launch / 4, span, number) for number, (launch, span) in enumerate(times)]
    program = Program()
    for number, turn, synchronizes in calls:
        program.call(graphs[number], (KERNELS, GRAPH, KERNELS)[turn])
        if synchronizes:
            program.synchronize()

    program.synchronize()
    for graph in graphs:
        if any(entry.region == graph.number for entry in program.entries):
            program.exposed(graph)
    assert all(entry.exposed for entry in program.entries if entry.idle)
    for before, entry in zip(program.entries, program.entries[1:], strict=False):
        assert before.exposed or not entry.exposed or entry.idle or entry.apart
