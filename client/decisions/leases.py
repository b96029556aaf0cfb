"""Which graphs this process measures itself, and which it leaves to another that is at it already. Knows nothing of torch.

Of many processes that meet an unknown graph at once, the daemon lets one measure; the others launch, ask now and then, and
take up the answer when it is there. Without a daemon everybody measures.
"""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.client.common.backoff import Backoff
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import MAX_GRAPHS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pygraphd.client.decisions.service import Cache
    from pygraphd.schema.messages import Entry

FIRST_POLL_S = 0.5
"""Seconds until the first poll for the answer of another process; each further wait is twice as long."""
LONGEST_POLL_S = 10.0
"""The longest wait in seconds. A poll costs some milliseconds: then less than a thousandth of the time."""


class Turn(enum.Enum):
    """Who measures a graph."""

    OPEN = "nobody has been asked yet"
    OTHERS = "another process measures it"
    OURS = "this process measures it"


TRANSITIONS: Mapping[Turn, frozenset[Turn]] = {
    Turn.OPEN: frozenset({Turn.OTHERS, Turn.OURS}),
    Turn.OTHERS: frozenset({Turn.OTHERS, Turn.OURS}),
    Turn.OURS: frozenset(),
}


@dataclass(frozen=True, slots=True, eq=False)
class Interest:
    """A region that is not decided: its graph's digest, its environment, and a number that a forward shares with its backward."""

    environment: Environment
    graph: str
    family: int
    is_backward: bool


class Claims:
    """The undecided regions of one process, and whose turn it is to measure each."""

    def __init__(
        self, cache: Cache, trusted: Callable[[Entry], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Ask through `cache`; an answer is taken up if it is final and `trusted`."""
        self._cache = cache
        self._trusted = trusted
        self._clock = clock
        self._turns: dict[Interest, Turn] = {}
        self._answers: dict[Interest, Entry] = {}
        self._rejected: dict[Interest, Entry] = {}
        self._forwards: dict[int, set[Interest]] = {}
        """Of each family, those that are not ours."""
        self._measuring: set[Interest] = set()
        """Ours that were called since the last renewal: what is not called is not kept from others."""
        self._polls = Backoff(FIRST_POLL_S, longest=LONGEST_POLL_S)
        self._renew_at = float("inf")
        self._asking = threading.Lock()

    def add(self, interest: Interest, rejected: Entry | None = None) -> None:
        """Note a region that will have to be measured; `rejected` is what the cache says and what is not believed."""
        self._turns[interest] = Turn.OPEN
        if not interest.is_backward:
            self._forwards.setdefault(interest.family, set()).add(interest)
        if rejected is not None:
            self._rejected[interest] = rejected

    def remove(self, interest: Interest) -> None:
        """Forget a region: it is decided, or gone."""
        self._turns.pop(interest, None)
        self._answers.pop(interest, None)
        self._rejected.pop(interest, None)
        self._measuring.discard(interest)
        self._no_longer_ahead(interest)

    def is_left_to_others(self, interest: Interest) -> bool:
        """Whether it waits for another process, or for its forward that does."""
        return self._turns.get(interest) is Turn.OTHERS or self._follows(interest)

    def turn(self, interest: Interest) -> Entry | Turn:
        """Return whose turn it is, or another process's answer; between two looks this costs next to nothing."""
        if (answer := self._answers.get(interest)) is not None:
            return answer
        turn = self._turns.get(interest, Turn.OURS)
        if turn is Turn.OTHERS and not self._polls.is_due(self._clock()):
            return turn
        if turn is not Turn.OURS and not self._follows(interest) and self._asking.acquire(blocking=False):
            try:
                self._ask(interest)
            finally:
                self._asking.release()
        turn = self._turns.get(interest, Turn.OURS)
        return self._answers.get(interest) or (Turn.OTHERS if turn is Turn.OPEN else turn)

    def keep(self, interest: Interest) -> None:
        """Prolong what is ours, if it is time to; to be called while measuring."""
        if interest in self._turns:
            self._measuring.add(interest)
        if self._clock() < self._renew_at or not self._asking.acquire(blocking=False):
            return
        try:
            ours, self._measuring = self._measuring, set()
            self._renew_at = float("inf")
            for environment, some in _by_environment(ours).items():
                self._lease(environment, some)
        finally:
            self._asking.release()

    # --- asking ---

    def _follows(self, interest: Interest) -> bool:
        """Whether a backward has to wait since its forward is not ours: the two are measured together."""
        return interest.is_backward and bool(self._forwards.get(interest.family))

    def _no_longer_ahead(self, interest: Interest) -> None:
        ahead = self._forwards.get(interest.family)
        if ahead is not None:
            ahead.discard(interest)
            if not ahead:
                del self._forwards[interest.family]

    def _ask(self, interest: Interest) -> None:
        """Ask about one that is open; or, if it is time to look, about all that others measure."""
        if self._turns.get(interest) is Turn.OPEN:
            self._ask_about([interest])
            return
        self._ask_about([each for each, turn in list(self._turns.items()) if turn is Turn.OTHERS])
        self._polls.postpone(self._clock())

    def _ask_about(self, interests: Sequence[Interest]) -> None:
        for environment, some in _by_environment(interests).items():
            granted = self._lease(environment, some)
            if granted is not None:
                self._look_up(environment, some)
            for interest in some:
                ours = granted is None or interest.graph in granted
                self._enter(interest, Turn.OURS if ours else Turn.OTHERS)

    def _lease(self, environment: Environment, interests: Sequence[Interest]) -> frozenset[str] | None:
        """Return the graphs that this process may measure; None: there is nobody to ask, so all."""
        granted: set[str] = set()
        for some in _portions(interests):
            answer = self._cache.lease(environment, [each.graph for each in some])
            if answer is None:
                return None
            self._renew_at = self._clock() + answer.seconds / 3
            granted.update(answer.granted)
        return frozenset(granted)

    def _look_up(self, environment: Environment, interests: Sequence[Interest]) -> None:
        entries: dict[str, Entry] = {}
        for some in _portions(interests):
            entries |= self._cache.lookup(environment, [each.graph for each in some])
        for interest in interests:
            entry = entries.get(interest.graph)
            if entry is not None and entry.decision.final and self._believes(interest, entry):
                self._answers[interest] = entry

    def _believes(self, interest: Interest, entry: Entry) -> bool:
        rejected = self._rejected.get(interest)
        return self._trusted(entry) and (rejected is None or not entry.rests_on_the_same(rejected))

    def _enter(self, interest: Interest, turn: Turn) -> None:
        now = self._turns.get(interest)
        if now is None:
            return  # decided meanwhile
        if turn not in TRANSITIONS[now]:
            raise RuntimeError(f"a graph's turn cannot go from {now.name} to {turn.name}")
        if turn is Turn.OTHERS and Turn.OTHERS not in self._turns.values():
            self._polls = Backoff(FIRST_POLL_S, longest=LONGEST_POLL_S, now=self._clock())
        self._turns[interest] = turn
        if turn is Turn.OURS:
            self._no_longer_ahead(interest)


def _by_environment(interests: Iterable[Interest]) -> dict[Environment, list[Interest]]:
    sorted_out: dict[Environment, list[Interest]] = {}
    for interest in interests:
        sorted_out.setdefault(interest.environment, []).append(interest)
    return sorted_out


def _portions(interests: Sequence[Interest]) -> list[Sequence[Interest]]:
    """Return what may be asked about in one request, each."""
    return [interests[start : start + MAX_GRAPHS] for start in range(0, len(interests), MAX_GRAPHS)]
