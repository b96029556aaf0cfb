"""CPU values that are known when a graph is compiled: on the GPU, with the same results, in one part instead of several."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client import options

if TYPE_CHECKING:
    from tests.gpu.conftest import Watched

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

DEVICE = "cuda"
ENOUGH = 60


@pytest.fixture(autouse=True)
def with_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(options.PLACEMENT, "1")


def interact(x: torch.Tensor) -> torch.Tensor:
    """Multiply features with each other, and pick each pair once, as a DLRM does."""
    products = x @ x.transpose(1, 2)
    rows = torch.tensor([i for i in range(x.shape[1]) for _ in range(i)])
    columns = torch.tensor([j for i in range(x.shape[1]) for j in range(i)])
    return products[:, rows, columns]


def scaled(x: torch.Tensor) -> torch.Tensor:
    """Scale by a table that is made anew on the CPU at every call."""
    table = torch.exp(torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]) * -0.1)
    return x * table.to(x.device)


def constant(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a constant beside a result."""
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]).to(x.device)
    return weights, x + weights


@pytest.mark.parametrize("mode", ["reduce-overhead", None])
@pytest.mark.parametrize("function", [interact, scaled])
def test_results_are_the_same_and_the_graph_is_in_one_part(
    watched: Watched, function: object, mode: str | None
) -> None:
    assert callable(function)
    compiled = torch.compile(function, mode=mode, dynamic=False)
    with torch.no_grad():
        for _ in range(ENOUGH):
            x = torch.randn(8, 9, 9, device=DEVICE)
            torch.testing.assert_close(compiled(x), function(x))

    watched.expect(graphs=1, measured=1)
    assert watched.report.counts["placed"] > 0
    assert watched.report.summary()["left_on_cpu"] == {}


@pytest.mark.parametrize("function", [interact, scaled])
def test_gradients_are_the_same(watched: Watched, function: object) -> None:
    assert callable(function)
    compiled = torch.compile(function, mode="reduce-overhead", dynamic=False)
    for _ in range(ENOUGH):
        x = torch.randn(8, 9, 9, device=DEVICE, requires_grad=True)
        (expected,) = torch.autograd.grad(function(x).square().sum(), x)
        (found,) = torch.autograd.grad(compiled(x).square().sum(), x)
        torch.testing.assert_close(found, expected)

    watched.expect(graphs=2)
    assert watched.report.summary()["left_on_cpu"] == {}


def test_what_is_returned_is_the_users_to_change(watched: Watched) -> None:
    compiled = torch.compile(constant, mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        for _ in range(ENOUGH):
            x = torch.randn(9, device=DEVICE)
            for result, expected in zip(compiled(x), constant(x), strict=True):
                assert torch.equal(result, expected)
                result.zero_()

    assert watched.report.counts["placed"] == 1


def test_what_inductor_has_cached_is_right_in_the_next_compilation(watched: Watched) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        compiled = torch.compile(interact, mode="reduce-overhead", dynamic=False)
        with torch.no_grad():
            for _ in range(5):
                x = torch.randn(8, 9, 9, device=DEVICE)
                torch.testing.assert_close(compiled(x), interact(x))

    assert watched.report.counts["placed"] == 2  # the indices of one compilation
    watched.expect()


def test_a_value_that_changes_is_seen_by_the_next_call(watched: Watched) -> None:
    """It is an input, which the rule leaves alone, and says so."""
    temperature = torch.tensor([1.0] * 9)

    def soften(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return x / by.to(x.device)

    compiled = torch.compile(soften, mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        for _ in range(ENOUGH):
            x = torch.randn(4, 9, device=DEVICE)
            temperature += 0.1
            torch.testing.assert_close(compiled(x, temperature), x / temperature.to(DEVICE))

    assert watched.report.counts["placed"] == 0
    (reason,) = watched.report.summary()["left_on_cpu"]
    assert "it is an input of the graph" in reason
    assert "test_placement.py" in reason
