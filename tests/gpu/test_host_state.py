"""Training with memory-efficient attention: its forward and backward may run in different ways, and nobody sees which."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.nn.attention import SDPBackend, sdpa_kernel

from pygraphd.client.recording.attention_host import WithHostState
from pygraphd.client.recording.recordings import NOT_YET
from pygraphd.schema.reasons import ReasonCode
from tests.support.relocated import Relocated, installed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.support.watched import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STEPS = 8
LAYERS = 2
ENOUGH = 160
"""Steps that end measuring, also where samples are noisy: up to 76 of them are timed."""


class Mixed(Relocated):
    """Relocates forwards, backwards, both or none."""

    def __init__(self) -> None:
        super().__init__()
        self.relocates = {False: True, True: True}
        self._is_backward = False

    def make(self, runnable: Callable[[list[Any]], Any], device_index: int) -> Callable[[list[Any]], Any]:
        run = super().make(runnable, device_index)
        return run if self.relocates[self._is_backward] else runnable

    def compile(self, original: Callable[[], None], compiled: Any, graph_kwargs: Mapping[str, Any]) -> None:
        self._is_backward = graph_kwargs["is_backward"]
        super().compile(original, compiled, graph_kwargs)


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mixed]:
    mixed = Mixed()
    with installed(mixed, tmp_path, monkeypatch):
        yield mixed


def attend(dropout: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def attend(x: torch.Tensor) -> torch.Tensor:
        for _ in range(LAYERS):
            x = F.scaled_dot_product_attention(x, x * 2, x + 1, is_causal=True, dropout_p=dropout)
        return x

    return attend


def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of some steps; random numbers go on from step to step, and others are drawn in between."""
    torch.manual_seed(5)
    found = []
    for step in range(STEPS):
        x = torch.randn(2, 4, 64, 32, device="cuda", requires_grad=True)
        run(x).square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
        torch.rand(4 * step, device="cuda")
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("ahead", "behind"), list(itertools.product([True, False], repeat=2)))
def test_gradients_are_those_of_the_same_code_as_kernels(
    mixed: Mixed, dropout: float, ahead: bool, behind: bool
) -> None:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        with mixed.as_kernels():
            of_kernels = gradients(torch.compile(attend(dropout), mode="reduce-overhead", dynamic=False))
        mixed.relocates = {False: ahead, True: behind}
        found = gradients(torch.compile(attend(dropout), mode="reduce-overhead", dynamic=False))

    for mine, right in zip(found, of_kernels, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    assert all(isinstance(each, WithHostState) for each in mixed.made)
    assert mixed.report.counts["captured"] == ahead + behind
    assert mixed.report.fallbacks == ({NOT_YET: ahead + behind} if ahead or behind else {})


def test_replays_do_not_wait_where_a_wait_is_an_error(mixed: Mixed) -> None:
    """Each recording reads the state of its first replay back, and from the next one on it is known."""

    def steps(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        found = []
        for step in range(STEPS):
            x = torch.randn(2, 4, 64, 32, device="cuda", requires_grad=True)
            if step == 2:  # both are recorded
                torch.cuda.set_sync_debug_mode("error")
            run(x).square().sum().backward()
            assert x.grad is not None
            found.append(x.grad)
        torch.cuda.set_sync_debug_mode("default")
        return found

    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        with mixed.as_kernels():
            of_kernels = steps(torch.compile(attend(0.3), mode="reduce-overhead", dynamic=False))
        found = steps(torch.compile(attend(0.3), mode="reduce-overhead", dynamic=False))

    for mine, right in zip(found, of_kernels, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    mixed.expect_all_captured()


def attend_within_lengths(dropout: float, begins: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """As `attend`, but of sequences of several lengths, one after the other, which begin at `begins`."""
    longest = int(begins.diff().max())

    def attend(x: torch.Tensor) -> torch.Tensor:
        tokens = x.transpose(1, 2).reshape(1, -1, 4, 32)
        for _ in range(LAYERS):
            given = tokens, tokens * 2, tokens + 1, None, begins, begins, longest, longest, dropout, 0, True
            tokens = torch.ops.aten._efficient_attention_forward(*given)[0]
        return tokens

    return attend


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(("ahead", "behind"), [(True, True), (True, False), (False, True)])
def test_gradients_of_sequences_of_several_lengths_are_those_of_the_same_code_as_kernels(
    mixed: Mixed, dropout: float, ahead: bool, behind: bool
) -> None:
    begins = torch.tensor([0, 40, 100, 128], dtype=torch.int32, device="cuda")
    run = attend_within_lengths(dropout, begins)
    with mixed.as_kernels():
        of_kernels = gradients(torch.compile(run, mode="reduce-overhead", dynamic=False))
    mixed.relocates = {False: ahead, True: behind}
    found = gradients(torch.compile(run, mode="reduce-overhead", dynamic=False))

    for mine, right in zip(found, of_kernels, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    assert all(isinstance(each, WithHostState) for each in mixed.made)
    assert mixed.report.counts["captured"] == ahead + behind


def train(run: Callable[..., Any], parameters: list[torch.nn.Parameter], steps: int) -> list[float]:
    """Return the losses of some steps, each on other data."""
    torch.manual_seed(3)
    optimizer, losses = torch.optim.SGD(parameters, lr=0.01), []
    for _ in range(steps):
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            loss = run(torch.randn(4, 32, 64, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def layer() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, device="cuda")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_training_is_measured(watched: Watched, mode: str) -> None:
    eager, compiled = layer(), layer()
    right = train(eager, list(eager.parameters()), ENOUGH)

    losses = train(torch.compile(compiled, mode=mode, dynamic=False), list(compiled.parameters()), ENOUGH)

    torch.testing.assert_close(losses, right, rtol=1e-3, atol=1e-5)
    watched.expect(measured=2)
    assert ReasonCode.RANDOM_STATE_UNKNOWN.text not in watched.reasons()
