"""A graph that serves is held against KERNELS now and then: one that has become wrong is dropped, and said to be wrong at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend.torch_private import profiling
from pygraphd.client.recording.result_check import CALLS_PER_POLL, CALLS_UNTIL_READ, DIFFERS, SHARE
from pygraphd.schema.reasons import ReasonCode
from tests.support.noise import SIZE, Noise
from tests.support.recording_case import Case
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.client.recording.recordings import Recordings
    from tests.support.emulator import Allocator, Emulator
    from tests.support.recording_case import Operations

pytestmark = pytest.mark.torch

NEXT_CHECK = CALLS_PER_POLL + CALLS_UNTIL_READ + 8
"""Calls within which a graph is checked, and what was found is read."""


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Iterator[Case]:
    case = Case(emulator, allocator)
    yield case
    case.close()


class Constant:
    """Is added to an input; the graph reads it where it lies, and KERNELS elsewhere once it is `moved`."""

    def __init__(self, case: Case) -> None:
        self.values = torch.ones(2)
        self.moved: torch.Tensor | None = None
        self.runs_as_kernels = 0
        self._case = case

    def __call__(self, operations: Operations, inputs: list[Any]) -> Any:
        is_as_kernels = operations is self._case.recorder.as_kernels
        self.runs_as_kernels += is_as_kernels
        constant = self.values if self.moved is None or not is_as_kernels else self.moved
        return (operations.add(inputs[0], constant),)


POLL_S = 100.0
"""Seconds that `CALLS_PER_POLL` calls take by the clock of the checks; a check takes none of it."""


def made(case: Case, body: Any, recheck_s: float = 1e-9, facts: GraphFacts | None = None) -> Recordings:
    run = case.made(body, facts or GraphFacts(), recheck_s=recheck_s)
    run._check._clock = lambda: POLL_S * (sum(each.counts.replays for each in run.replays) // CALLS_PER_POLL)
    run._check._due = recheck_s
    return run


def call(case: Case, run: Recordings, times: int) -> list[float]:
    return [run([case.floats(i, i)])[0][0].item() - i for i in range(times)]


def make_wrong(run: Recordings) -> None:
    """Have the kernels of a recording that was verified compute the first of two elements only, from the next write on."""
    (replay,) = run.replays
    assert replay._executables is not None
    words = replay._executables._parameters.words
    lengths = [index for index, word in enumerate(words) if word == 2]
    assert lengths
    for index in lengths:
        words[index] = 1


def failures(case: Case) -> dict[str, int]:
    found: dict[str, int] = case.report.summary()["failures"]
    return found


def test_a_graph_that_is_right_goes_on(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    body = Constant(case)
    run = made(case, body)

    assert set(call(case, run, 3 * NEXT_CHECK)) == {1.0}

    checked = case.report.counts["checked_results"]
    assert checked >= 3
    assert body.runs_as_kernels == 2 + 2 * checked
    assert (len(run.replays), case.report.counts["wrong_results"], failures(case)) == (1, 0, {})
    assert capsys.readouterr().err == ""


def test_a_graph_that_has_become_wrong_is_dropped_and_said_to_be(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    body = Constant(case)
    run = made(case, body)
    call(case, run, 10)
    body.moved = torch.full((2,), 3.0)

    seen = call(case, run, NEXT_CHECK)

    assert seen[0] == 1.0
    assert seen[-1] == 3.0  # as KERNELS
    reason = f"{DIFFERS} (output 0)"
    assert (len(run.replays), refusal_of(run), run.refused_for_good) == (0, reason, False)
    case.expect(checked_results=1, wrong_results=1, captured=1)
    assert failures(case) == {reason: 1}
    assert case.report.fallbacks[reason] >= 1
    assert capsys.readouterr().err == f"pygraph: {reason}\n"
    assert set(call(case, run, 20)) == {3.0}
    case.expect(captured=1)


def test_an_outcome_is_not_read_while_waits_for_the_gpu_are_errors(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor's own code waits for nothing, so the program would get an exception that is ours."""
    body = Constant(case)
    run = made(case, body)
    call(case, run, 10)
    body.moved = torch.full((2,), 3.0)
    while not case.report.counts["checked_results"]:
        call(case, run, 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 2)

    assert set(call(case, run, 2 * NEXT_CHECK)) == {1.0}
    assert case.report.counts["wrong_results"] == 0

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    assert call(case, run, NEXT_CHECK)[-1] == 3.0
    case.expect(wrong_results=1)


def test_an_outcome_that_another_thread_reads_first_is_read_once(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = Constant(case)
    run = made(case, body)
    while not case.report.counts["checked_results"]:
        call(case, run, 1)
    (replay,), verdicts = run.replays, list[str | None]()

    def meanwhile() -> bool:
        if not verdicts:
            verdicts.append("begun")
            verdicts.append(run._check.verdict(replay))
        return False

    monkeypatch.setattr(torch.cuda, "is_initialized", meanwhile)

    assert run._check.verdict(replay) is None
    assert verdicts == ["begun", None]


def test_a_recording_that_is_made_wrong_after_verification_is_found_and_marked(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(case, Constant(case))
    kept = [case.floats(i, i) for i in range(4)]  # so that later inputs lie elsewhere, and nodes are written
    for each in kept:
        assert run([each])[0].tolist() == [each[0].item() + 1.0] * 2
    make_wrong(run)

    results = [run([each])[0].tolist() for each in [case.floats(i, i) for i in range(NEXT_CHECK)]]

    assert results[0][0] != results[0][1]
    assert results[-1] == [NEXT_CHECK * 1.0] * 2
    assert run.replays == ()
    case.expect(wrong_results=1, captured=1)
    ((size, reason),) = case.wrong
    assert (size, reason.code, DIFFERS in reason.detail) == ((), ReasonCode.RESULTS_DIFFER, True)
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("polls", [0.0, 2.0])
def test_checks_take_a_small_share_of_the_time_of_a_device(case: Case, polls: float) -> None:
    """Those of all its recordings together, by the time that the device took, which the host does not see."""
    case.recorder.marks_apart_ms = 1e3 * SHARE * POLL_S * polls
    bodies = [Constant(case) for _ in range(2)]
    runs = [made(case, each, POLL_S) for each in bodies]
    for _ in range(6 * CALLS_PER_POLL):
        for run in runs:
            call(case, run, 1)

    case.expect(checked_results=3 if polls else 5)
    assert all(each.runs_as_kernels > 2 for each in bodies)  # they take turns


def test_what_is_written_to_an_input_is_checked_and_written_once(case: Case) -> None:
    body = Constant(case)

    def accumulating(operations: Operations, inputs: list[Any]) -> Any:
        made = body(operations, inputs)
        operations.accumulate(inputs[0], body.values)
        return made

    run = made(case, accumulating)
    for i in range(NEXT_CHECK):
        given = case.floats(i, i)
        run([given])
        assert given.tolist() == [i + 1.0] * 2

    case.expect(wrong_results=0)
    assert case.report.counts["checked_results"] >= 1


def test_what_differs_from_itself_is_not_wrong(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = made(case, Noise(5e-4, monkeypatch).adding(case))
    for _ in range(3 * NEXT_CHECK):
        run([case.floats(*[1.0] * SIZE)])

    case.expect(wrong_results=0)
    assert case.report.counts["checked_results"] >= 2
    assert len(run.replays) == 1


@pytest.mark.parametrize(
    "why", ["switched off", "not due", "host code", "random", "memory", "capture", "profile"]
)
def test_a_graph_is_not_checked(case: Case, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body = Constant(case)

    def drawing(operations: Operations, inputs: list[Any]) -> Any:
        return *body(operations, inputs), operations.random()

    recheck_s = {"switched off": 0.0, "not due": 1e9}.get(why, 1e-9)
    facts = GraphFacts(is_repeatable=why != "host code")
    run = made(case, drawing if why == "random" else body, recheck_s, facts)
    call(case, run, 3)
    if why == "memory":
        case.recorder.free = 1000
    case.recorder.refuses = "busy" if why == "capture" else None
    monkeypatch.setitem(profiling._profiles.flags, profiling._READY, why == "profile")

    call(case, run, 2 * NEXT_CHECK)

    case.expect(checked_results=0, captured=1)
    assert body.runs_as_kernels == 2


def test_an_error_of_ours_costs_the_check_and_not_the_call(case: Case) -> None:
    body = Constant(case)
    run = made(case, body)
    call(case, run, 3)

    def failing(operations: Operations, inputs: list[Any]) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run._check._run_kernels = case.recorder.compiled(failing)
    assert set(call(case, run, NEXT_CHECK)) == {1.0}

    assert failures(case) == {"checking results: OutOfMemoryError": 1}
    assert len(run.replays) == 1
