"""Bounds the time that a process spends on recordings of dynamic sizes: by an allowance, a share of the time, and the time that graphs save.

A size may come back often, or never again: nobody knows how much its recording will save. So where sizes save much, the next ones may be
recorded soon, and where they save little, recordings cost a small share of the time. Needs no torch.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ALLOWANCE_S = 1.0
"""Seconds that recordings may cost at once."""
SHARE = 0.02
"""Share of the elapsed time that recordings may cost besides, however little they save."""
FREE_SIZES = 2
"""Sizes of a graph whose first recordings cost the budget nothing, as those of a graph without dynamic sizes: many programs have no more."""
CONSEQUENCES = 1.6
"""Time that a recording costs a program, over the time that it takes itself: PyTorch's free memory is given back for it, so that later calls
allocate anew."""
EXPECTED_S = 0.3
"""Seconds that are charged for a size at its setup, until a recording has been timed; then it is the mean of all recordings of sizes.
Once its own recording is made, that counts instead. If none is made, time pays for it, or it is given back when the size makes room."""
SAVED_EVERY_S = 0.25
"""Least seconds between two counts of the time that recordings took and saved: each asks all decided sizes."""
COUNTING_SHARE = 0.01
"""Largest share of the time that such counts take."""
ASKED_EVERY_S = 0.005
"""Seconds for which the answer holds that the budget is spent: each call of a size that waits asks."""


class KernelsTime:
    """The shortest host time of a graph's calls as KERNELS in microseconds; None: there was no call.

    No call as KERNELS takes less, whatever its size: its kernels have to be launched.
    """

    def __init__(self) -> None:
        self.least_us: float | None = None

    def note(self, host_us: float) -> None:
        """Note one call."""
        if self.least_us is None or host_us < self.least_us:
            self.least_us = host_us


class Account:
    """The time that recordings of one size cost, and the time that its graph saved."""

    def __init__(
        self,
        kernels: KernelsTime,
        recording_us: Callable[[], float] = lambda: 0.0,
        replays: Callable[[], int] = lambda: 0,
        saving_us: Callable[[float | None], float | None] = lambda _: None,
    ) -> None:
        """Take functions that return the microseconds of recording so far, the calls as a GRAPH, and the microseconds that such a call saves.

        The last one is given the least time of a call as KERNELS; None: it is not known.
        """
        self._kernels = kernels
        self._recording_us, self._replays, self._saving_us = recording_us, replays, saving_us
        self._counted_us = 0.0
        self._counted = 0
        self.is_free = False
        """Whether the next recording costs the budget nothing."""
        self.charged_s = 0.0
        """Seconds charged for a recording that has not been made yet."""

    def recorded_s(self) -> float:
        """Return the seconds that recordings since the last time cost."""
        before_us, self._counted_us = self._counted_us, self._recording_us()
        return CONSEQUENCES * max(self._counted_us - before_us, 0.0) / 1e6

    def saved_s(self) -> float:
        """Return the seconds that were saved since the last time."""
        saving_us = self._saving_us(self._kernels.least_us)
        if saving_us is None:
            return 0.0  # these calls count once it is known
        before, self._counted = self._counted, self._replays()
        return max(self._counted - before, 0) * max(saving_us, 0.0) / 1e6


def _live(accounts: set[weakref.ref[Account]]) -> list[Account]:
    return [account for each in list(accounts) if (account := each()) is not None]


class TimeBudget:
    """The time budget of a process. An account goes when nobody else holds it; time then pays what it was charged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the time in seconds from `clock`."""
        self._clock = clock
        self._owed_s = 0.0
        self._recorded_s, self._recorded = 0.0, 0
        self._paid_at_s = clock()
        self._count_at_s = self._paid_at_s
        self._spent_until_s = self._paid_at_s
        # No `WeakSet`, of which a handler that sets up a size would end an iteration.
        self._accounts = set[weakref.ref[Account]]()
        # Reentrant: a signal handler may call a graph.
        self._changing = threading.RLock()

    def is_spent(self) -> bool:
        """Return whether a further size has to wait. While no recording was timed, it also waits for one that is expected."""
        now_s = self._clock()
        if now_s < self._spent_until_s:
            return True
        debt_s = self._debt_s()
        if is_spent := debt_s > (ALLOWANCE_S if self._recorded else 0.0):
            self._spent_until_s = now_s + ASKED_EVERY_S
        return is_spent

    def setups_now(self) -> int:
        """Return how many sizes may be set up before the budget is spent."""
        left_s = ALLOWANCE_S - self._debt_s()
        return int(left_s / self._each_s) + 1 if left_s >= 0 else 0

    def open(self, account: Account, *, is_recorded: bool, is_free: bool = False) -> None:
        """Charge a size that is set up, if it is to be recorded and not free, and count from now on what it saves."""
        with self._changing:
            self._accounts.add(weakref.ref(account, self._accounts.discard))
            account.is_free = is_free
            if is_recorded and not is_free:
                account.charged_s = self._each_s
                self._owed_s += account.charged_s

    def close(self, account: Account) -> None:
        """Count a size for the last time, and give its charge back if it was not recorded."""
        with self._changing:
            self._owe(-self._count([account]))
            self._let_go(account)
            self._spent_until_s = self._paid_at_s

    @property
    def _each_s(self) -> float:
        return self._recorded_s / self._recorded if self._recorded else EXPECTED_S

    def _debt_s(self) -> float:
        """Return the seconds that recordings have cost and are about to cost, as far as they are not paid."""
        with self._changing:
            now_s = self._clock()
            paid_s, self._paid_at_s = SHARE * (now_s - self._paid_at_s), now_s
            if now_s >= self._count_at_s:
                began_s = time.perf_counter()
                paid_s += self._count(_live(self._accounts))
                took_s = time.perf_counter() - began_s
                self._count_at_s = now_s + max(SAVED_EVERY_S, took_s / COUNTING_SHARE)
            self._owe(-paid_s)
            return self._owed_s

    def _count(self, accounts: Iterable[Account]) -> float:
        """Note the recordings of some sizes; return the seconds that they saved."""
        saved_s = 0.0
        for account in accounts:
            try:
                recorded_s = account.recorded_s()
                saved_s += account.saved_s()
            except Exception:  # noqa: BLE001 - whatever it is: one size must not keep all others from being recorded
                self._let_go(account)
                continue
            if recorded_s:
                self._owe(0.0 if account.is_free else recorded_s - account.charged_s)
                account.is_free, account.charged_s = False, 0.0
                self._recorded_s += recorded_s
                self._recorded += 1
        return saved_s

    def _let_go(self, account: Account) -> None:
        self._accounts.discard(weakref.ref(account))
        self._owe(-account.charged_s)
        account.charged_s = 0.0

    def _owe(self, seconds: float) -> None:
        """Add to the debt, or reduce it: time and savings beyond it are not kept for later."""
        self._owed_s = max(self._owed_s + seconds, 0.0)
