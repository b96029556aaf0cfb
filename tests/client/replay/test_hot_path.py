"""A call in steady state: how many Python frames of ours it takes, and what becomes of a call that the compiled helper cannot serve."""

from __future__ import annotations

import shutil
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import pygraphd.client
from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend.errors import IN_A_CAPTURE, LayoutMismatch
from pygraphd.client.dispatch.shapes import Bounds, DecidedSize, ShapeDispatcher
from pygraphd.client.dispatch.slot import Slot
from pygraphd.client.recording import recordings
from pygraphd.client.recording.result_check import CALLS_PER_POLL
from tests.support import emulator
from tests.support.recording_case import Case, Operations, accumulate, add

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.emulator import Allocator, Emulator

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

OURS = str(Path(pygraphd.client.__file__).parent)
ALLOCATOR = str(Path(emulator.__file__))
MOST_FRAMES = 2
SAVED = 60
"""Outputs of the forward."""


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Iterator[Case]:
    case = Case(emulator, allocator)
    yield case
    case.close()


def frames_of(call: Callable[[], Any]) -> list[str]:
    """Return the functions of ours that a call runs in Python, in their order, but for those that the emulated allocator calls."""
    seen: list[str] = []

    def profile(frame: Any, event: str, _argument: Any) -> None:
        is_ours = event == "call" and frame.f_code.co_filename.startswith(OURS)
        if is_ours and frame.f_back.f_code.co_filename != ALLOCATOR:
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def doubled(operations: Operations, inputs: list[Any]) -> Any:
    """Return each tensor among the inputs, doubled."""
    return tuple([operations.add(each, each) for each in inputs if isinstance(each, torch.Tensor)])


def accumulated(operations: Operations, inputs: list[Any]) -> Any:
    """Add the second input to the first one, in place, and return the first one."""
    operations.accumulate(inputs[0], inputs[1])
    return (inputs[0],)


FACTS = {
    "inference": GraphFacts(),
    "forward": GraphFacts(saved=frozenset(range(1, SAVED))),
    "backward": GraphFacts(frozenset({1})),
}


@pytest.mark.parametrize("kind", FACTS)
def test_a_call_in_steady_state_takes_few_frames(case: Case, kind: str) -> None:
    made = case.made(doubled, FACTS[kind])
    slot = Slot(made.run)
    tensors = [case.floats(i, i) for i in range(3 if kind == "inference" else SAVED)]
    for _ in range(4):
        slot(list(tensors))
    inputs = list(tensors)
    outputs: list[Any] = []

    frames = frames_of(lambda: outputs.extend(slot(inputs)))

    assert len(frames) <= MOST_FRAMES, frames
    assert [each.tolist() for each in outputs] == [[2.0 * i] * 2 for i in range(len(tensors))]
    assert inputs == []
    assert made.replays[0].counts.fused >= 2


@pytest.mark.parametrize("alternate", [False, True])
def test_a_call_with_dynamic_sizes_takes_few_frames(case: Case, *, alternate: bool) -> None:
    """Where the size differs from that of the call before, one of them notes that."""
    made = case.made(doubled, GraphFacts())

    def decide(sizes: tuple[int, ...]) -> DecidedSize:
        return DecidedSize(Slot(made.run), lambda: None)

    run_kernels = case.recorder.compiled(doubled)
    slot = Slot(
        ShapeDispatcher(run_kernels, Bounds(calls=1), lambda: None, decide, lambda: run_kernels, case.report)
    )
    calls = [[size, *[case.floats(i, i) for i in range(size)]] for size in (2, 5)]
    for each in calls * 4:
        slot(list(each))
    if not alternate:
        slot(list(calls[0]))

    frames = frames_of(lambda: slot(list(calls[0])))

    assert len(frames) <= MOST_FRAMES, frames
    assert sum(replay.counts.fused for replay in made.replays) >= 4


# --- calls that leave the fast path -----------------------------------------------------------------------------------


def recorded(case: Case, body: Any = add, **facts: Any) -> tuple[Any, Callable[[list[Any]], Any]]:
    """Return recordings of which there is one, and what is called."""
    made = case.made(body, GraphFacts(**facts))
    run = made.run
    for i in range(3):
        run([case.floats(i), case.floats(1)])
    assert (len(made.replays), made.replays[0].counts.fused) == (1, 1)
    case.report.fallbacks.clear()
    return made, run


def test_within_a_capture_of_the_users_it_runs_as_kernels(case: Case) -> None:
    made, run = recorded(case)
    case.recorder.capturing = True

    assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    assert case.report.fallbacks == {IN_A_CAPTURE: 1}
    assert made.replays[0].counts.fused == 1


def test_what_asking_for_a_capture_raises_is_the_users(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _, run = recorded(case)

    def in_capture() -> bool:
        raise RuntimeError("of an earlier call")

    monkeypatch.setattr(case.recorder, "in_capture", in_capture)
    case.emulator.capturing(-1)
    with pytest.raises(RuntimeError, match="of an earlier call"):
        run([case.floats(1), case.floats(2)])


def test_another_device_may_be_the_current_one(case: Case) -> None:
    made, run = recorded(case)
    case.recorder.current_device = 1

    assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    assert (case.recorder.current_device, made.replays[0].counts.fused) == (1, 2)
    assert not case.report.fallbacks


def test_a_hook_that_sees_what_is_saved_has_it_run_as_kernels(case: Case) -> None:
    _, run = recorded(case, doubled, saved=frozenset({0, 1}))

    with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [2]

    assert case.report.fallbacks == {LayoutMismatch.HOOKS.value: 1}


def test_what_does_not_fit_runs_as_kernels_and_is_recorded_when_it_comes_again(case: Case) -> None:
    made, run = recorded(case)
    storage = case.allocator.tensor(torch.arange(8.0))

    results = [run([storage[1:2], storage[5:6]])[0].item() for _ in range(6)]

    assert results == [6.0] * 6
    assert len(made.replays) == 1
    assert case.report.fallbacks.total() == 1
    assert made.replays[0].counts.fused >= 2


def test_inputs_are_as_they_were_if_a_launch_fails_and_the_recording_goes(case: Case) -> None:
    made, run = recorded(case, accumulate)
    total = case.floats(1)
    case.emulator.fail_at(1 + made.replays[0].executables)

    for _ in range(2):
        run([total, case.floats(1)])
        case.emulator.fail_at(0)

    assert total.tolist() == [3]
    assert len(made.replays) == 0
    assert [*case.report.fallbacks.values()] == [2]


def test_without_memory_it_runs_as_kernels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made, run = recorded(case)
    original, fails = type(case.allocator).__call__, [True]

    def allocate(*arguments: Any) -> Any:
        if fails.pop() if fails else False:
            raise torch.OutOfMemoryError("as said")
        return original(*arguments)

    inputs = [case.floats(1), case.floats(2)]
    monkeypatch.setattr(type(case.allocator), "__call__", allocate)
    assert run(inputs)[0].tolist() == [3]

    assert case.report.fallbacks == {recordings.NO_MEMORY: 1}
    assert len(made.replays) == 1


def test_an_error_that_nobody_expects_has_the_call_run_as_kernels(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, run = recorded(case)
    inputs, allocate = [case.floats(1), case.floats(2)], type(case.allocator).__call__
    errors = [ValueError("of a test")]

    def allocate_at_last(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return allocate(*arguments)

    monkeypatch.setattr(type(case.allocator), "__call__", allocate_at_last)
    assert run(inputs)[0].tolist() == [3]

    assert case.report.fallbacks == {"a replay failed: ValueError": 1}
    assert len(made.replays) == 1


def test_what_is_no_error_of_ours_is_raised(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made, run = recorded(case)
    inputs = [case.floats(1), case.floats(2)]

    def allocate(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(case.allocator), "__call__", allocate)
        with pytest.raises(KeyboardInterrupt):
            run(inputs)

    assert len(inputs) == 2
    assert run(inputs)[0].tolist() == [3]
    assert len(made.replays) == 1


def test_an_error_after_the_launch_is_raised_and_nothing_runs_twice(case: Case) -> None:
    made, run = recorded(case, accumulated)
    (replay,), total = made.replays, case.floats(1)
    launch, inputs = replay._launch_executable, [total, case.floats(2)]

    def launch_and_lose_inputs(executable: int, stream: int) -> Any:
        launched = launch(executable, stream)
        inputs.clear()  # so that the outputs cannot be made
        return launched

    replay.fused.launch = launch_and_lose_inputs
    with pytest.raises(IndexError):
        run(inputs)

    assert total.tolist() == [3]
    assert case.report.fallbacks == {}


def test_a_recording_that_was_let_go_is_made_anew(case: Case) -> None:
    made, run = recorded(case)
    made._drop(made._slots[()])

    results = [run([case.floats(i), case.floats(1)])[0].item() for i in range(4)]

    assert results == [1, 2, 3, 4]
    assert (len(made.replays), made.replays[0].counts.fused) == (1, 3)


def test_the_recording_that_was_not_used_for_longest_goes_first(case: Case) -> None:
    made = case.make(doubled, max_recordings=2)
    run, calls = made.run, {size: [size, *[case.floats(i) for i in range(size)]] for size in (1, 2, 3)}
    for size in (1, 1, 2, 2, 1, 3, 3):
        run(list(calls[size]))

    assert [len(each.layout.groups) for each in made.replays] == [1, 3]


def test_results_are_looked_at_when_it_is_time(case: Case) -> None:
    made = case.made(add, GraphFacts(), recheck_s=1e-9)
    run = made.run

    results = {run([case.floats(i), case.floats(1)])[0].item() - i for i in range(3 * CALLS_PER_POLL)}

    assert results == {1}
    assert case.report.counts["checked_results"] >= 1
    assert case.report.counts["wrong_results"] == 0


def test_threads_take_turns(case: Case) -> None:
    made, run = recorded(case)
    right: list[bool] = []

    def call(number: int) -> None:
        inputs = [case.floats(number), case.floats(1)]
        right.extend(run(list(inputs))[0].item() == number + 1 for _ in range(300))

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert (len(right), all(right)) == (1200, True)
    assert len(made.replays) == 1
