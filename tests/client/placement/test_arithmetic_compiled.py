"""What the CPU computes of small inputs, in real compilations: one part is captured, nothing is copied back, and counters count.

There is no GPU here. What has two dimensions or more is taken to lie on one, by the rules and by what Inductor splits graphs by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from pygraphd.client.placement import inputs

if TYPE_CHECKING:
    from pygraphd.client.report import Report

pytestmark = pytest.mark.torch

SPLIT = "reduce-overhead"
ROUNDED: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-3}
"""Sums whose terms cancel; another step or temperature makes a difference of 1 and more."""


@pytest.fixture
def added(matrices_elsewhere: Report) -> Report:
    """Have the rules; return what they report to."""
    return matrices_elsewhere


def parts(code: str) -> tuple[int, str]:
    """Return how many parts are captured, and what is called around them."""
    captured, _, call = code.partition("class Runner")
    assert "pygraphd" not in captured
    return captured.count("def partition_"), call


def stepped(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    y = x @ x
    step += 1
    return (y / (1 - 0.9**step)) @ x * (1 - 0.99**step).sqrt()


def test_a_counter_that_the_graph_changes_in_place(added: Report) -> None:
    compiled = torch.compile(stepped, mode=SPLIT, dynamic=False)
    x, step, expected = torch.randn(4, 4), torch.tensor(1.0), torch.tensor(1.0)

    _, (code,) = run_and_get_code(compiled, x, step)
    stepped(x, expected)
    for turn in range(6):
        if turn == 3:
            step.numpy()[...] = expected.numpy()[...] = 40.0
        torch.testing.assert_close(compiled(x, step), stepped(x, expected), **ROUNDED)
        assert step == expected

    count, call = parts(code)
    assert count == call.count("self.partitions[") == call.count("pygraphd.sent.default([") == 1
    assert call.index("pygraphd.sent") < call.index("self.partitions[0](")
    assert (added.counts["placed_inputs"], added.counts["sent"], added.failures) == (2, 7, {})
    assert added.summary()["left_on_cpu"] == {}


def sampled(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x @ x / by).softmax(-1) @ x


def test_the_temperature_of_a_softmax_is_sent_when_it_has_changed(added: Report) -> None:
    compiled = torch.compile(sampled, mode=SPLIT, dynamic=False)
    x, by = torch.randn(4, 4), torch.tensor(2.0)

    with torch.no_grad():
        _, (code,) = run_and_get_code(compiled, x, by)
        for step in range(6):
            by.fill_(2.0 + step // 3 if step < 5 else -1.0)
            torch.testing.assert_close(compiled(x, by), sampled(x, by), **ROUNDED)

    assert parts(code)[0] == 1
    assert added.counts["placed_inputs"] > 1
    assert added.failures == {}
    assert added.counts["sent"] <= 2 * 3  # the temperature and what is made of it


def trained(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x @ x * (by * 2).exp()).sum()


def test_gradients_are_those_of_the_value_at_that_call(added: Report) -> None:
    compiled = torch.compile(trained, mode=SPLIT, dynamic=False)
    by = torch.tensor(0.1)
    for step in range(4):
        by.fill_(0.1 + step)
        x = torch.randn(4, 4, requires_grad=True)
        (found,) = torch.autograd.grad(compiled(x, by), x)
        expected = torch.autograd.grad(trained(x, by), x)[0]
        # Sums whose terms cancel: what rounding leaves is a share of the terms, and not of the sum.
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float((2 * by).exp()))

    assert added.failures == {}
    assert added.counts["placed_inputs"] >= 1
    assert not any(inputs.USED_HERE in each for each in added.summary()["left_on_cpu"])
