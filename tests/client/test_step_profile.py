"""One step is found among a program's calls, profiled, and counted; whatever happens, there is an answer and no error."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client import step_profile
from pygraphd.client.report import Report
from pygraphd.client.step_profile import (
    LEAST_CALLS,
    MOST_CALLS_OF_STEP,
    NO_END,
    NO_KERNEL,
    NO_STEP,
    OTHER_PROFILER,
    SETTLED_CALLS,
    TOO_LONG,
    State,
    StepProfile,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

ENOUGH = SETTLED_CALLS + LEAST_CALLS + 10
"""Steps of any program after which there is an answer."""
CALL = {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "args": {"correlation": 8}}
IN_GRAPH = {"cat": "kernel", "args": {"correlation": 8}}
KERNELS = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "args": {"correlation": 9}}
OUTSIDE = {"cat": "kernel", "args": {"correlation": 9}}


class Recorder:
    """A trace that notes which calls fell into the step that is kept."""

    def __init__(self, events: Sequence[dict[str, Any]] = (CALL, IN_GRAPH, KERNELS, OUTSIDE)) -> None:
        self.events = list(events)
        self.reason: str | None = None
        self.fails_at = ""
        self.asked: list[str] = []
        self.log: list[int] = []
        self.kept: list[int] = []

    def why_not(self) -> str | None:
        return self.reason

    def begin(self) -> None:
        self._ask("begin")

    def keep(self) -> None:
        self._ask("keep")
        self.log.clear()

    def end(self) -> list[dict[str, Any]]:
        self.kept = self.log.copy()
        self._ask("end")
        return self.events

    def close(self) -> None:
        self._ask("close")

    def _ask(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails_at:
            raise RuntimeError("CUPTI is not there")


class Program:
    """Steps of some graphs, after each of whose calls `decided` more graphs are decided."""

    def __init__(self, trace: Recorder) -> None:
        self.report = Report()
        self.decided = 0
        self.trace = trace
        self.profile = StepProfile(trace, self.report, lambda: self.decided)

    def run(self, step: Sequence[int], times: int) -> None:
        for _ in range(times):
            for graph in step:
                self.profile.called(graph)
                self.trace.log.append(graph)


def test_the_step_goes_from_one_call_of_the_graph_that_comes_least_often_to_the_next() -> None:
    program = Program(Recorder())

    program.run([7, 1, 1, 1, 2, 2], ENOUGH)

    assert program.trace.asked == ["begin", "keep", "end", "close"]
    assert program.trace.kept == [7, 1, 1, 1, 2, 2]
    assert program.report.summary()["coverage"] == {
        "kernels_in_graphs": 1,
        "kernels": 2,
        "copies_in_graphs": 0,
        "copies": 0,
        "graph_launches": 1,
        "inferred": 0,
    }


def test_nothing_is_profiled_while_graphs_are_being_decided() -> None:
    program = Program(Recorder())

    for _ in range(10):
        program.run([1, 2], SETTLED_CALLS - 1)
        program.decided += 1

    assert program.profile.state is State.SETTLE
    assert program.trace.asked == []


def test_calls_of_other_threads_are_parts_of_a_step() -> None:
    program = Program(Recorder())
    program.run([1], 2)

    backward = threading.Thread(target=program.run, args=([2], 2 * ENOUGH))
    backward.start()
    backward.join()

    assert program.trace.asked == []
    program.run([1], ENOUGH)
    assert program.profile.state is State.DONE


def test_calls_within_a_backward_or_a_capture_are_parts_of_a_step() -> None:
    program = Program(Recorder())
    program.trace.reason = "a capture is under way"
    program.run([1], ENOUGH)
    assert (program.profile.state, program.trace.asked) == (State.SETTLE, [])

    program.trace.reason = None
    program.run([1], ENOUGH)
    assert program.report.coverage is not None
    assert program.report.coverage["kernels"] == 2


def test_an_error_of_the_gpu_in_asking_does_not_reach_the_program() -> None:
    program = Program(Recorder())

    def failing() -> str | None:
        raise RuntimeError("an illegal memory access was encountered")

    program.trace.why_not = failing  # type: ignore[method-assign]
    program.run([1], ENOUGH)
    program.profile.close()

    assert program.report.coverage == {"reason": NO_STEP}


def until(program: Program, state: State) -> None:
    for _ in range(2 * ENOUGH):
        if program.profile.state is state:
            return
        program.run([1], 1)
    raise AssertionError(program.profile.state)


@pytest.mark.parametrize("state", [State.SETTLE, State.COUNT, State.WARM_UP, State.RECORD])
def test_another_profiler_takes_precedence(state: State) -> None:
    program = Program(Recorder())
    until(program, state)

    program.profile.give_way()

    assert program.report.coverage == {"reason": OTHER_PROFILER}
    assert ("close" in program.trace.asked) == (state in {State.WARM_UP, State.RECORD})
    asked = program.trace.asked.copy()
    program.run([1], ENOUGH)
    assert program.trace.asked == asked


@pytest.mark.parametrize("state", [State.WARM_UP, State.RECORD])
def test_what_one_thread_has_begun_is_ended_there(state: State) -> None:
    program = Program(Recorder())
    until(program, state)

    elsewhere = threading.Thread(target=program.profile.close)
    elsewhere.start()
    elsewhere.join()

    assert program.report.coverage == {"reason": NO_STEP}
    assert "close" not in program.trace.asked
    program.run([1], 3)
    assert program.trace.asked.count("close") == 1


def test_ending_it_while_a_call_is_noted_does_no_harm() -> None:
    program = Program(Recorder())
    until(program, State.WAIT)
    program.trace.begin = program.profile.close  # type: ignore[method-assign]

    program.run([1], ENOUGH)

    assert program.profile.state is State.DONE
    assert program.report.coverage is not None
    assert program.report.coverage["kernels"] == 2


@pytest.mark.parametrize("state", [State.WARM_UP, State.RECORD])
@pytest.mark.parametrize("by_time", [False, True])
def test_the_profiler_is_not_on_for_long(
    monkeypatch: pytest.MonkeyPatch, state: State, by_time: bool
) -> None:
    program = Program(Recorder())
    until(program, state)

    if by_time:
        monkeypatch.setattr(step_profile, "MOST_S", -1.0)
    program.run([2], 1 if by_time else MOST_CALLS_OF_STEP)

    assert program.report.coverage == {"reason": TOO_LONG}
    assert program.trace.asked[-1] == "close"


@pytest.mark.parametrize("call", ["begin", "keep", "end"])
def test_an_error_is_the_reason_why_there_is_no_coverage(call: str) -> None:
    program = Program(Recorder())
    program.trace.fails_at = call

    program.run([1], ENOUGH)

    assert program.report.coverage == {"reason": "RuntimeError: CUPTI is not there"}
    assert program.trace.asked[-1] == "close"
    assert program.profile.state is State.DONE


def test_an_error_in_letting_go_is_counted() -> None:
    program = Program(Recorder())
    program.trace.fails_at = "close"

    program.run([1], ENOUGH)

    assert program.report.coverage is not None
    assert program.report.coverage["kernels"] == 2
    assert program.report.failures == {"coverage: RuntimeError": 1}


def test_a_step_without_a_kernel_says_so() -> None:
    program = Program(Recorder(events=[CALL]))

    program.run([1], ENOUGH)

    assert program.report.coverage == {"reason": NO_KERNEL}


def test_a_graph_that_never_comes_back_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_profile, "MOST_CALLS", 50)
    program = Program(Recorder())
    until(program, State.WAIT)

    program.run([3], 100)  # another phase of the program

    assert program.report.coverage == {"reason": NO_END}


def test_a_program_that_ends_before_says_so_and_lets_go() -> None:
    program = Program(Recorder())
    program.run([1], 2)

    program.profile.close()

    assert program.report.coverage == {"reason": NO_STEP}
    assert program.trace.asked == []


def test_layers_that_share_a_graph_are_one_step_with_what_follows_them() -> None:
    program = Program(Recorder())

    program.run([*[1] * 40, 2], ENOUGH)

    assert sorted(program.trace.kept) == [*[1] * 40, 2]


def test_the_summary_of_a_program_that_did_not_ask_says_nothing() -> None:
    assert Report().summary()["coverage"] is None
