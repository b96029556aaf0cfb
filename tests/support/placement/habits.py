"""What programs of users keep on the CPU, a small module each, and random programs made of them; for CPUs and GPUs alike."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

SIZE = 12
"""Rows and columns of what goes through a program; nothing that is kept has two dimensions."""


class Habit(torch.nn.Module):  # type: ignore[misc]
    """Something done to a matrix. `edit` is what the user does to what is kept, before the call of a number."""

    by_gradient = True
    """Whether a gradient can go through it, as through nothing that changes in place."""

    def edit(self, call: int) -> None:
        """Keep all as it is."""


class Constant(Habit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tensor([0.1 * column for column in range(SIZE)]).to(x.device)


class Picked(Habit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, torch.tensor([11, 0, 10, 1, 9, 2, 8, 3, 7, 4, 6, 5])]


class Mask(Habit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(SIZE)
        mask[2:5] = 1
        return x - mask.to(x.device)


class Range(Habit):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(SIZE).to(x.device) / SIZE)


class Temperature(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = torch.tensor(1.5, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x / self.temperature).softmax(-1)

    def edit(self, call: int) -> None:
        self.temperature.fill_(1.0 + call // 2)


class Table(Habit):
    """A buffer, which NumPy writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(SIZE, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table.to(x.device)

    def edit(self, call: int) -> None:
        self.table.numpy()[call % SIZE] = 1.0 + call


class Rows(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.index = torch.arange(SIZE, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.index]

    def edit(self, call: int) -> None:
        self.index.copy_(self.index.roll(call // 2))


class Padding(Habit):
    """A mask of what lies before the end, which is where the user says."""

    def __init__(self) -> None:
        super().__init__()
        self.length = torch.tensor([SIZE], device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.arange(SIZE) < self.length
        return x.masked_fill(~before.to(x.device), 0.5)

    def edit(self, call: int) -> None:
        self.length.fill_(SIZE - call // 2)


class Shifted(Habit):
    """Columns that are picked from a place on, which the user moves."""

    def __init__(self) -> None:
        super().__init__()
        self.start = torch.tensor([0], device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(SIZE) + self.start
        return x[:, torch.where(places < SIZE, places, places - SIZE)]

    def edit(self, call: int) -> None:
        self.start.fill_(call % SIZE)


class Gain(Habit):
    """A scalar of NumPy's, another one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = np.float32(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain

    def edit(self, call: int) -> None:
        self.gain = np.float32(0.5 + call)


class Schedule(Habit):
    """What the CPU computes of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.tensor(0.1, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.rate * 2).exp() + (1 - self.rate).sqrt()

    def edit(self, call: int) -> None:
        self.rate.data = torch.tensor(0.1 / (1 + call), device="cpu")


class Counter(Habit):
    """A step of Adam whose counter is on the CPU, and whose moment is where the matrix is."""

    by_gradient = False

    def __init__(self) -> None:
        super().__init__()
        self.step = torch.tensor(0.0, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return x / (1 - 0.9**self.step)


class Read(Habit):
    """A count that is read by `.item()`."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.tensor(1, device="cpu")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.count.item()

    def edit(self, call: int) -> None:
        self.count += call % 2


class Made(Habit):
    """What a forward makes anew at each call, from a number of Python's."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.linspace(0.5, 1.5, SIZE) * self.rate + torch.full((SIZE,), 0.25)
        return x * made.to(x.device)

    def edit(self, call: int) -> None:
        self.rate = 0.5 + call // 3


class Learned(Habit):
    """A parameter that was left on the CPU, and gets its gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.5, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (1 + self.weight**2)

    def edit(self, call: int) -> None:
        with torch.no_grad():
            self.weight.fill_(1.0 + call // 2)


HABITS: tuple[type[Habit], ...] = (
    *(Constant, Picked, Mask, Range, Temperature, Table, Rows, Padding, Shifted, Gain),
    *(Schedule, Counter, Read, Made, Learned),
)


class Program(torch.nn.Module):  # type: ignore[misc]
    """Habits one after the other, with something between them that keeps the numbers small."""

    def __init__(self, habits: tuple[type[Habit], ...]) -> None:
        super().__init__()
        self.habits = torch.nn.ModuleList(habit() for habit in habits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for habit in self.habits:
            x = torch.tanh(habit(x)) @ x
        return x

    def edit(self, call: int) -> None:
        for habit in self.habits:
            habit.edit(call)

    def kept(self) -> list[Any]:
        """Return all that its habits keep, in their order."""
        found: list[Any] = []
        for habit in self.habits:
            found += [value for value in vars(habit).values() if isinstance(value, torch.Tensor | np.generic)]
            found += list(habit.buffers())
        return found


def programs_of(habits: tuple[type[Habit], ...]) -> st.SearchStrategy[tuple[type[Habit], ...]]:
    """Return programs of one to four of these."""
    return st.lists(st.sampled_from(habits), min_size=1, max_size=4).map(tuple)


programs = programs_of(HABITS)


def compare(
    habits: tuple[type[Habit], ...],
    device: str,
    calls: int,
    *,
    mode: str | None = None,
    by_gradient: bool = True,
) -> None:
    """Hold a compiled program against the same one in eager mode, both edited alike before each call."""
    mine = Program(habits)
    plain = copy.deepcopy(mine)
    by_gradient &= all(habit.by_gradient for habit in habits)
    compiled = torch.compile(mine, mode=mode, dynamic=False)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.set_grad_enabled(by_gradient):
        for call in range(calls):
            for each in (mine, plain):
                each.edit(call)
            x = torch.randn(SIZE, SIZE, device=device, requires_grad=by_gradient)
            torch.compiler.cudagraph_mark_step_begin()
            _hold(compiled, mine, plain, x)
            torch.testing.assert_close(mine.kept(), plain.kept(), rtol=0, atol=0)


def _hold(compiled: Any, mine: Program, plain: Program, x: torch.Tensor) -> None:
    found, expected = compiled(x), plain(x)
    _assert_close(found, expected, 1e-3)
    if x.requires_grad:
        gradients, right = (
            torch.autograd.grad(each.square().sum(), [x, *program.parameters()])
            for each, program in ((found, mine), (expected, plain))
        )
        for one, other in zip(gradients, right, strict=True):
            _assert_close(one, other, 1e-2)


def _assert_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    # Products of products: what cancels out is off by a share of what was added up.
    scale = float(expected.detach().abs().max().nan_to_num(nan=0.0, posinf=0.0))
    torch.testing.assert_close(
        found, expected, rtol=tolerance, atol=tolerance / 10 * max(1.0, scale), check_stride=True
    )
