"""Memory that saved activations keep from step to step, in real training on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.gpu.conftest import Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STEPS = 30


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(6):
        layers += [torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Dropout(0.0), torch.nn.LayerNorm(64)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(64, 8)).cuda()


def batches(steps: int = STEPS) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    return [torch.randn(32, 64, device="cuda", generator=generator) for _ in range(steps)]


def train(module: torch.nn.Module, run: Callable[..., Any]) -> list[float]:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for batch in batches():
        loss = run(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def plain() -> list[float]:
    torch.compiler.reset()
    module = model()
    return train(module, module)


@pytest.mark.usefixtures("either_helper")
def test_training_keeps_one_set_and_is_right(relocated: Relocated) -> None:
    module = model()

    losses = train(module, torch.compile(module, mode="reduce-overhead"))

    relocated.expect_all_captured()
    assert relocated.sets == [1, 0]
    torch.testing.assert_close(losses, plain(), rtol=2e-3, atol=1e-4)


@pytest.mark.usefixtures("either_helper")
def test_two_forwards_in_flight_keep_two_sets_and_are_right(relocated: Relocated) -> None:
    module = model()
    compiled = torch.compile(module, mode="reduce-overhead")
    train(module, compiled)
    first, second = batches(2)

    gradients = []
    for run in (compiled, module, compiled):
        module.zero_grad()
        results = [run(first).square().sum(), run(second).sin().sum()]
        for result in results:
            result.backward()
        gradients.append([each.grad for each in module.parameters()])

    assert relocated.sets == [2, 0]
    for compiled_gradients in (gradients[0], gradients[2]):
        torch.testing.assert_close(compiled_gradients, gradients[1], rtol=2e-3, atol=2e-3)


@pytest.fixture
def saved_values_stay() -> Iterator[None]:
    """Keep the backward from writing over what was saved, for which PyTorch refuses to keep a graph."""
    from torch._functorch import config

    # Not by monkeypatch: what that undoes is a deletion to the module, which then hides the setting from torch itself.
    with config.patch(donated_buffer=False):
        yield


@pytest.mark.usefixtures("saved_values_stay")
def test_a_graph_that_is_kept_keeps_what_it_saved(relocated: Relocated) -> None:
    module = model()
    compiled = torch.compile(module, mode="reduce-overhead")
    train(module, compiled)
    first, second = batches(2)

    kept = compiled(first).square().sum()
    for _ in range(10):
        compiled(second).square().sum().backward()
    module.zero_grad()
    kept.backward(retain_graph=True)
    kept.backward()
    mine = [each.grad for each in module.parameters()]
    module.zero_grad()
    (2 * module(first).square().sum()).backward()

    torch.testing.assert_close(mine, [each.grad for each in module.parameters()], rtol=2e-3, atol=2e-3)
    relocated.expect_all_captured()


def test_an_output_that_is_saved_too_belongs_to_the_user(relocated: Relocated) -> None:
    """exp saves its own result."""
    compiled = torch.compile(lambda x: (x * 2).exp(), mode="reduce-overhead")
    x = torch.ones(1000, device="cuda", requires_grad=True)

    kept = []
    for step in range(10):
        result = compiled(x * (step / 10))
        result.sum().backward()
        kept.append(result.detach())

    assert len({each.data_ptr() for each in kept}) == len(kept)
    for step, each in enumerate(kept):
        torch.testing.assert_close(each, torch.full_like(each, step / 5).exp())


def test_a_gradient_never_lies_in_memory_that_is_kept(relocated: Relocated) -> None:
    """Inductor writes gradients over saved activations that are needed no more."""
    module = torch.nn.Sequential(
        *[torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
    ).cuda()
    compiled = torch.compile(module, mode="reduce-overhead")
    kept = []
    for step in range(12):
        x = torch.full((64, 64), step / 10, device="cuda", requires_grad=True)
        compiled(x).square().sum().backward()
        expected = torch.autograd.grad(module(x).square().sum(), x)[0]
        kept.append((x.grad, expected))

    for mine, right in kept:
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-4)
    relocated.expect_all_captured()
