"""Outputs that the compiled helper does not make are made beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.replay.outputs import Empty, Fixed, Input, Outputs, Part, View, Whole

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
