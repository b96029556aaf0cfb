"""Has the ranks of a process group record a graph with collectives in the same call, or not at all. Needs no torch.

The replay of a verification runs the collectives of its graph once more. On one rank alone it would wait for the others, or be matched
with a later collective of other ranks. A recording may also send wrong values to other ranks while its own results are right. Two atomic commits keep
the ranks together: before the first replay, and before any rank serves calls by its recording. At any later call a rank may run KERNELS
alone, since its collectives match those of a replay.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend.errors import RanksError
from pygraphd.client.decisions.ranks.atomic_commit import COMMIT, LONGEST_POLL_S, Ballot, Counters, vote

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = (("captured", 10.0), ("compared", 30.0))
"""The steps, and the seconds for which a rank waits there for the others. A capture takes up to seconds, a comparison a few more."""
MORE_DOUBT_S = 120.0
"""Seconds beyond the time-out of the group. By then c10d has ended the ranks that wait in KERNELS, which they run after their replay."""
FOR_GOOD = "never: "
"""Prefix of a vote against whose reason holds as long as its rank lives."""


class Lockstep:
    """One rank's attempt to record a graph with collectives, together with all ranks of the group of these collectives.

    `attempt` is the name of the attempt: the same on all ranks, and unique. `timeout_s` is how long the group waits for a collective. A
    rank that cannot read the result of the first vote polls for longer than that. Meanwhile it neither replays nor runs KERNELS, since
    either could be matched with other collectives of the other ranks.
    """

    def __init__(
        self,
        counters: Counters,
        attempt: str,
        ranks: int,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] = time.sleep,
        longest_poll_s: float = LONGEST_POLL_S,
        group: str = "",
        late_before: int = 0,
        present_timeout_s: Callable[[], float] | None = None,
    ) -> None:
        self._counters = counters
        self._attempt = attempt
        self._ranks = ranks
        self.timeout_s = timeout_s
        self.present_timeout_s = present_timeout_s or (lambda: timeout_s)
        """Returns the time-out of the group at any later time, since the program may change it."""
        self._clock = clock
        self._sleep = sleep
        self._longest_poll_s = longest_poll_s
        self.group = group
        """The name of the group among all groups of the job."""
        self.late_before = late_before
        """How often ranks of the group had waited in vain when the attempt began; see `LateRanks`."""
        self.steps = 0
        """The number of steps that all ranks have taken. After the first one, each rank runs the collectives once more."""
        self.is_late = False
        """Whether this rank has waited until the limit in vain. One that comes later loses no time."""
        self._is_over = False

    def ballot(self) -> Ballot:
        """Return this rank's ballot on the next step."""
        name, limit_s = STEPS[self.steps]
        # Longer than the others may wait for this rank: else its collectives could be matched with those of a replay that still waits.
        # At the second vote a rank in doubt keeps KERNELS, which match the replays of others.
        doubt_s = 0.0 if self.steps else self.timeout_s + MORE_DOUBT_S
        key = f"{self._attempt}/{name}"
        return Ballot(self._counters, key, self._ranks, self._clock(), limit_s, doubt_s)

    def go_on(self) -> None:
        """Vote for the next step, and wait for the result; raises RanksError if no rank takes the step."""
        ballot = self.ballot()
        result = vote(ballot, self._clock, self._sleep, self._longest_poll_s)
        self.is_late = ballot.has_waited and result != COMMIT
        self.note(result)

    def note(self, result: str) -> None:
        """Note the result of a vote; raises RanksError unless the step is taken."""
        self._is_over = result != COMMIT or self.steps + 1 == len(STEPS)
        if result != COMMIT:
            raise RanksError(result.removeprefix(FOR_GOOD), for_good=result.startswith(FOR_GOOD))
        self.steps += 1

    def refuse(self, why: str, *, for_good: bool = False) -> None:
        """Vote against the next step, unless the attempt is over."""
        if not self._is_over:
            self._is_over = True
            self.ballot().vote_against(f"{FOR_GOOD}{why}" if for_good else why)
