"""Outputs that the compiled helper does not make are made beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.replay.outputs import (
    Empty,
    Fixed,
    Flagged,
    Input,
    Output,
    Outputs,
    Part,
    Same,
    View,
    Whole,
    first_positions,
)

if TYPE_CHECKING:
    from pygraphd.client.replay.native.ffi import TensorOps

pytestmark = pytest.mark.torch


def test_outputs_without_elements_and_of_dtypes_that_libtorch_has_no_code_for(
    loaded_helper: TensorOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    code_of = torch_private.dtype_code

    def none(dtype: torch.dtype | None) -> int:
        if dtype is torch.int16:
            raise LookupError(str(dtype))
        return code_of(dtype)

    monkeypatch.setattr(torch_private, "dtype_code", none)
    memory, given = [torch.arange(4.0), torch.ones(3)], [torch.zeros(2), torch.arange(6.0)]
    parts = [Part(0, (2,), (1,), 2, torch.float32), Part(0, (3,), (1,), 5, torch.int16)]
    views = [View(1, (2, 2), (2, 1), 0, torch.int16), View(1, (2,), (3,), 1, torch.float32, keeps_dtype=True)]
    empty = Empty((0, 3), (3, 1), torch.int16, torch.device("cpu"))
    outputs = Outputs(
        [*parts, Whole(1), Fixed("text"), *views, empty, Input(0)],
        [each.dtype for each in memory],
        as_tuple=True,
    )

    part, odd, whole, fixed, view, kept, nothing, same = outputs.gather(
        loaded_helper.filling(outputs.pieces), memory, given
    )

    assert not outputs.are_plain
    assert part.tolist() == [2.0, 3.0]
    assert torch.equal(odd, memory[0].view(torch.int16)[5:8])
    assert torch.equal(view, given[1].view(torch.int16)[:4].view(2, 2))
    assert kept.tolist() == [1.0, 4.0]
    assert (nothing.size(), nothing.dtype) == ((0, 3), torch.int16)
    assert (whole is memory[1], fixed, same is given[0]) == (True, "text", True)


@pytest.mark.parametrize("is_conjugate", [False, True])
def test_outputs_that_are_one_tensor_are_one_object(loaded_helper: TensorOps, is_conjugate: bool) -> None:
    memory, given = [torch.arange(4.0), torch.zeros(4, dtype=torch.complex64)], [torch.zeros(2)]
    part = Part(0, (2,), (1,), 2, torch.float32)
    of = Part(1, (2,), (1,), 0, torch.complex64)
    complex_part = Flagged(of, torch.empty(0, dtype=torch.complex64).conj()) if is_conjugate else of
    constant = Fixed(torch.ones(3))
    made: list[Output] = [
        Input(0),
        Same(0),
        part,
        complex_part,
        Whole(0),
        Same(2),
        Same(4),
        Same(3),
        constant,
        Same(8),
        Same(2),
    ]
    outputs = Outputs(made, [each.dtype for each in memory], as_tuple=True)

    found = outputs.gather(loaded_helper.filling(outputs.pieces), memory, given)

    assert outputs.are_plain is not is_conjugate
    assert first_positions(found) == [0, 0, 2, 3, 4, 2, 4, 3, 8, 8, 2]
    assert (found[0] is given[0], found[4] is memory[0], found[8] is constant.value) == (True, True, True)
    assert found[5].tolist() == [2.0, 3.0]
    assert found[7].is_conj() is is_conjugate


def test_numbers_and_none_are_no_tensors_that_could_be_one() -> None:
    tensor = torch.zeros(1)

    assert first_positions([None, tensor, 1, None, 1, tensor]) == [0, 1, 2, 3, 4, 1]
