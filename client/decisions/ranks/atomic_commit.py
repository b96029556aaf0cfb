"""Atomic commit among the ranks of a process group: all of them take a step, or none does. Needs no torch.

Each rank votes once. A vote for the step adds to a counter, and the rank with the last vote writes COMMIT into a write-once register. A
vote against it writes the reason there, and so does a rank that has waited for the limit. The first write holds for all ranks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from pygraphd.client.decisions.ranks.write_once import OPERATION_S, RegisterError

if TYPE_CHECKING:
    from collections.abc import Callable

COMMIT = "commit"
"""The value of the register if all ranks take the step. Any other value is the reason why none does."""
LATE = "{} of {} ranks came in time"
UNREACHABLE = "a rank could not reach the group's store"
STALE = "the group's store has the votes of an earlier job"
"""Result where a counter holds more votes than there are ranks. The store of an elastic launcher may outlive a restart, and the register
is then that of earlier processes."""
IN_DOUBT = "the group's store does not tell"
FIRST_POLL_S = 0.0005
LONGEST_POLL_S = 0.02
"""Longest time in seconds between the polls of a waiting rank; it doubles from `FIRST_POLL_S` on."""


class Counters(Protocol):
    """What a commit and `LateRanks` need of `write_once.Registers`. Every method may raise RegisterError, whether or not it took effect."""

    def count(self, key: str, votes: int) -> int:
        """Add votes to a counter; return the sum."""

    def write_text(self, key: str, value: str) -> str:
        """Write a value unless there is one; return the value of the register."""

    def read_text(self, key: str) -> str | None:
        """Return the value of a register, or None."""


class Ballot:
    """One rank's vote in one atomic commit of `ranks` ranks; the first `poll` casts it. Times are seconds of one monotonic clock.

    A rank is in doubt if it has voted and the store does not answer after the limit. It polls for `doubt_s` more seconds, and then returns
    IN_DOUBT.
    """

    def __init__(
        self, counters: Counters, key: str, ranks: int, now: float, limit_s: float, doubt_s: float = 0.0
    ) -> None:
        self._counters = counters
        self._key = key
        self._votes = f"{key}/votes"
        self._ranks = ranks
        self._deadline = now + limit_s
        # A rank that writes its reason at the deadline may take one more operation.
        self._end = self._deadline + OPERATION_S + doubt_s
        self._has_voted = False
        self._is_counted = False
        self._proposal: str | None = None
        self._result: str | None = None
        self.has_waited = False
        """Whether this rank has waited until the limit without a result."""

    def poll(self, now: float) -> str | None:
        """Vote, or read the result, by one or two operations of the store; return COMMIT or the reason against it, None while undecided."""
        if self._result is None:
            self.has_waited = self._has_voted and now >= self._deadline
            try:
                self._result = self._step(now)
            except RegisterError:
                # A vote that raised may have been counted, so only the register has the result. Other ranks need not wait until the limit.
                if self._proposal is None and not self._is_counted:
                    self._proposal = UNREACHABLE
                if now >= self._end:
                    self._result = IN_DOUBT
        return self._result

    def _step(self, now: float) -> str | None:
        if not self._has_voted:
            # Before the operation: one that raises may have been counted, and must not be repeated.
            self._has_voted = True
            votes = self._counters.count(self._votes, 1)
            self._is_counted = True
            self._proposal = COMMIT if votes == self._ranks else None
            return STALE if votes > self._ranks else None
        if self._proposal is None and now >= self._deadline:
            self._proposal = self._late()
        if self._proposal is not None:
            return self._counters.write_text(self._key, self._proposal)
        return self._counters.read_text(self._key)

    def _late(self) -> str:
        try:
            # Only for the text: the vote against holds also where the counter cannot be read.
            votes: object = self._counters.count(self._votes, 0)
        except RegisterError:
            votes = "some"
        return LATE.format(votes, self._ranks)

    def vote_against(self, why: str) -> None:
        """Vote against, instead of `poll`. Without this rank's vote there is no COMMIT, whether or not the store can be reached."""
        try:
            self._result = self._counters.write_text(self._key, why)
        except RegisterError:
            self._result = why


def vote(
    ballot: Ballot,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Any] = time.sleep,
    longest_s: float = LONGEST_POLL_S,
) -> str:
    """Vote for a step and wait for the result, with polls up to `longest_s` apart; return COMMIT, or the reason why no rank takes the step."""
    pause = FIRST_POLL_S
    while (result := ballot.poll(clock())) is None:
        sleep(pause)
        pause = min(2 * pause, longest_s)
    return result
