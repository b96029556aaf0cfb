"""What a program returns shares memory with what it did without the rules: with its inputs, with what is kept, and with nothing else."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from hypothesis import HealthCheck, example, given, settings

from tests.support.placement.habits import HABITS, SIZE, Habit, Program, programs
from tests.support.placement.with_rules import with_rules

pytestmark = pytest.mark.torch

Named = dict[str, torch.Tensor]
CALLS = 3


@dataclass(frozen=True)
class Lying:
    """What a tensor is, and which of the tensors named before it is the same, or lies in the same memory."""

    dtype: torch.dtype
    device: torch.device
    size: torch.Size
    strides: tuple[int, ...]
    offset: int
    requires_grad: bool
    same: tuple[str, ...]
    shares: tuple[str, ...]


@dataclass
class Seen:
    """Of each call: how what it returned lies, how often what it was given was written to, and the numbers in all of that."""

    lying: list[list[Lying]]
    writes: list[dict[str, int]]
    values: list[list[torch.Tensor]]


def lying(tensor: torch.Tensor, others: Named) -> Lying:
    memory = tensor.untyped_storage().data_ptr()
    return Lying(
        tensor.dtype,
        tensor.device,
        tensor.size(),
        tensor.stride(),
        tensor.storage_offset(),
        tensor.requires_grad,
        tuple(name for name, other in others.items() if other is tensor),
        tuple(name for name, other in others.items() if other.untyped_storage().data_ptr() == memory),
    )


def tensors(kept: list[Any]) -> list[torch.Tensor]:
    return [each for each in kept if isinstance(each, torch.Tensor)]


def look(program: Any, called: Any, *, by_gradient: bool = False) -> Seen:
    """Call what is made of a program, and write to all that is the caller's alone."""
    seen, earlier = Seen([], [], []), Named()
    for call in range(CALLS):
        program.edit(call)
        x = torch.linspace(-1, 1, SIZE * SIZE).view(SIZE, SIZE).requires_grad_(by_gradient)
        kept = tensors(program.kept())
        known: Named = {"x": x, **{f"kept {number}": each for number, each in enumerate(kept)}}
        before = {name: each._version for name, each in known.items()}
        returned = called(x)
        seen.writes.append({name: each._version - before[name] for name, each in known.items()})
        seen.values.append([each.detach().clone() for each in (*returned, *known.values())])
        known |= earlier
        of_call = []
        for number, each in enumerate(returned):
            of_call.append(lying(each, known))
            known[f"returned {call}, {number}"] = earlier[f"returned {call}, {number}"] = each
        seen.lying.append(of_call)
        for each, how in zip(returned, of_call, strict=True):
            if not how.shares:
                each.data.zero_()
    return seen


def seen_in_three_ways(program: Any, *, by_gradient: bool = False) -> tuple[Seen, Seen, Seen, Any]:
    """Return what is seen in eager mode, of what is compiled without the rules, and with them, and their report."""
    plain, without, mine = (copy.deepcopy(program) for _ in range(3))
    torch._dynamo.reset()
    options: dict[str, Any] = {"mode": "reduce-overhead", "dynamic": False}
    with torch.set_grad_enabled(by_gradient), dynamo_config.patch(capture_scalar_outputs=True):
        first = look(plain, plain, by_gradient=by_gradient)
        second = look(without, torch.compile(without, **options), by_gradient=by_gradient)
        with with_rules() as report:
            third = look(mine, torch.compile(mine, **options), by_gradient=by_gradient)
    return first, second, third, report


def assert_alike(eager: Seen, without: Seen, found: Seen) -> None:
    assert found.lying == without.lying == eager.lying
    assert found.writes == without.writes
    # Who is written to; what is compiled may write once what eager mode writes twice.
    assert [{name: bool(count) for name, count in each.items()} for each in found.writes] == [
        {name: bool(count) for name, count in each.items()} for each in eager.writes
    ]
    for mine, others, right in zip(found.values, without.values, eager.values, strict=True):
        torch.testing.assert_close(mine, others, rtol=1e-5, atol=1e-5)
        for value, expected in zip(mine, right, strict=True):
            # What is small beside others was a difference of these: compiled code rounds otherwise, with and without the rules.
            largest = float(expected.double().abs().max()) if expected.numel() else 0.0
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-4 * max(largest, 1.0))


class Keeping(torch.nn.Module):  # type: ignore[misc]
    """Returns in several ways what it is given, what it keeps and what it makes."""

    rule: str

    def kept(self) -> list[Any]:
        return [*self.buffers(), *vars(self).values()]

    def edit(self, call: int) -> None:
        """Keep all as it is."""


class Known(Keeping):
    """A clone is a copy to the GPU, here and below."""

    rule = "placed"

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        index = torch.tensor([11, 0, 10, 1, 9, 2, 8, 3, 7, 4, 6, 5])
        weights = torch.tensor([0.1 * column for column in range(SIZE)])
        there = weights.clone()
        y = x[:, index] * there
        return y, y, y[1:], there, there, weights, weights, index, index[2:], x, x[1:], x.t()


class Given(Keeping):
    rule = "placed_inputs"

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("order", torch.arange(SIZE).flip(0))
        self.table = torch.linspace(0, 1, SIZE)
        self.temperature = torch.tensor(1.5)
        self.viewed = torch.tensor([0.5, 2.0])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        there = self.table.clone()
        y = (x @ x / self.temperature)[self.order] * there
        mine = (self.order, self.order, self.temperature, self.table, self.viewed[1:], self.viewed.view(2, 1))
        return y, y, y.t(), there, there, *mine, x[1:], x

    def edit(self, call: int) -> None:
        self.temperature.fill_(1.5 + call // 2)


class Computed(Keeping):
    """The counter and the matrix are changed in place."""

    rule = "placed_inputs"

    def __init__(self) -> None:
        super().__init__()
        self.step = torch.tensor(1.0)
        self.rates = torch.tensor([0.5, 0.25])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.step += 1
        correction = 1 - 0.9**self.step
        y = x @ x / correction * self.rates[0]
        rows = x[2:]
        x.mul_(correction)
        return y, self.step, self.step, correction, correction, self.rates[1:], x, rows, rows


class Scheduled(Keeping):
    """What the CPU computes of a value that stays the same."""

    rule = "placed_inputs"

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.tensor(0.1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        decay = (1 - self.rate).sqrt()
        y = x @ x * decay
        return y, decay, decay, self.rate, y[:, 1], x


@pytest.mark.slow
@pytest.mark.usefixtures("for_all_rules")
@pytest.mark.parametrize("kind", [Known, Given, Computed, Scheduled])
def test_what_is_returned_lies_where_it_would(kind: type[Keeping]) -> None:
    eager, without, found, report = seen_in_three_ways(kind())

    assert_alike(eager, without, found)
    assert report.counts[kind.rule] > 0
    assert report.failures == {}


@pytest.mark.usefixtures("for_all_rules")
def test_what_is_returned_beside_a_gradient_lies_where_it_would() -> None:
    eager, without, found, report = seen_in_three_ways(Given(), by_gradient=True)

    assert_alike(eager, without, found)
    assert report.counts["placed_inputs"] > 0
    assert report.failures == {}


class Showing(Program):
    """A program that returns, too, rows of what it is given, and what its habits keep."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = super().forward(x)
        shown = [each for each in self.kept() if isinstance(each, torch.Tensor)]
        return result, x[1:], x, *shown, *(each.view(-1) for each in shown)


@pytest.mark.slow
@pytest.mark.usefixtures("standing_in")
@example(HABITS)
@given(programs)
@settings(max_examples=1, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_any_program_returns_lies_where_it_would(habits: tuple[type[Habit], ...]) -> None:
    eager, without, found, report = seen_in_three_ways(Showing(habits))

    assert_alike(eager, without, found)
    assert report.failures == {}
    assert report.counts["placed_inputs"] > 0 or habits != HABITS
