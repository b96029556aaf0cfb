"""Finds out which graphs this process measures, and which of them another process measures already. Needs no torch.

Of many processes that meet an unknown graph at once, the daemon grants one the lease to measure it; the others run KERNELS, poll, and
adopt the answer when it is there. Without a daemon every process measures.
"""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pygraphd.client.common.backoff import Backoff
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Decision, Entry, Graph, Measurement, portions
from pygraphd.schema.reasons import Reason
from pygraphd.schema.summary import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from pygraphd.client.decisions.cache import Cache

_T = TypeVar("_T")
FIRST_POLL_S = 0.5
"""Seconds until the first poll for the answer of another process; each further wait is twice as long."""
LONGEST_POLL_S = 10.0
"""The longest wait in seconds. A poll costs some milliseconds: then less than a thousandth of the time."""


class LeaseState(enum.Enum):
    """The process that measures a graph."""

    OPEN = "no process has been asked yet"
    OTHERS = "another process measures it"
    OURS = "this process measures it"


TRANSITIONS: Mapping[LeaseState, frozenset[LeaseState]] = {
    LeaseState.OPEN: frozenset({LeaseState.OTHERS, LeaseState.OURS}),
    LeaseState.OTHERS: frozenset({LeaseState.OTHERS, LeaseState.OURS}),
    LeaseState.OURS: frozenset(),
}


@dataclass(slots=True, eq=False)
class PendingGraph:
    """A partition's graph that has no decision in this process yet. Holds no callable, so that memory goes with the model."""

    graph: Graph
    environment: Environment
    rejected: Entry | None = None
    """The entry of the cache that is not used."""
    rejection: Reason | None = None
    """Why `rejected` is not used as it is."""
    recorded_calls: float = -1.0
    """The number of calls in the entry of the cache; -1: there is no entry. Infinity: the entry is measured, if noisily, so nothing less is recorded."""
    unfinished_as: tuple[Decision, Source] | None = None
    """The decision to report if the program ends first, or if the validation holds; None: the graph had too few calls."""
    is_recorded: bool = False
    """Whether the result of this process is recorded, although the group has no decision yet."""
    calls: int = 0
    state: LeaseState = LeaseState.OPEN
    answer: Entry | None = None
    """The decision of the process that measured it."""
    measurements: tuple[Measurement, ...] = ()
    """The measurements of this process, once the graph is decided."""
    was_called: bool = False
    """Whether it was called since the latest renewal: a graph that is not called is not kept from others."""


class Leases:
    """The pending graphs of one process, and which process measures each."""

    def __init__(
        self, cache: Cache, trusted: Callable[[Entry], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Ask through `cache`; an answer is adopted if it is final and `trusted`."""
        self._cache = cache
        self._trusted = trusted
        self._clock = clock
        self._pending: dict[PendingGraph, None] = {}
        self._polls = Backoff(FIRST_POLL_S, longest=LONGEST_POLL_S)
        # No time before a daemon has granted for how long: until then there is no lease to keep.
        self._renewal_s = self._renew_at = float("inf")
        self._asking = threading.Lock()

    def add(self, pending: PendingGraph) -> None:
        """Note a graph that will have to be measured."""
        self._pending[pending] = None

    def remove(self, pending: PendingGraph) -> None:
        """Forget a graph: it is decided, or its model is gone. Takes no lock, so that it may be called while garbage is collected."""
        self._pending.pop(pending, None)

    def is_left_to_others(self, pending: PendingGraph) -> bool:
        """Return whether a graph waits for another process."""
        return pending in self._pending and pending.state is LeaseState.OTHERS

    def acquire(self, pending: PendingGraph) -> Entry | LeaseState:
        """Return which process measures a graph, or the answer of the other one. Costs next to nothing between two polls."""
        if (answer := pending.answer) is not None:
            return answer
        if pending not in self._pending:
            return LeaseState.OURS
        if pending.state is LeaseState.OTHERS and not self._polls.is_due(self._clock()):
            return LeaseState.OTHERS
        # No call waits for the request of another thread.
        if pending.state is not LeaseState.OURS and self._asking.acquire(blocking=False):
            try:
                self._ask(pending)
            finally:
                self._asking.release()
        return pending.answer or (LeaseState.OURS if pending.state is LeaseState.OURS else LeaseState.OTHERS)

    def renew(self, pending: PendingGraph) -> None:
        """Prolong the leases of this process if it is time to; to be called while a graph is measured.

        A failed request is repeated a third of a lease later. `Cache` limits the time of each, and of how many failures.
        """
        pending.was_called = True
        if self._clock() < self._renew_at or not self._asking.acquire(blocking=False):
            return
        try:
            # A copy: `remove` runs in any thread, without the lock.
            called = [each for each in list(self._pending) if each.was_called]
            for each in called:
                each.was_called = False
            # Before the request: one that fails, or that a signal handler ends, is made again after this. The daemon may be
            # back by then, and without a lease it would have another process measure the same graph.
            self._renew_at = self._clock() + self._renewal_s
            for environment, some in by_environment((each.environment, each) for each in called).items():
                self._lease(environment, some)
        finally:
            self._asking.release()

    # --- asking the daemon ---

    def _ask(self, pending: PendingGraph) -> None:
        """Ask for the lease of an open graph, or poll for the answers to all graphs that others measure."""
        if pending.state is LeaseState.OPEN:
            self._ask_about([pending])
            return
        self._ask_about([each for each in list(self._pending) if each.state is LeaseState.OTHERS])
        self._polls.postpone(self._clock())

    def _ask_about(self, graphs: Sequence[PendingGraph]) -> None:
        for environment, some in by_environment((each.environment, each) for each in graphs).items():
            # The lease first: an answer stored between the two requests is then found, not measured again.
            granted = self._lease(environment, some)
            if granted is not None:
                self._look_up(environment, some)
            for each in some:
                # A lease may be granted beside an answer. `acquire` then returns the answer.
                is_ours = granted is None or each.graph.digest in granted
                self._enter(each, LeaseState.OURS if is_ours else LeaseState.OTHERS)

    def _lease(self, environment: Environment, graphs: Sequence[PendingGraph]) -> frozenset[str] | None:
        """Return the digests that this process may measure; None: no daemon answers, so it may measure all."""
        granted: set[str] = set()
        for some in _requests(graphs):
            answer = self._cache.lease(environment, some)
            if answer is None:
                return None
            self._renewal_s = answer.seconds / 3
            self._renew_at = self._clock() + self._renewal_s
            granted.update(answer.granted)
        return frozenset(granted)

    def _look_up(self, environment: Environment, graphs: Sequence[PendingGraph]) -> None:
        entries: dict[str, Entry] = {}
        for some in _requests(graphs):
            entries |= self._cache.lookup(environment, some)
        for each in graphs:
            entry, rejected = entries.get(each.graph.digest), each.rejected
            if entry is None or not entry.decision.final or not self._trusted(entry):
                continue
            # The cache may still have the very entry that was rejected here.
            if rejected is None or not entry.rests_on_the_same(rejected):
                each.answer = entry

    def _enter(self, pending: PendingGraph, state: LeaseState) -> None:
        if pending not in self._pending or state not in TRANSITIONS[pending.state]:
            return  # decided meanwhile, or answered twice
        if state is LeaseState.OTHERS and not any(each.state is state for each in list(self._pending)):
            self._polls = Backoff(FIRST_POLL_S, longest=LONGEST_POLL_S, now=self._clock())
        pending.state = state


def by_environment(things: Iterable[tuple[Environment, _T]]) -> dict[Environment, list[_T]]:
    """Return things by their environment: a request to the daemon is for one."""
    sorted_out: dict[Environment, list[_T]] = {}
    for environment, each in things:
        sorted_out.setdefault(environment, []).append(each)
    return sorted_out


def _requests(graphs: Sequence[PendingGraph]) -> list[Sequence[str]]:
    return portions([each.graph.digest for each in graphs])
