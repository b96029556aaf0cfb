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
    from collections.abc import Callable

    from pygraphd.client.common.report import Report

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(lambda rates: torch.erf(rates[0]), id="another operator"),
        pytest.param(lambda rates: rates.sum(), id="a sum"),
        pytest.param(lambda rates: torch.rand(()), id="random"),
    ],
)
def test_a_number_that_no_rule_takes_is_told_of_with_the_users_line(
    added: Report, number: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def scaled(x: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
        return (x @ x) * number(rates) @ x

    line = scaled.__code__.co_firstlineno + 1
    x, rates = torch.randn(4, 4), torch.rand(3)

    torch.compile(scaled, mode=SPLIT, dynamic=False)(x, rates)

    (said,) = added.summary()["left_on_cpu"]
    assert said.startswith("aten.mul.Tensor takes a CPU value to the GPU: ")
    assert said.endswith(f"({__file__}:{line})")
    assert added.failures == {}


@pytest.mark.slow
def test_what_the_cpu_learns_gets_its_gradient_and_is_seen_by_the_next_call(added: Report) -> None:
    """A temperature that is a parameter on the CPU, and so are two numbers more, which an optimiser changes in place."""

    def attended(x: torch.Tensor, temperature: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return ((x @ x / temperature).softmax(-1) @ x) * (1 - gain) ** 2

    def learn(run: Callable[..., torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        numbers = [torch.nn.Parameter(torch.tensor(value)) for value in (2.0, 0.3)]
        optimizer = torch.optim.SGD(numbers, lr=0.5, momentum=0.9)
        x = torch.linspace(-1, 1, 16).reshape(4, 4).requires_grad_()
        gradients = []
        for _ in range(4):
            optimizer.zero_grad()
            run(x, *numbers).square().sum().backward()
            gradients += [x.grad.clone(), *(each.grad.clone() for each in numbers)]
            optimizer.step()
        return gradients, numbers

    gradients, numbers = learn(torch.compile(attended, mode=SPLIT, dynamic=False))
    expected, expected_numbers = learn(attended)

    for each, right in zip(gradients + numbers, expected + expected_numbers, strict=True):
        assert each.device == right.device
        torch.testing.assert_close(each, right, rtol=1e-4, atol=1e-4)
    assert added.failures == {}


EXTREMES = (
    *(torch.tensor(each) for each in (2**62 + 1, 2**53 + 1, 2**63 - 1, -(2**63), True, -0.0, float("nan"), float("inf"))),
    *(torch.tensor(each, dtype=torch.float64) for each in (1e308, 1e-310)),
    *(torch.tensor(each, dtype=torch.int32) for each in (2**31 - 1, -(2**31))),
    *(torch.tensor(255, dtype=torch.uint8), torch.tensor(-128, dtype=torch.int8), torch.tensor(65504.0, dtype=torch.float16)),
)  # fmt: skip


def of_extremes(x: torch.Tensor, *numbers: torch.Tensor) -> list[torch.Tensor]:
    there = [torch.where(x > 0, each, x) + torch.full((), 2**62 + 1) * each for each in numbers]
    return [*there, *(x * (each + 1) for each in numbers), numbers[0] + 1, numbers[0] * 2]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_extreme_numbers_keep_type_and_value(added: Report, dtype: torch.dtype) -> None:
    """One of 2**62 + 1 is no 64-bit float."""
    x = torch.tensor([[1, -2, 3], [5, 7, 2**31 - 1]]).to(dtype)
    compiled = torch.compile(of_extremes, mode=SPLIT, dynamic=False)

    for _ in range(2):
        found, right = compiled(x, *EXTREMES), of_extremes(x, *EXTREMES)
        for mine, theirs in zip(found, right, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)

    assert added.counts["placed_inputs"] > 0
    assert added.failures == {}
