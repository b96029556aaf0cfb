"""Decides when the store of a process group is asked: after a failure not for a while, which grows. Needs no torch.

An operation on a store that does not answer takes seconds of the program's time. But a store may be back soon, as after a pause of the
process that serves it, so it is asked again.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

from pygraphd.client.common.backoff import Backoff
from pygraphd.client.decisions.ranks.write_once import RegisterError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.common.report import Report

FIRST_PAUSE_S = 10.0
"""Seconds without an operation after the first failure; they double with each failure that follows, until an operation succeeds."""
LONGEST_PAUSE_S = 600.0
"""Longest time in seconds without an operation."""
MAX_STORE_FAILURES = 20
"""Failures in all after which a rank does not ask the group's store again: each may take `write_once.OPERATION_S`."""
PAUSED = "the store has failed, and is not asked for a while"

_T = TypeVar("_T")


class Reachability:
    """Asks the store of one group, unless it has failed lately. Threads may share it: at worst, several of them meet the same failure."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._clock = clock
        self._failures = 0
        self._pauses: Backoff | None = None
        self._failing_since = self._failed_at = 0.0

    def ask(self, operation: Callable[[], _T]) -> _T:
        """Return the result of an operation on the store; raises RegisterError if it fails, and during a pause at once."""
        pauses, began = self._pauses, self._clock()
        if pauses is not None and (self._failures >= MAX_STORE_FAILURES or not pauses.is_due(began)):
            raise RegisterError(PAUSED)
        try:
            result = operation()
        except RegisterError as error:
            self._failed(began)
            self._report.count_failure(f"ranks: {error}")
            raise
        self._pauses = None
        return result

    def _failed(self, began: float) -> None:
        self._failures += 1
        now, pauses = self._clock(), self._pauses  # the operation may have taken seconds
        self._failed_at = now
        if pauses is None:
            self._failing_since = began
            self._pauses = Backoff(FIRST_PAUSE_S, longest=LONGEST_PAUSE_S, now=now)
        else:
            pauses.postpone(now)

    @property
    def failing_s(self) -> float:
        """For how many seconds the store had failed at the latest operation; 0 if that has succeeded, infinite if there will be no other.

        Without the pause after that: the store may have answered again since.
        """
        if self._pauses is None:
            return 0.0
        return float("inf") if self._failures >= MAX_STORE_FAILURES else self._failed_at - self._failing_since
