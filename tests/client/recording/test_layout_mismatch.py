"""Inputs that lie otherwise than when they were recorded: after a few calls a recording allows for all of them."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import LayoutMismatch
from pygraphd.client.recording import budget, comparison, recordings, recordings_by_size, stand_ins
from pygraphd.client.recording.alias_sets import input_groups
from pygraphd.client.recording.size_slot import (
    FIRST_MISMATCHES,
    MISMATCH_FACTOR,
    LayoutConstraints,
    LayoutMismatches,
)
from pygraphd.client.recording.stand_ins import RecordedCall
from pygraphd.client.replay.relocation_table import BLOCK, MAX_ALIGNMENT, alignment
from tests.support.recording_case import Case, add
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.emulator import Allocator, Emulator
    from tests.support.recording_case import Operations

pytestmark = pytest.mark.torch


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Iterator[Case]:
    case = Case(emulator, allocator)
    yield case
    case.close()


def at(case: Case, offset: int) -> torch.Tensor:
    """Return two floats, the second of which is 10 more, so many bytes behind where an allocation begins."""
    base = case.floats(*range(128))
    base[offset // 4 + 1] = offset // 4 + 10
    return base[offset // 4 : offset // 4 + 2]


def call(run: Any, one: torch.Tensor, other: torch.Tensor) -> None:
    right = (one + other).tolist()
    assert run([one, other])[0].tolist() == right


def test_inputs_that_are_aligned_worse_run_as_kernels_until_they_have_come_again(case: Case) -> None:
    run = case.make(add)
    for offset in (0, 0, 0, 16, 64, 0, 16, 48, 128, 0, 240):
        call(run, at(case, offset), at(case, 0))

    case.expect(captured=2)
    assert case.report.fallbacks == {
        recordings.NOT_YET: 1,
        LayoutMismatch.ALIGNMENT.value: FIRST_MISMATCHES - 1,
    }


def test_what_was_aligned_worse_once_is_remembered_when_another_input_is(case: Case) -> None:
    """Each input is aligned well where the other is not."""
    run = case.make(add)
    for i in range(60):
        call(run, at(case, 16 * (i % 2) * (i > 2)), at(case, 16 * ((i + 1) % 2) * (i > 2)))

    case.expect(captured=2)
    assert case.report.fallbacks[LayoutMismatch.ALIGNMENT.value] == FIRST_MISMATCHES - 1


def test_ever_worse_alignment_is_recorded_ever_more_seldom(case: Case) -> None:
    run = case.make(add)
    for offset in (0, 0, *[128] * 5, *[64] * 12, *[32] * 40, *[16] * 200):
        call(run, at(case, offset), at(case, 0))

    # 128: the 2nd mismatch; 64: the 10th; 32: the 42nd; 16: the 170th.
    case.expect(captured=1 + 4)
    assert case.report.fallbacks[LayoutMismatch.ALIGNMENT.value] == 170 - 4


def test_inputs_that_overlapped_and_lie_apart_now(case: Case) -> None:
    run = case.make(add)

    def overlapping(shift: int) -> None:
        base = case.floats(*range(300))
        call(run, base[:80], base[shift : shift + 80])

    for shift in (64, 64, 64, 192, 0, 192, 64, 0, 64, 192, 128):
        overlapping(shift)

    case.expect(captured=2)
    assert case.report.fallbacks == {
        recordings.NOT_YET: 1,
        LayoutMismatch.OVERLAP.value: FIRST_MISMATCHES - 1,
    }


def test_outputs_are_views_of_the_right_inputs_if_these_overlapped_when_recorded(case: Case) -> None:
    """So are gradients of a loss of `a + b`, which autograd gives to a backward as one tensor. No kernel reads them."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        first, second, third = inputs
        views = [torch_private.reinterpret(each, each.dtype, (2, 2), (2, 1), 0) for each in (first, second)]
        return (*views, operations.add(third, third))

    run, third = case.make(body), case.floats(5, 6)
    for i in range(16):
        one = case.floats(1, 2, 3, 4)
        other = one.detach() if i < 3 or i > 13 else case.floats(5, 6, 7, 8)
        views = run([one, other, third])[:2]
        assert [each.data_ptr() for each in views] == [one.data_ptr(), other.data_ptr()]
    case.expect(captured=2)
    assert case.report.fallbacks == {
        recordings.NOT_YET: 1,
        LayoutMismatch.OVERLAP.value: FIRST_MISMATCHES - 1,
    }


def test_inputs_that_overlap_and_are_written_to_are_right_in_a_recording_that_was_made_apart(
    case: Case,
) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0], inputs[1])
        return (operations.add(inputs[0], inputs[1]),)

    run = case.make(body)
    for i in range(12):
        one = case.floats(1, 2)
        other = one if i < 3 or i > 8 else case.floats(3, 4)
        total = one + other
        right = (total + (total if other is one else other)).tolist()

        assert run([one, other])[0].tolist() == right
        assert one.tolist() == total.tolist()
    case.expect(captured=2)


def test_what_is_to_lie_apart_needs_room_for_that(case: Case) -> None:
    def total(operations: Operations, inputs: list[Any]) -> Any:
        for each in inputs[1:]:
            operations.accumulate(inputs[0], each)
        return ()

    run = case.make(total)
    one = case.floats(*range(BLOCK))
    for _ in range(3):
        run([case.floats(*range(BLOCK)), *[one] * 9])
    for _ in range(3):
        inputs = [case.floats(*range(BLOCK)), case.floats(*range(BLOCK)), *[one] * 8]
        case.recorder.free = stand_ins.bytes_to_copy(input_groups(inputs)) + BLOCK
        run(inputs)

    case.expect(captured=1)
    assert case.recorder.captures == 1
    assert case.report.fallbacks[budget.NO_MEMORY_TO_VERIFY] == 1


def test_a_recording_that_cannot_be_made_anew_leaves_the_one_there_is(case: Case) -> None:
    run = case.make(add)
    for _ in range(3):
        call(run, at(case, 0), at(case, 0))
    case.recorder.refuses = "not now"
    for _ in range(4):
        call(run, at(case, 16), at(case, 0))
    call(run, at(case, 0), at(case, 0))

    case.expect(captured=1)
    assert case.report.fallbacks["not now"] == 1
    assert case.report.fallbacks[LayoutMismatch.ALIGNMENT.value] == 3
    assert refusal_of(run) is None


def test_as_many_captures_as_are_allowed_are_made_and_no_more(case: Case) -> None:
    run = case.make(add, max_recordings=1)
    for size in range(recordings_by_size.CAPTURES_OF_EACH):
        for _ in range(2):
            run([case.floats(1, 2), case.floats(3, 4), size])
    assert case.recorder.captures == recordings_by_size.CAPTURES_OF_EACH
    for _ in range(40):
        assert run([at(case, 16), at(case, 0), size])[0].tolist() == [4.0, 24.0]

    assert case.recorder.captures == recordings_by_size.CAPTURES_OF_EACH
    assert case.report.fallbacks[LayoutMismatch.ALIGNMENT.value] == 40


@given(
    st.lists(st.integers(0, 31).map(lambda n: 16 * n), min_size=1, max_size=4),
    st.dictionaries(st.integers(0, 3), st.sampled_from([16, 32, 64, 128])),
    st.booleans(),
)
def test_stand_ins_are_aligned_as_the_inputs_are_or_as_badly_as_they_may_be(
    offsets: list[int], worst: dict[int, int], apart: bool
) -> None:
    room = torch.zeros(8 * BLOCK, dtype=torch.uint8)
    start = -room.data_ptr() % BLOCK
    inputs: list[Any] = [room[start + each : start + each + 8].view(torch.float32) for each in offsets]

    made, places = stand_ins.stand_ins_for(inputs, input_groups(inputs), LayoutConstraints(worst, apart))

    spans = sorted((each.data_ptr(), each.data_ptr() + 8) for each in made)
    if apart:
        assert len(places) == len(inputs)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    for index, (mine, given_input) in enumerate(zip(made, inputs, strict=True)):
        alone = apart or offsets.count(offsets[index]) == 1
        expected = min(
            alignment(given_input.data_ptr()), worst.get(index, MAX_ALIGNMENT) if alone else MAX_ALIGNMENT
        )
        assert alignment(mine.data_ptr()) == expected
        assert comparison.form(mine) == comparison.form(given_input)
    rooms = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in places]
    assert all(any(begin <= start and end <= stop for begin, stop in rooms) for start, end in spans)
    asked: list[int] = []
    driver: Any = None  # no input is large
    call = RecordedCall(
        inputs,
        LayoutConstraints(worst, apart),
        input_groups(inputs),
        driver,
        room.device,
        lambda size, held: asked.append(size - held),
    )
    call.stand_ins()
    assert asked == [sum(each.nbytes for each in places)]


def test_calls_that_do_not_fit_are_recorded_ever_more_seldom() -> None:
    mismatches, inputs = LayoutMismatches(), [3, None]

    due = [call for call in range(1, 600) if mismatches.add(inputs, LayoutMismatch.ALIGNMENT)]

    assert due == [
        sum(FIRST_MISMATCHES * MISMATCH_FACTOR**each for each in range(count)) for count in range(1, 5)
    ]
    assert mismatches.constraints.apart is False


def test_any_order_of_alignments_ends_in_replays(case: Case) -> None:
    order = random.Random(4)
    run = case.make(add)
    for _ in range(400):
        call(run, at(case, 16 * order.randrange(16)), at(case, 16 * order.randrange(16)))
    before = sum(case.report.fallbacks.values())
    for _ in range(100):
        call(run, at(case, 16 * order.randrange(16)), at(case, 16 * order.randrange(16)))

    assert sum(case.report.fallbacks.values()) == before
    assert case.report.counts["captured"] <= 4
