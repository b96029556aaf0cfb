"""Copies of what is too large for the rules cut no graph: Inductor has them all come first, and that is not taken for granted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor.utils import run_and_get_code

from pygraphd.client.placement import inputs

if TYPE_CHECKING:
    from pygraphd.client.common.report import Report

pytestmark = pytest.mark.torch

SIZE = 72
ROWS = 30 * SIZE  # copies that all lie there at once take no tenth of what is computed with
REORDER = "triton.reorder_for_reducing_graph_partitions"


def interleaved(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Work with one matrix after the other; a sine of what has one dimension is not captured, as a copy is not."""
    for weight in weights:
        x = x @ weight.sin().view(SIZE, SIZE)
    return x


def first(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Compute the same, copies first."""
    for there in [weight.sin() for weight in weights]:
        x = x @ there.view(SIZE, SIZE)
    return x


@pytest.mark.slow
def test_copies_between_work_leave_it_in_one_part(matrices_elsewhere: Report) -> None:
    x, weights = torch.randn(ROWS, SIZE), torch.randn(3, SIZE * SIZE).unbind()
    assert weights[0].nbytes > inputs.MAX_INPUT_BYTES
    parts = []
    for function, reorder in ((interleaved, True), (first, True), (interleaved, False)):
        torch._dynamo.reset()
        with inductor_config.patch({REORDER: reorder}):
            compiled = torch.compile(function, mode="reduce-overhead", dynamic=False)
            result, (code,) = run_and_get_code(compiled, x, *weights)
        torch.testing.assert_close(result, interleaved(x, *weights), rtol=1e-4, atol=1e-3)
        parts.append(code.count("def partition_"))

    assert parts == [1, 1, 3]  # the last is what comes of it where Inductor may not reorder
    assert (matrices_elsewhere.counts["placed_inputs"], matrices_elsewhere.failures) == (0, {})
