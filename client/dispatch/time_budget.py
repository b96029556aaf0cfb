"""Bounds the time that a process spends on recordings of dynamic sizes: by an allowance, a share of the time, and the time that graphs save.

A size may come back often, or never again: nobody knows how much its recording will save. So where sizes save much, the next ones may be
recorded soon, and where they save little, recordings cost a small share of the time. Needs no torch.
"""

from __future__ import annotations

import statistics
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ALLOWANCE_S = 1.0
"""Seconds that recordings may cost at once."""
SHARE = 0.02
"""Share of the elapsed time that recordings may cost besides, however little they save."""
CONSEQUENCES = 1.6
"""Time that a recording costs a program, over the time that it takes itself: PyTorch's free memory is given back for it, so that later calls
allocate anew."""
EXPECTED_S = 0.3
"""Seconds that are charged for a size at its setup, until a recording has been timed; then it is the mean of all recordings of sizes.
The difference from the time that its own recording took is charged when that is made."""
SAVED_EVERY_S = 0.25
"""Seconds between two counts of the time that was saved: each asks all decided sizes."""
KERNELS_CALLS = 15
"""Calls as KERNELS whose median says what such a call takes: single ones load kernels or wait for the GPU."""


class KernelsTime:
    """The host time of a graph's calls as KERNELS, over its latest `KERNELS_CALLS`."""

    def __init__(self) -> None:
        self._us = deque[float](maxlen=KERNELS_CALLS)

    def note(self, host_us: float) -> None:
        """Note one call, in microseconds."""
        self._us.append(host_us)

    @property
    def median_us(self) -> float:
        """The median in microseconds; 0 before the first call."""
        return statistics.median(self._us) if self._us else 0.0


class Account:
    """The time that recording one size took, and the time that its graph saved."""

    def __init__(
        self,
        kernels: KernelsTime,
        recording_us: Callable[[], float] = lambda: 0.0,
        replays: Callable[[], int] = lambda: 0,
        call_us: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Take the present state of the size from functions.

        They return the microseconds of recording so far, the calls as a GRAPH, and what such a call takes in microseconds (None: not known).
        """
        self._kernels = kernels
        self._recording_us, self._replays, self._call_us = recording_us, replays, call_us
        self._counted_us = 0.0
        self._counted = 0
        self.charged_s = 0.0
        """Seconds charged for a recording that has not been made yet."""

    def recorded_s(self) -> float:
        """Return the seconds that recordings since the last time cost."""
        before_us, self._counted_us = self._counted_us, self._recording_us()
        return CONSEQUENCES * max(self._counted_us - before_us, 0.0) / 1e6

    def saved_s(self) -> float:
        """Return the seconds that were saved since the last time: a call as KERNELS takes as long as the host needs for it, or longer."""
        call_us = self._call_us()
        if call_us is None:
            return 0.0  # these calls count once it is known
        before, self._counted = self._counted, self._replays()
        return max(self._counted - before, 0) * max(self._kernels.median_us - call_us, 0.0) / 1e6


class TimeBudget:
    """The time budget of a process. An account goes when nobody else holds it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the time in seconds from `clock`."""
        self._clock = clock
        self._owed_s = 0.0
        self._recorded_s, self._recorded = 0.0, 0
        self._paid_at_s = self._saved_at_s = clock()
        self._accounts = weakref.WeakSet[Account]()
        self._expected = weakref.WeakSet[Account]()
        # Reentrant: a signal handler may call a graph.
        self._changing = threading.RLock()

    def is_spent(self) -> bool:
        """Return whether a further size has to wait."""
        return self._debt_s() > ALLOWANCE_S

    def setups_now(self) -> int:
        """Return how many sizes may be set up before the budget is spent."""
        left_s = ALLOWANCE_S - self._debt_s()
        return int(left_s / self._each_s) + 1 if left_s >= 0 else 0

    def open(self, account: Account, *, is_recorded: bool) -> None:
        """Charge a size that is set up, if it is to be recorded, and count from now on what it saves."""
        with self._changing:
            self._accounts.add(account)
            if is_recorded:
                account.charged_s = self._each_s
                self._owed_s += account.charged_s
                self._expected.add(account)

    def close(self, account: Account) -> None:
        """Count a size for the last time."""
        with self._changing:
            self._count_recorded([account])
            self._owed_s -= account.saved_s()
            self._accounts.discard(account)
            self._expected.discard(account)

    @property
    def _each_s(self) -> float:
        return self._recorded_s / self._recorded if self._recorded else EXPECTED_S

    def _debt_s(self) -> float:
        """Return the seconds that recordings have taken and are about to take, as far as they are not paid."""
        with self._changing:
            now_s = self._clock()
            self._owed_s -= SHARE * (now_s - self._paid_at_s)
            self._paid_at_s = now_s
            if now_s - self._saved_at_s >= SAVED_EVERY_S:
                self._saved_at_s = now_s
                self._count_recorded(list(self._accounts))
                self._owed_s -= sum(each.saved_s() for each in list(self._accounts))
            else:
                self._count_recorded(list(self._expected))
            # What is paid beyond the debt is not kept for later.
            self._owed_s = max(self._owed_s, 0.0)
            return self._owed_s

    def _count_recorded(self, accounts: list[Account]) -> None:
        for account in accounts:
            if recorded_s := account.recorded_s():
                self._owed_s += recorded_s - account.charged_s
                account.charged_s = 0.0
                self._expected.discard(account)
                self._recorded_s += recorded_s
                self._recorded += 1
