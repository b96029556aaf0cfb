"""When what runs is measured anew although nothing was found against it: what it was chosen over is gone, and may have come to be faster.

Of a graph that is launched no capture is left to take turns with, and of one in PyTorch's trees no relocatable graph. Knows nothing of torch.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pygraphd.client.report import Report

FIRST = 6
"""Rounds of looks after which a family is measured anew, if it may be; the next time comes after twice as many, and so on."""
SHARE = 5e-4
"""Of a process's time that all measuring in it may have taken when one more family is begun with."""


def stagger() -> int:
    """Return by how many rounds this process begins later: those that were started together had better not measure together."""
    return os.getpid() % FIRST


class Retrials:
    """The families of one process, each a number that a forward shares with its backward, and when it is their turn."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        """Go by what `report` says of the time that measuring takes, from now on."""
        self._report = report
        self._clock = clock
        self._began_s = clock()
        self._latest = 0
        self._schedules: dict[int, _Schedule] = {}

    def is_due(self, family: int, round_: int, have_rivals: Iterable[Callable[[], bool]]) -> bool:
        """Return whether a family that is looked at is to be measured anew; one in a round is, so that they do not add up.

        `have_rivals` say of each of its graphs whether there is anything to hold it against that a look does not.
        """
        schedule = self._schedules.setdefault(family, _Schedule(round_ + FIRST - 1 + stagger()))
        if round_ < schedule.at or round_ == self._latest or not self._is_affordable():
            return False
        if not any(has_rivals() for has_rivals in have_rivals):
            return False
        self._latest = round_
        # One that is called no more, and so is not begun with, must not keep others from their turn for ever.
        schedule.at, schedule.is_given = round_ + FIRST, True
        return True

    def begun(self, family: int, round_: int) -> None:
        """Note that it is: its turn comes again after twice as many rounds. For each of its graphs, in whatever order."""
        schedule = self._schedules.get(family)
        if schedule is not None and schedule.is_given:
            schedule.every *= 2
            schedule.at, schedule.is_given = round_ + schedule.every, False

    def changed(self, family: int) -> None:
        """Note that a family has come to run otherwise: what was found by mistake must not stay for long."""
        self._schedules.pop(family, None)

    def _is_affordable(self) -> bool:
        return self._report.measuring_ms <= SHARE * 1e3 * (self._clock() - self._began_s)


@dataclass(slots=True)
class _Schedule:
    """When a family is measured anew, in rounds."""

    at: int
    every: int = FIRST
    is_given: bool = False
    """Whether its turn has come, and it is not begun with."""
