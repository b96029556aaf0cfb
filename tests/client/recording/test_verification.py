"""Copies of a call's inputs hold the same bits, share memory as those do, and are aligned as those are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.recording import comparison, verification
from pygraphd.client.recording.alias_sets import input_groups
from pygraphd.client.recording.stand_ins import NO_CONSTRAINTS, RecordedCall, copies_of, stand_ins_for
from pygraphd.client.replay.addresses import extent
from pygraphd.client.replay.layout import Layout
from pygraphd.client.replay.outputs import Outputs
from pygraphd.client.replay.relocation_table import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.torch

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)


@st.composite
def inputs(draw: st.DrawFn) -> list[Any]:
    """Return what a call may be given: tensors and views of few storages, integers, None."""
    bases = [
        torch.randint(0, 2, (draw(st.integers(1, 700)) * 8,), dtype=torch.uint8).view(draw(st.sampled_from(DTYPES)))
        for _ in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    values: list[Any] = []
    for _ in range(draw(st.integers(0, 9))):
        base = draw(st.sampled_from(bases))
        begin = draw(st.integers(0, base.numel() - 1))
        step = draw(st.integers(1, 3))
        view = base[begin::step]
        values.append(
            draw(st.sampled_from([view, view[:0], view.expand(2, -1), base, base.clone(), 5, None]))
        )
    return values


def bits(tensor: torch.Tensor) -> list[int]:
    """Return a tensor's bytes."""
    numbers: list[int] = torch.stack([*tensor.reshape(-1), tensor.new_zeros(())]).view(torch.uint8).tolist()
    return numbers


def shared(values: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Return which of the tensors overlap one another, and how far apart they begin."""
    spans = [
        (index, extent(each)) for index, each in enumerate(values)
        if isinstance(each, torch.Tensor) and each.numel()
    ]  # fmt: skip
    return [
        (one, two, first.start - second.start)
        for one, first in spans
        for two, second in spans
        if one < two and first.start < second.end and second.start < first.end
    ]


@pytest.mark.slow
@settings(deadline=None)
@given(inputs())
def test_copies_are_like_the_inputs(given_inputs: list[Any]) -> None:
    before = [bits(each) if isinstance(each, torch.Tensor) else each for each in given_inputs]

    copies = copies_of(given_inputs, input_groups(given_inputs))

    assert shared(copies) == shared(given_inputs)
    for copy, given_input in zip(copies, given_inputs, strict=True):
        if not isinstance(given_input, torch.Tensor) or not given_input.numel():
            assert copy is given_input
            continue
        assert copy.data_ptr() % BLOCK == given_input.data_ptr() % BLOCK
        assert comparison.form(copy) == comparison.form(given_input)
        assert copy.untyped_storage().data_ptr() != given_input.untyped_storage().data_ptr()
    assert [bits(each) if isinstance(each, torch.Tensor) else each for each in copies] == before
    for copy, given_input in zip(copies, given_inputs, strict=True):
        if copy is not given_input:
            copy.untyped_storage().fill_(1)
    assert [bits(each) if isinstance(each, torch.Tensor) else each for each in given_inputs] == before


def test_copies_of_booleans_that_nobody_has_written_hold_the_same_bits() -> None:
    """Of numbers that are sent from the CPU together only some are written: what lies between may be neither 0 nor 1."""
    of_any_bits = torch.arange(256, dtype=torch.uint8).view(torch.bool)

    (copy,) = copies_of([of_any_bits], input_groups([of_any_bits]))

    assert torch.equal(comparison.bits(copy), comparison.bits(of_any_bits))


@settings(deadline=None)
@given(inputs())
def test_old_memory_holds_indices_from_the_end_and_no_numbers(given_inputs: list[Any]) -> None:
    """What reads an index of no row ends the process by an assertion on the GPU, and what reads a number may be right by chance."""
    stand_ins, places = stand_ins_for(given_inputs, input_groups(given_inputs))
    for each in places:
        each.fill_(verification.OLD_POISON)

    for each in stand_ins:
        if isinstance(each, torch.Tensor) and each.dtype in {torch.float32, torch.bfloat16}:
            assert each.isnan().all()
        elif isinstance(each, torch.Tensor) and each.dtype == torch.int64:
            assert (each == -2).all()
    indices = torch.empty(8, dtype=torch.int64).fill_(verification.OLD_POISON)
    assert set(indices.tolist()) | set(indices.view(torch.int32).tolist()) == {-1, -2}


class Missed:
    """A replay that reads its index where it was recorded, and not where the call has it."""

    layout = Layout((), (), Outputs((), (), as_tuple=True))

    def __init__(self, stand_in: torch.Tensor, *, writes: bool = False) -> None:
        self._stand_in = stand_in
        self._writes = writes

    def allocate_bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def serve_on(self, inputs: list[Any], _: object) -> tuple[torch.Tensor]:
        if self._writes:
            self._stand_in[-1] = self._stand_in[0]
        index = inputs[1] if self._writes else self._stand_in
        return (torch.nn.functional.embedding(index, inputs[0]),)  # raises where the GPU would assert


INDEX_TYPES = st.sampled_from([torch.int32, torch.int64])


@settings(deadline=None)
@given(st.lists(st.integers(0, 6), min_size=2, max_size=9), INDEX_TYPES, st.booleans())
def test_an_index_that_is_read_or_written_where_it_was_recorded_shows_and_ends_no_process(
    rows: list[int], dtype: torch.dtype, writes: bool
) -> None:
    table, index = torch.randn(7, 3), torch.tensor(rows, dtype=dtype)
    flipped = [min(rows) + max(rows) - row for row in rows]
    assume(flipped != rows and (not writes or flipped[0] != flipped[-1]))
    inputs = [table, index]
    stand_ins, places = stand_ins_for(inputs, input_groups(inputs))
    replay: Any = Missed(stand_ins[1], writes=writes)

    call = RecordedCall(inputs, NO_CONSTRAINTS, input_groups(inputs), None, None, lambda *_: None)  # type: ignore[arg-type]
    trial = verification.Verification(replay, call, GraphFacts(), list, None, places, stand_ins)
    found = trial.disagreement((torch.nn.functional.embedding(index, table),))

    assert str(found).startswith(
        "verification: it writes to where" if writes else "verification: output 0 differs"
    )
    assert index.tolist() == rows


def test_what_may_be_indices_is_given_others_only_where_that_can_be_told() -> None:
    same, large = torch.full((3,), 5), torch.arange(4)
    base = torch.arange(9)
    inputs = [same, base[:5], base[3:], base.to(torch.uint8), 7, None, torch.arange(6).expand(2, 6), large]

    assert sorted(verification._indices(inputs, input_groups(inputs))) == [0, 7]
    assert verification.other_indices(same).tolist() == [verification.OLD_POISON] * 3
    assert verification.other_indices(large).tolist() == [3, 2, 1, 0]


def test_memory_side_by_side_is_poisoned_and_looked_at_as_one() -> None:
    whole = torch.zeros(64, dtype=torch.int64)
    places = [whole[16:32], whole[:16], whole[40:48], whole[48:64]]

    joined = verification._joined(places)
    for each in joined:
        each.fill_(7)

    assert [(each.data_ptr(), each.numel()) for each in joined] == [
        (whole.data_ptr(), 32),
        (whole[40:].data_ptr(), 24),
    ]
    assert whole.tolist() == [7] * 32 + [0] * 8 + [7] * 24
    assert verification._joined([]) == []
