"""What cannot be captured, now or for good, runs as KERNELS with its reason."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import NotRelocatableError
from pygraphd.client.recording import budget, builder, pipeline, recordings, recordings_by_size
from pygraphd.client.recording.device_waits import GPU_WAITS
from pygraphd.client.replay.relocation_table import BLOCK, Share
from pygraphd.client.replay.stream_affinity import OTHER_STREAM
from tests.support.recording_case import Case, Operations, Recording, RngCursor, add, case, is_transient
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


__all__ = ["case"]  # fixtures

pytestmark = pytest.mark.torch

MAPS = [torch_private.PartitionMap((0, 1), ((0,),))] * 2


def test_what_cannot_be_captured_runs_as_kernels_with_its_reason(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.as_kernels:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for _ in range(4):
        assert run([case.floats(1, 1)])[0].tolist() == [2, 2]

    reason = "it cannot be captured: operation not permitted when stream is capturing"
    assert case.report.fallbacks == {recordings.NOT_YET: 1, reason: 3}
    assert case.recorder.captures == 1
    assert case.report.recording_ms > 0


@pytest.mark.parametrize("times", [1, pipeline.MAX_RETRIES, 50])
def test_a_capture_that_another_thread_has_ended_is_tried_again_a_few_times(case: Case, times: int) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.as_kernels and case.recorder.captures <= times:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture\nand more"
            )
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for _ in range(60):
        assert run([case.floats(1, 1)])[0].tolist() == [2, 2]

    lasts = times > pipeline.MAX_RETRIES
    failed = pipeline.MAX_RETRIES + 1 if lasts else times
    assert case.recorder.captures == (failed if lasts else failed + 1)
    assert case.report.fallbacks == {recordings.NOT_YET: 1, pipeline.INTERRUPTED: 59 if lasts else times}
    assert (refusal_of(run), run.refused_for_good) == (pipeline.INTERRUPTED if lasts else None, False)


def test_what_cannot_be_captured_in_a_new_thread_is_tried_again_there(case: Case) -> None:
    """As what a library makes at its first call in a thread cannot be made within a capture."""
    warm = set[int]()

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.as_kernels and threading.get_ident() not in warm:
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")
        warm.add(threading.get_ident())
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    run([case.floats(1)])
    results: list[list[float]] = []
    thread = threading.Thread(
        target=lambda: results.extend(run([case.floats(each)])[0].tolist() for each in (2, 3, 4))
    )
    thread.start()
    thread.join()

    assert results == [[4], [6], [8]]
    assert case.report.fallbacks == {recordings.NOT_YET: 1, pipeline.NEW_THREAD: 1}
    assert (case.report.counts["captured"], refusal_of(run)) == (1, None)


def test_what_new_threads_cannot_capture_is_not_tried_in_each_of_them(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.as_kernels:
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    run([case.floats(1)])
    for _ in range(20):
        thread = threading.Thread(target=run, args=([case.floats(1)],))
        thread.start()
        thread.join()

    assert case.recorder.captures == pipeline.MAX_RETRIES + 1
    assert (refusal_of(run), run.refused_for_good) == (pipeline.NEW_THREAD, False)


def doubled_up_to_the_end(operations: Operations, inputs: list[Any]) -> Any:
    """Two temporaries of a block each, side by side, and an output."""
    temporary = operations.until(inputs[0])
    return (operations.add(operations.add(temporary, temporary), inputs[0]),)


def test_where_memory_ends_is_found_if_what_follows_it_moves_along(case: Case) -> None:
    run = case.make(doubled_up_to_the_end)

    for value in range(4):
        assert run([case.floats(*[value] * 128)])[0].tolist() == [5 * value] * 128

    case.expect(captured=1)


def test_where_memory_ends_is_not_taken_for_where_other_memory_begins(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in the trial, where it might end just there."""
    monkeypatch.setattr(builder, "SCRATCH", Share(1000, BLOCK))
    run = case.make(doubled_up_to_the_end)

    for value in range(4):
        assert run([case.floats(*[value] * 128)])[0].tolist() == [5 * value] * 128

    case.expect(captured=0)
    assert str(refusal_of(run)).startswith("verification: output 0 differs")


def beyond(operations: Operations, inputs: list[Any]) -> Any:
    """A block of an output, and what a kernel writes behind it if there are more of its input."""
    out = operations.add(inputs[0][:128], inputs[0][:128])
    if isinstance(operations, Recording):
        wider = torch_private.memory_at(out.data_ptr(), 640, out.device).view(torch.float32)
        operations.graph.add(inputs[0], inputs[0], wider)
    return (out,)


def test_what_writes_beyond_its_memory_runs_as_kernels(case: Case) -> None:
    run = case.make(beyond)

    for value in range(4):
        assert run([case.floats(*[value] * 160)])[0].tolist() == [2 * value] * 128

    case.expect(captured=0)
    assert refusal_of(run) == "verification: it writes beyond its memory"


def test_what_the_recorder_refuses_is_recorded_once_that_is_over(case: Case) -> None:
    """As while somebody records the history of the GPU's memory."""
    run = case.make(add)
    case.recorder.refuses = "the history is being recorded"
    for i in range(4):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]
    assert (refusal_of(run), run.refused_for_good) == ("the history is being recorded", False)
    assert is_transient(run)
    assert case.recorder.captures == 1  # it is only asked whether that is over

    case.recorder.refuses = None
    for i in range(3):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]

    assert refusal_of(run) is None
    case.expect(captured=1)
    assert case.report.fallbacks == {recordings.NOT_YET: 1, "the history is being recorded": 3}


def test_nothing_is_recorded_while_the_gpu_may_wait_for_another_rank(case: Case) -> None:
    run = case.make(add)
    case.recorder.may_wait_next = [False, False]
    for i in range(60):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]
        if i == 50:
            assert (case.recorder.captures, is_transient(run)) == (1, False)
        elif i == 40:
            assert (case.recorder.captures, is_transient(run)) == (0, True)

    case.expect(captured=1)
    # At calls 2, 18 and 50 it is asked.
    assert case.report.fallbacks == {recordings.NOT_YET: 1, GPU_WAITS: 48}


def test_what_is_refused_for_now_uses_up_no_captures(case: Case) -> None:
    run = case.make(add)
    case.recorder.refuses = "the history is being recorded"
    for size in range(40):
        for _ in range(2):
            run([case.floats(1), case.floats(2), size])
    case.recorder.refuses = None

    for _ in range(3):
        run([case.floats(1), case.floats(2), 3])

    case.expect(captured=1)


def test_room_that_is_there_again_is_found_after_some_calls(case: Case) -> None:
    run = case.make(add)
    case.recorder.free = 0
    for i in range(3):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]
    assert refusal_of(run) == budget.NO_MEMORY_TO_VERIFY
    assert is_transient(run)
    case.recorder.free = 1 << 40

    for i in range(20):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]

    case.expect(captured=1)
    assert refusal_of(run) is None


def draws_elsewhere(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have another stream draw random numbers, and never come to an end."""

    def learn(cursor: RngCursor, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        cursor.affinity.enter(stream)
        return True

    case.recorder.random_numbers.enter(7)
    monkeypatch.setattr(RngCursor, "learn", learn)


def draw(operations: Operations, _: list[Any]) -> Any:
    return (operations.random(),)


def test_while_another_stream_draws_random_numbers_few_recordings_are_tried(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws_elsewhere(case, monkeypatch)
    run = case.make(draw)

    for _ in range(50):
        run([case.floats(1)])

    assert case.recorder.captures == pipeline.MAX_RETRIES + 1
    assert (refusal_of(run), run.refused_for_good) == (OTHER_STREAM, False)


def test_once_another_stream_has_ended_it_is_recorded(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    draws_elsewhere(case, monkeypatch)
    run = case.make(draw)
    for _ in range(3):
        run([case.floats(1)])
    case.expect(captured=0)
    case.recorder.random_numbers.move(0)

    for _ in range(3):
        run([case.floats(1)])

    case.expect(captured=1)


def test_a_collective_is_not_captured_by_one_rank_alone(case: Case) -> None:
    """NCCL may wait for all ranks within a capture, for ever."""
    reduces = frozenset({("_c10d_functional::all_reduce_", "0")})
    facts = GraphFacts(collectives=(frozenset(), reduces))
    run = case.made(add, facts.of_partition(MAPS, 1))
    for _ in range(4):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    assert (case.recorder.captures, run.refused_for_good) == (0, True)
    assert refusal_of(run) == "it holds a collective (_c10d_functional::all_reduce_)"
    other = case.made(add, facts.of_partition(MAPS, 0))
    for _ in range(4):
        assert other([case.floats(1), case.floats(2)])[0].tolist() == [3]
    assert (case.recorder.captures, refusal_of(other)) == (1, None)


def test_what_was_captured_too_often_says_so(case: Case) -> None:
    run = case.make(add, max_recordings=1)
    for _ in range(6):
        for size in range(3):
            run([case.floats(1), case.floats(2), size])
    run.close()

    assert (refusal_of(run), run.refused_for_good) == (recordings_by_size.TOO_MANY_CAPTURES, False)


def test_a_recorder_that_refuses_gives_the_reason(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotRelocatableError("not today")

    monkeypatch.setattr(case.recorder, "capture", refuse)
    run = case.make(add)
    for _ in range(3):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    assert refusal_of(run) == "not today"
