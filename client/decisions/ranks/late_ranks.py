"""Bounds the time that a process group loses to ranks that do not come to an attempt to record a graph with collectives. Needs no torch.

A rank waits in vain if others never come to its call, as where ranks see different sizes. While it waits, the others wait for it in
collectives, and then wait in attempts of their own. So what counts is the number of waits on all ranks of the group together, which is in the store.
"""

from __future__ import annotations

from typing import Protocol

MAX_LATE = 3
"""Waits in vain, on all ranks of a group together, after which no attempt is made: each takes up to 30 s, and a rank may run without PyGraph."""
TOO_LATE = f"ranks were late {MAX_LATE} times"


class Marks(Protocol):
    """The part of `write_once.Registers` that holds the count. Every method may raise RegisterError."""

    def write_text(self, key: str, value: str) -> str:
        """Write a value unless there is one; return the value of the register."""

    def read_text(self, key: str) -> str | None:
        """Return the value of a register, or None."""


class LateRanks:
    """The number of waits in vain in one group, as far as this rank knows. It holds if the store fails. Threads may share it.

    Wait number n is a register, written by each rank whose wait has begun when there were n. So waits that overlap count once, on
    however many ranks: they hold the job up only once.
    """

    def __init__(self, group: str) -> None:
        """Count for the group with this name, which no other group of the job has."""
        self._prefix = f"late/{group}/"
        self.count = 0

    def read(self, marks: Marks) -> int:
        """Return the number of waits in vain on all ranks of the group, `MAX_LATE` at most, by one operation if there is no new one."""
        count = self.count  # of this thread: a mark that two threads read at once counts once
        while count < MAX_LATE and marks.read_text(f"{self._prefix}{count}") is not None:
            count += 1
        self.count = max(self.count, count)
        return self.count

    def note(self, count_before: int) -> None:
        """Note a wait in vain of this rank, for this rank; there were `count_before` when it began."""
        self.count = max(self.count, count_before + 1)

    def tell(self, marks: Marks, count_before: int) -> None:
        """Tell the other ranks of a wait in vain of this rank, and of those before, which the store may not have: it failed, or is a new one."""
        for number in range(count_before + 1):
            marks.write_text(f"{self._prefix}{number}", "late")
