"""Graphs of which a part runs on the CPU: in every mode the rest is recorded, and the results are those of eager code."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.replay.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.watched import Watched

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


@pytest.mark.usefixtures("graphs_win")
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


def blocks(count: int) -> torch.nn.Sequential:
    """Return convolutions, each with a batch normalisation, which saves as many numbers as its gradients have."""
    torch.manual_seed(0)
    made = torch.nn.Sequential()
    for _ in range(count):
        made.extend([torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU()])
    return made.cuda()


def test_statistics_that_are_saved_lie_together_and_gradients_apart(
    watched: Watched, mode: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    count = 6
    module, expected = blocks(count), blocks(count)
    run = torch.compile(module, mode=mode)
    kept = []
    for _ in range(STEPS):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(4, 8, 16, 16, device="cuda")
        for each, call in ((module, run), (expected, expected)):
            each.zero_grad(set_to_none=True)
            call(x).square().mean().backward()
        mine = [each.grad for each in module.parameters() if each.grad is not None]
        right = [each.grad for each in expected.parameters() if each.grad is not None]
        torch.testing.assert_close(mine, right, rtol=2e-3, atol=2e-4)
        assert len({each.untyped_storage().data_ptr() for each in mine}) == len(mine)
        assert all(each.untyped_storage().nbytes() == each.nbytes for each in mine)
        kept.append(mine[-2:])
    assert watched.report.counts["captured"] >= 2, watched.reasons()
    assert len({each.data_ptr() for pair in kept for each in pair}) == 2 * len(kept)
    layouts = [each.layout for each in gc.get_objects() if type(each) is Replay]
    forwards = [each for each in layouts if each.saves_together and len(each.outputs.all) > 2 * count]
    assert forwards
    assert all(len(each.memories) < count for each in forwards)


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
