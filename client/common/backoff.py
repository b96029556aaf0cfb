"""Lengthens the waits between attempts that keep failing."""

from __future__ import annotations


class Backoff:
    """Says when an attempt is due: first after `first`, then after waits that grow by `factor` with each attempt, up to `longest`.

    The unit is the caller's: seconds of a clock, or calls. Not thread-safe.
    """

    def __init__(
        self, first: float, factor: float = 2.0, longest: float = float("inf"), *, now: float = 0.0
    ) -> None:
        self._factor, self._longest = factor, longest
        self._wait, self._due = first, now + first
        self._calls = 0

    def is_due(self, now: float) -> bool:
        """Return whether an attempt is due."""
        return now >= self._due

    def postpone(self, now: float) -> None:
        """Note an attempt: the next one is due after a longer wait."""
        self._wait = min(self._wait * self._factor, self._longest)
        # From this attempt on, and not from when it was due: a late caller does not catch up.
        self._due = now + self._wait

    def count(self) -> bool:
        """Count a call, and return whether an attempt is due at it, which is noted then."""
        self._calls += 1
        if due := self.is_due(self._calls):
            self.postpone(self._calls)
        return due
