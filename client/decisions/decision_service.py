"""The decisions of one process: looks graphs up, acquires leases, publishes decisions, and reports each."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.client.common import log
from pygraphd.client.decisions import rules
from pygraphd.client.decisions.leases import Leases, LeaseState, PendingGraph, by_environment
from pygraphd.schema.messages import Decision, Entry, Graph, Measurement, Record
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.common.report import Report
    from pygraphd.client.decisions.cache import Cache
    from pygraphd.client.decisions.trust import TrustPolicy
    from pygraphd.schema.keys import Environment

LEFT_TO_ANOTHER = Reason(ReasonCode.LEFT_TO_ANOTHER_PROCESS)
DISPUTED = "measured anew, since a call takes over 20 % more or less here than where that was decided"
MAX_UNRECORDED = 64
"""How many graphs, destroyed with their model before a decision, may wait to be recorded. Beyond this number the next lookup sends their records."""


@dataclass(frozen=True, slots=True)
class LookupResult:
    """The stored entry of one graph: used, or rejected with a reason."""

    entry: Entry | None = None
    rejected: Entry | None = None
    rejection: Reason | None = None

    @property
    def text(self) -> str:
        """The state in words, for the log."""
        if self.rejection is not None:
            return str(self.rejection)
        return "unknown" if self.entry is None else self.entry.decision.deployment


UNKNOWN = LookupResult()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for a graph in this process.

    `measurements` is empty if nothing was measured. `adopted` is the entry of another process if its decision was used. `recording_us`
    is the host time of recording and verifying, in microseconds; 0 if nothing was recorded.
    """

    decision: Decision
    measurements: tuple[Measurement, ...] = ()
    adopted: Entry | None = None
    recording_us: float = 0.0


class DecisionService:
    """The decisions of one process. Its methods raise nothing that the cache may cause, and may be called from any thread."""

    def __init__(self, cache: Cache, trust: TrustPolicy, report: Report) -> None:
        self.cache = cache
        self.trust = trust
        self.report = report
        # PYGRAPH_REFRESH rejects what is stored, and not what another process measures meanwhile.
        leases = self._leases = Leases(cache, lambda entry: trust.why_not_trusted(entry) is None)
        self.acquire: Callable[[PendingGraph], Entry | LeaseState] = leases.acquire
        """Returns which process measures a graph, or the answer of another process that has."""
        self.renew: Callable[[PendingGraph], None] = leases.renew
        """Keeps the lease of a graph that is being measured."""
        self._pending: dict[PendingGraph, None] = {}
        # A deque, since the garbage collector appends to it in any thread and takes no lock.
        self._dropped: deque[PendingGraph] = deque()
        self._unrecorded: list[tuple[Environment, Record]] = []
        self._used: list[tuple[Environment, str]] = []
        """The entries of `look_up_sizes` that were used, as long as the daemon has not been told."""

    def look_up(self, graphs: Sequence[Graph], environment: Environment) -> dict[str, LookupResult]:
        """Return the stored entries of some graphs by digest; graphs without one are left out."""
        self._take_dropped(MAX_UNRECORDED)
        self._tell_used()
        found = self.cache.lookup(environment, [graph.digest for graph in graphs])
        known: dict[str, LookupResult] = {}
        for digest, entry in found.items():
            why = self.trust.why_rejected(entry)
            known[digest] = (
                LookupResult(entry) if why is None else LookupResult(rejected=entry, rejection=why)
            )
        for graph in graphs:
            state = known.get(graph.digest, UNKNOWN)
            log.info("%s: looked up: %s", graph.name, state.text)
            if state.entry is not None:
                self.cache.bundle.add_hit(environment, graph, state.entry)
        hits = sum(known.get(graph.digest, UNKNOWN).entry is not None for graph in graphs)
        self.report.count(looked_up=len(graphs), hits=hits, misses=len(graphs) - hits)
        return known

    def look_up_sizes(
        self, graph: Graph, environment: Environment, most: int
    ) -> dict[tuple[int, ...], LookupResult]:
        """Return the decided sizes of a graph, at most `most` of them and the most used first, by one request.

        Each that is used is to be noted by `use`.
        """
        known = {
            each.sizes: LookupResult(each.entry)
            for each in self.cache.sizes(environment, graph.digest, most)
            if self.trust.why_rejected(each.entry) is None
        }
        log.info("%s: %d of its sizes are known", graph.name, len(known))
        return known

    def use(self, graph: Graph, environment: Environment, known: LookupResult) -> None:
        """Note that an entry of `look_up_sizes` is used. The daemon is told with the next lookup, or at the end: it need not be soon."""
        assert known.entry is not None
        log.info("%s: looked up with its graph: %s", graph.name, known.text)
        self.cache.bundle.add_hit(environment, graph, known.entry)
        self.report.count(looked_up=1, hits=1)
        self._used.append((environment, graph.digest))

    def _tell_used(self) -> None:
        if not self._used:
            return
        used, self._used = self._used, []
        for environment, some in by_environment(used).items():
            self.cache.count_hits(environment, some)

    # --- graphs without a decision ---

    def open(self, pending: PendingGraph, owner: object, *, lease: bool = True) -> None:
        """Note a graph that has no decision yet, until `owner` goes with its model; `lease`: this process is going to measure it."""
        self._pending[pending] = None
        # Not at exit, where `close` reports the graphs that are left.
        weakref.finalize(owner, self._drop, pending).atexit = False
        if lease:
            self._leases.add(pending)

    def close_one(self, pending: PendingGraph) -> bool:
        """Forget a graph that is decided or dropped; return False if that was done before."""
        self._leases.remove(pending)
        # `pop` is atomic: one of two threads gets True.
        # The values are None, so `self` stands for a missing one.
        return self._pending.pop(pending, self) is None

    def _drop(self, pending: PendingGraph) -> None:
        """Note that a graph was destroyed with its model. Takes no lock: the garbage collector calls it, in any thread."""
        if self.close_one(pending):
            self._dropped.append(pending)

    def publish(self, pending: PendingGraph, outcome: Outcome, runs: Decision) -> None:
        """Report the deployment of a graph, and record the result in the cache. Called once for a graph."""
        if not self.close_one(pending):
            return  # the process has ended meanwhile
        source = Source.MEASURED if outcome.measurements else Source.RULE
        if outcome.adopted is not None:
            source = Source.CACHE
        if runs != outcome.decision:
            source = Source.GROUP
        how = runs, source, pending.rejection, outcome.measurements
        self.report.record_deployment(pending.graph, pending.environment, *how)
        if outcome.adopted is not None:
            self.report.count(adopted=1)
            self.cache.bundle.add_hit(pending.environment, pending.graph, outcome.adopted)
            return
        if outcome.measurements:
            self.report.count(measured=1)
        self.record(pending, outcome)

    def record(self, pending: PendingGraph, outcome: Outcome) -> None:
        """Record the result of this process in the cache, once for a graph. Whatever its group runs: it is for later programs."""
        if pending.is_recorded or outcome.adopted is not None:
            return
        pending.is_recorded = True
        record = Record(pending.graph, outcome.decision, outcome.measurements, outcome.recording_us or None)
        self.cache.record(pending.environment, [record])

    def followed(self, pending: PendingGraph, decision: Decision) -> None:
        """Report another rank's decision for a graph that waited for it."""
        self.close_one(pending)
        self.report.record_deployment(pending.graph, pending.environment, decision, Source.GROUP)

    def validated(self, pending: PendingGraph, *, holds: bool) -> None:
        """Note the outcome of a validation: the decision holds, or the graph is measured anew."""
        if not self.close_one(pending):
            return  # the process has ended meanwhile
        if not holds:
            self.report.count(disputed=1)
            self.report.count_fallback(DISPUTED)
        elif pending.unfinished_as is not None:
            self.report.record_deployment(pending.graph, pending.environment, *pending.unfinished_as)

    def close(self) -> None:
        """Report and record the graphs that were called too seldom to be measured; the last thing a process does here."""
        pending = list(self._pending)  # other threads may still be at work
        for each in pending:
            # One that waits to be told to the other ranks is measured, or adopted.
            self._end(each, left=each.unfinished_as is None and self._leases.is_left_to_others(each))
        for each in pending:
            self.close_one(each)
        self._take_dropped(0)
        self._tell_used()

    def _take_dropped(self, most: int) -> None:
        """Report the graphs that were dropped; record all of them if there are more than `most` to be recorded."""
        while self._dropped:
            self._end(self._dropped.popleft(), left=False)
        if len(self._unrecorded) <= most:
            return
        unrecorded, self._unrecorded = self._unrecorded, []
        for environment, some in by_environment(unrecorded).items():
            self.cache.record(environment, some)

    def _end(self, pending: PendingGraph, *, left: bool) -> None:
        """Report a graph that will not be decided in this process; `left`: another process measures it."""
        decision, source = pending.unfinished_as or (rules.too_few_calls(pending.calls), Source.UNFINISHED)
        if left:
            decision = rules.not_measured(LEFT_TO_ANOTHER, pending.calls)
        self.report.record_deployment(pending.graph, pending.environment, decision, source, pending.rejection)
        # Fewer calls than the entry has would say less: the next program waits for as many calls as it names.
        if not left and pending.unfinished_as is None and pending.recorded_calls < pending.calls:
            self._unrecorded.append((pending.environment, Record(pending.graph, decision)))
