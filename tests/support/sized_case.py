"""A dispatcher of dynamic sizes whose decided sizes return themselves, and whose time is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pygraphd.client.common.report import Report
from pygraphd.client.dispatch import time_budget
from pygraphd.client.dispatch.shapes import Bounds, DecidedSize, KnownSizes, ShapeDispatcher, Sizes
from pygraphd.client.dispatch.slot import Slot
from pygraphd.client.dispatch.time_budget import TimeBudget

if TYPE_CHECKING:
    from collections.abc import Sequence

KERNELS = "kernels"


class _Budget(TimeBudget):
    """Counts recordings at each question, since here they take no time on the clock."""

    def _debt_s(self) -> float:
        self._count_at_s = 0.0
        return super()._debt_s()


class Case:
    """A graph whose decided sizes return themselves, and that has had its free sizes, but for `free` ones.

    The cache knows some sizes, the most used first; `kernels` are known as KERNELS.
    """

    def __init__(
        self,
        known: Sequence[int] | None = None,
        *,
        free: int = 0,
        kernels: Sequence[int] = (),
        **bounds: int,
    ) -> None:
        self.report = Report()
        self.known, self.asked = known, list[int]()
        self.lookups = 0
        self.decided: list[Sizes] = []
        self.open: set[Sizes] = set()
        self.most_open = 0
        self.wholes = 0
        self.now_s = 0.0
        self.took_s = dict[int, float]()
        self.each_s: float | None = 1e-6  # None: nothing is recorded yet
        self.are_recorded = True
        self.sized = ShapeDispatcher(
            lambda _inputs: KERNELS,
            Bounds(**bounds),
            lambda: None,
            self.decide,
            self.whole,
            self.report,
            None if known is None else self.look_up,
            _Budget(lambda: self.now_s),
        )
        self.kernels = frozenset((size,) for size in kernels)
        self.sized._recorded = time_budget.FREE_SIZES - free

    def look_up(self) -> KnownSizes:
        self.lookups += 1
        return KnownSizes(tuple((size,) for size in self.known or ()), self.recall, self.kernels)

    def recall(self, sizes: Sizes) -> DecidedSize | None:
        self.asked.append(sizes[0])
        return self.decide(sizes)

    def decide(self, sizes: Sizes) -> DecidedSize:
        self.decided.append(sizes)
        self.open.add(sizes)
        self.most_open = max(self.most_open, len(self.open))
        slot = Slot(lambda _inputs: sizes)
        return DecidedSize(
            slot,
            lambda: self.open.discard(sizes),
            is_recorded=self.are_recorded and sizes not in self.kernels,
            recording_us=lambda: (
                1e6 * self.took_s.get(sizes[0], self.each_s or 0.0) / time_budget.CONSEQUENCES
            ),
        )

    def whole(self) -> Any:
        self.wholes += 1
        return lambda _inputs: "whole"

    def calls(self, *sizes: int) -> list[Any]:
        return [self.sized(["a tensor", size]) for size in sizes]
