"""How many sizes of a callable are remembered, and which one is forgotten for a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.recording import recordings, recordings_by_size
from pygraphd.client.recording.size_slot import STALE_CALLS
from tests.support.recording_case import Case, Operations, add, case

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.recording.size_slot import Size

__all__ = ["case"]  # fixtures

pytestmark = pytest.mark.torch


@pytest.fixture
def call(case: Case) -> Callable[..., None]:
    """Calls of a callable at some sizes, one after the other."""
    run = case.make(lambda operations, inputs: add(operations, inputs[:2]), max_recordings=64)

    def call(*sizes: int) -> None:
        for size in sizes:
            assert run([case.floats(size), case.floats(2), size])[0].tolist() == [size + 2]

    call.run = run  # type: ignore[attr-defined]
    return call


def recorded(call: Any) -> list[Size]:
    return [slot.size for slot in call.run._recorded()]


def test_a_size_that_comes_after_many_is_recorded_and_recorded_ones_stay(case: Case, call: Any) -> None:
    """As a sequence length that stays, after a warm-up of many lengths."""
    call(0, 0, 0)
    call(*range(1, 400))
    assert len(call.run._slots) == 256
    assert recorded(call) == [(0,)]
    case.report.fallbacks.clear()
    call(*[1000] * 5, 0)

    case.expect(captured=2)
    assert recorded(call) == [(1000,), (0,)]
    assert len(call.run._slots) == 256
    assert case.report.fallbacks == {recordings.NOT_YET: 1}
    assert call.run.replays[0].counts.replays == 4


def test_of_more_sizes_in_turns_than_are_remembered_those_that_are_remembered_are_recorded(
    case: Case, call: Any
) -> None:
    """As lengths of texts in the same order in each epoch."""
    for _ in range(3):
        call(*range(300))

    case.expect(captured=recordings_by_size.CAPTURES_OF_EACH * 64)
    assert len(recorded(call)) == 64


def test_sizes_that_take_turns_from_now_on_are_recorded_once_the_others_are_long_gone(
    case: Case, call: Any
) -> None:
    call(*range(256))
    turns = 0
    while len(recorded(call)) < 3 and turns < 1000:
        call(1000, 1001, 1002)
        turns += 1

    assert recorded(call) == [(1000,), (1001,), (1002,)]
    assert turns == pytest.approx((STALE_CALLS - 1) * 256 / 3, abs=10)
    case.expect(captured=3)


def test_a_size_that_was_refused_for_long_is_remembered(case: Case) -> None:
    """One whose results were wrong must not be recorded once more as a new one."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        extra = case.floats(1, 1) if operations is case.recorder.as_kernels else case.floats(1, 2)
        return (operations.add(inputs[0], extra if inputs[1] == 3 else inputs[0]),)

    run = case.make(body)
    for _ in range(3):
        run([case.floats(3, 3), 3])
    spent = run.recording_us
    assert spent > 0
    for size in range(10, 200):
        run([case.floats(1, 1), size])
    captures = case.recorder.captures

    for _ in range(3):
        assert run([case.floats(3, 3), 3])[0].tolist() == [4, 4]
    assert (case.recorder.captures, len(run._slots)) == (captures, recordings_by_size.MAX_SIZE_SLOTS)
    assert run.refused_for_good
    assert run.recording_us == spent


def test_what_recording_a_size_took_counts_when_the_size_is_forgotten(case: Case) -> None:
    run = case.make(add)
    for size in (1, 1):
        run([case.floats(1), case.floats(2), size])
    run._drop(run._slots[1,])
    spent = run.recording_us
    for size in range(2, 500):
        run([case.floats(1), case.floats(2), size])

    assert (1,) not in run._slots
    assert run.recording_us == spent > 0


def test_ranks_forget_no_size(case: Case) -> None:
    """They record at the same call of a size, and what each has recorded or refused may differ."""
    run = case.made(add, GraphFacts(collectives=(frozenset({("all_reduce", "0")}),)))
    for size in range(100):
        run([case.floats(1), case.floats(2), size])

    assert list(run._slots) == [(size,) for size in range(recordings_by_size.MAX_SIZE_SLOTS)]
    assert case.report.fallbacks[recordings_by_size.TOO_MANY_SIZES] == 100 - recordings_by_size.MAX_SIZE_SLOTS


def test_a_replay_of_a_size_that_was_forgotten_meanwhile_runs_as_kernels(case: Case) -> None:
    run = case.make(add)

    assert run.replay_failed([case.floats(1), case.floats(2), 7], ValueError("in a replay"))[0].tolist() == [
        3
    ]

    assert case.report.fallbacks == {"a replay failed: ValueError": 1}
