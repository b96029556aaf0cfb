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


class Case:
    """A graph whose decided sizes return themselves, and that has had its free sizes, but for `free` ones.

    The cache knows some sizes, the most used first, and lists them if `lists`; `kernels` are known as KERNELS.
    """

    def __init__(
        self,
        known: Sequence[int] | None = None,
        *,
        lists: bool = True,
        free: int = 0,
        kernels: Sequence[int] = (),
        **bounds: int,
    ) -> None:
        self.report = Report()
        self.known, self.lists, self.asked = known, lists, list[int]()
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
            TimeBudget(lambda: self.now_s),
        )
        self.kernels = frozenset((size,) for size in kernels)
        self.sized._recorded = time_budget.FREE_SIZES - free

    def look_up(self) -> KnownSizes:
        self.lookups += 1
        order = tuple((size,) for size in self.known or ()) if self.lists else ()
        return KnownSizes(order, lambda _sizes: not self.lists, self.recall, self.kernels)

    def recall(self, sizes: Sizes) -> DecidedSize | None:
        self.asked.append(sizes[0])
        return self.decide(sizes) if self.known and sizes[0] in self.known else None

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
