"""FFTs on a GPU: lengths whose kernels read tables of a plan run as KERNELS, in every call; others are recorded, and right when plans go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.replay.node_params import TABLES

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.relocated import Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

BY_TABLES = (131, 262, 1021)
"""They have a prime factor above 127."""
OTHERS = (100, 128, 1000)


def mixed(x: torch.Tensor) -> torch.Tensor:
    return torch.fft.irfft(torch.fft.rfft(torch.sin(x)) * 2, n=x.shape[-1]) + x


def expect_right(
    function: Callable[..., torch.Tensor], compiled: Callable[..., torch.Tensor], n: int
) -> None:
    x = torch.randn(16, n, device="cuda", requires_grad=True)
    found, right = compiled(x), function(x)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    mine, theirs = (torch.autograd.grad(each.square().sum(), x)[0] for each in (found, right))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)


def drop_plans() -> list[torch.Tensor]:
    """Have PyTorch free its plans, and other memory take their place; return that."""
    torch.cuda.synchronize()
    torch.backends.cuda.cufft_plan_cache.clear()
    for n in (137, 139, 149, 2053):  # their tables
        torch.fft.fft(torch.randn(4, n, device="cuda", dtype=torch.complex64))
    torch.cuda.empty_cache()
    return [torch.full((1 << 19,), float("nan"), device="cuda") for _ in range(64)]


@pytest.mark.parametrize("n", [*BY_TABLES, *OTHERS])
def test_a_transform_is_right_though_plans_go(relocated: Relocated, n: int) -> None:
    compiled = torch.compile(mixed, mode="reduce-overhead", dynamic=False)
    for _ in range(6):
        expect_right(mixed, compiled, n)
    held = drop_plans()
    for _ in range(4):
        expect_right(mixed, compiled, n)
    del held

    if n in BY_TABLES:
        assert relocated.report.counts["captured"] == 0
        assert any(reason.startswith(TABLES) for reason in relocated.report.fallbacks)
    else:
        assert relocated.report.counts["captured"] > 0
