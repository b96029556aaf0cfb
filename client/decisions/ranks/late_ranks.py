"""Bounds the time that a process group loses to ranks that do not come to an attempt to record a graph with collectives. Needs no torch.

A rank waits in vain if others never come to its call, as where ranks see different sizes. While it waits, the others wait for it in
collectives, and then wait in attempts of their own. So what counts is the number of waits on all ranks of the group together, which is in the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygraphd.client.decisions.ranks.atomic_commit import Counters

MAX_LATE = 3
"""Waits in vain, on all ranks of a group together, after which no attempt is made: each takes up to 30 s, and a rank may run without PyGraph."""
TOO_LATE = f"ranks were late {MAX_LATE} times"


class LateRanks:
    """The number of waits in vain in one group, as far as this rank knows. It holds if the store fails, for which
    `read` and `tell` raise RegisterError. Threads may share it.

    Wait number n is a register, written by each rank whose wait has begun when there were n. So waits that overlap count once, on
    however many ranks: they hold the job up only once.
    """

    def __init__(self, group: str) -> None:
        """Count for the group with this name, which no other group of the job has."""
        self._prefix = f"late/{group}/"
        self.count = 0

    def read(self, counters: Counters) -> int:
        """Return the number of waits in vain on all ranks of the group, `MAX_LATE` at most, by one operation if there is no new one."""
        count = self.count  # of this thread: a register that two threads read at once counts once
        while count < MAX_LATE and counters.read_text(f"{self._prefix}{count}") is not None:
            count += 1
        self.count = max(self.count, count)
        return self.count

    def note(self, count_before: int) -> None:
        """Note a wait in vain of this rank, for this rank; there were `count_before` when it began."""
        self.count = max(self.count, count_before + 1)

    def tell(self, counters: Counters, count_before: int) -> None:
        """Tell the other ranks of a wait in vain of this rank, and of those before, which the store may not have: it failed, or is a new one."""
        for number in range(count_before + 1):
            counters.write_text(f"{self._prefix}{number}", "late")
