"""Graphs of which a part runs on the CPU: in every mode the rest is recorded, and the results are those of eager code."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.gpu.conftest import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STEPS = 64
MOST_STEPS = 400
"""More than it takes to record, measure and decide."""


@pytest.fixture(params=[None, "reduce-overhead"], ids=["default", "reduce-overhead"])
def mode(request: pytest.FixtureRequest) -> str | None:
    """Return one of the modes of `torch.compile`."""
    chosen: str | None = request.param
    return chosen


def scaled_by_an_input(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    return (x.sin() * number).cos() + x


def embedded(x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
    """As the timestep of a diffusion model that is left on the CPU."""
    frequencies = torch.exp(-torch.arange(8, dtype=torch.float32) / 8)
    angles = timestep.float() * frequencies
    return x @ torch.cat([angles.sin(), angles.cos()]).to(x.device).diag() + x.sum()


def sorted_on_the_cpu(x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    order = (keys.sort().indices * 2 + 1).to(x.device)
    return (x.exp() + order).tanh() @ x


@pytest.mark.parametrize("function", [scaled_by_an_input, embedded, sorted_on_the_cpu])
def test_what_runs_on_the_gpu_is_recorded(
    watched: Watched, mode: str | None, function: Callable[..., Any]
) -> None:
    run = torch.compile(function, mode=mode)
    for step in range(MOST_STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(16, 16, device="cuda")
        other = torch.randn(16) if function is sorted_on_the_cpu else torch.tensor(1.0 + step % 7)
        torch.testing.assert_close(run(x, other), function(x, other), rtol=1e-4, atol=1e-4)
        if step >= STEPS and watched.report._deployed.total():
            break  # on a busy GPU a trial takes more calls
    watched.expect()
    assert watched.report.counts["captured"] >= 1, watched.reasons()
    assert watched.report.summary()["deployed"]["GRAPH"] >= 1, watched.reasons()


def test_a_training_whose_forward_is_told_a_number_of_the_cpu(watched: Watched, mode: str | None) -> None:
    def function(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return ((x @ x).relu() * number).tanh().sum()

    run = torch.compile(function, mode=mode)
    for step in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        x, number = torch.randn(16, 16, device="cuda"), torch.tensor(0.1 + step % 5)
        mine, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        run(mine, number).backward()
        function(expected, number).backward()
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-3, atol=1e-4)
    watched.expect()
    assert watched.report.counts["captured"] >= 2, watched.reasons()


class Offloaded:
    """What is saved for a backward, on the CPU; its storage on the GPU is given back."""

    def __init__(self, saved: torch.Tensor) -> None:
        self.values, self.form = saved.cpu(), (saved.size(), saved.stride())
        if saved.is_cuda and saved.requires_grad is False:
            torch.cuda.current_stream().synchronize()
            saved.untyped_storage().resize_(0)

    def back(self) -> torch.Tensor:
        made = torch.empty_strided(*self.form, dtype=self.values.dtype, device="cuda")
        return made.copy_(self.values)


@pytest.mark.parametrize("when", ["always", "later"])
def test_hooks_may_give_back_the_storage_of_what_is_saved(watched: Watched, when: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ((x * y.sin()).tanh() * (x + y).exp().cos()).sigmoid().sum()

    run = torch.compile(function)
    for step in range(64):
        is_on = when == "always" or step > 48
        hooks = torch.autograd.graph.saved_tensors_hooks(Offloaded, Offloaded.back)
        x = torch.randn(64, 64, device="cuda")
        mine, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        y = torch.randn(64, 64, device="cuda")
        with hooks if is_on else contextlib.nullcontext():
            # What the user has is kept: only what the compiled graph has made may go.
            loss = run(mine * 1, y.clone())
        loss.backward()
        function(expected, y).backward()
        torch.testing.assert_close(mine.grad, expected.grad)
    watched.expect()
