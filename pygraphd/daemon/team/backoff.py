"""When to try again after failures: after a second, then twice as long each time, up to minutes, spread at random."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Backoff:
    """The time of the next try. Of many daemons whose server went away at one moment, few come back at one moment."""

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._clock = clock
        self._chance = chance
        self._pause_s = 0.0
        self._due = 0.0

    @property
    def has_failed(self) -> bool:
        """Whether the latest try has failed."""
        return self._pause_s > 0

    @property
    def wait_s(self) -> float:
        """Seconds until the next try; 0: it is due."""
        return max(self._due - self._clock(), 0.0) if self.has_failed else 0.0

    def failed(self) -> None:
        """Note a failure: the next try is due after half of the pause to all of it."""
        self._pause_s = min(max(2 * self._pause_s, self._first_s), self._longest_s)
        self._due = self._clock() + self._pause_s * (1 + self._chance()) / 2

    def succeeded(self) -> None:
        """Note that all is well."""
        self._pause_s = 0.0
