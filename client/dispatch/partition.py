"""Brings one partition of a compiled graph to its deployment: by the cache, by the ranks, or by a trial."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.autotune import cost
from pygraphd.client.autotune.candidates import Candidates, RecordingsLike
from pygraphd.client.autotune.partition_trial import PartitionTrial
from pygraphd.client.autotune.validation import Validation
from pygraphd.client.backend.torch_private import Runnable
from pygraphd.client.decisions import rules
from pygraphd.client.decisions.decision_service import UNKNOWN, DecisionService, LookupResult
from pygraphd.client.decisions.leases import PendingGraph
from pygraphd.client.decisions.ranks.consensus import RankRole
from pygraphd.client.decisions.ranks.following import Follower
from pygraphd.client.decisions.trust import taken_by
from pygraphd.client.dispatch.shapes import Bounds, Sizes
from pygraphd.client.dispatch.time_budget import TimeBudget
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Decision, Deployment, Entry, Graph, Record
from pygraphd.schema.reasons import Reason, ReasonCode, because
from pygraphd.schema.summary import Source

if TYPE_CHECKING:
    from pygraphd.client.dispatch.slot import Slot


@dataclass(frozen=True, slots=True)
class Context:
    """The services, bounds and role that all partitions of a compiled graph share."""

    decisions: DecisionService
    bounds: Bounds
    """Bounds on the dynamic sizes that have decisions of their own."""
    recordings: Callable[
        [Runnable, int, GraphFacts, Callable[[tuple[int, ...], Reason], None]], RecordingsLike | None
    ]
    """Returns the recordings of a callable on a device; None if it cannot be recorded. See `Devices.recordings`."""
    environment: Environment
    role: RankRole
    """The role of this process among the ranks."""
    time_budget: TimeBudget
    """For recordings of dynamic sizes in this process."""


class Partition:
    """Decides the deployment of a partition at one size, or at all sizes, and exchanges the callable in its slot.

    Where sizes are decided apart, the partition's slot holds a `ShapeDispatcher`, and each size has a slot of its own. The slot is held weakly:
    it holds the callable of the partition, which may hold this object.
    """

    def __init__(
        self,
        context: Context,
        graph: Graph,
        slot: Slot,
        candidates: Candidates | None,
        known: LookupResult = UNKNOWN,
        sizes: Sizes = (),
    ) -> None:
        """Decide for calls with the integer inputs `sizes`."""
        self.graph = graph
        self.entry = known.entry
        self.rejected = known.rejected
        self.rejection = known.rejection
        self.candidates = candidates
        self._context = context
        self._slot = weakref.ref(slot)
        self._sizes = sizes
        self._pending: PendingGraph | None = None

    # --- what runs it ---

    def decide(self) -> Runnable:
        """Deploy the decision of the ranks or of the cache, or begin a trial; return the callable that serves the first call."""
        candidates, entry, role = self.candidates, self.entry, self._context.role
        assert candidates is not None
        if entry is not None and entry.decision.reason.code is ReasonCode.DECIDED_BY_SIZE:
            # A program without a group has found so; it says nothing of all sizes at once.
            self._reject(entry, Reason(ReasonCode.STORED_BY_SIZE))
            entry = None
        own = entry.decision if entry is not None and entry.decision.final else None
        decision = role.decision_for(self.graph.digest, own)
        if decision is not None:
            # Only the leader validates. If that fails, all ranks keep the agreed decision; the leader measures anew for later programs.
            if role.leads and entry and decision == entry.decision:
                expected = self._context.decisions.trust.must_validate(entry) and cost.of_entry(entry)
                if expected:
                    return self._validate(candidates, entry, expected)
            self.report(decision, Source.GROUP)
            return self._deploy(candidates, decision.deployment)
        if not role.leads or own is not None:
            return self._follow(candidates, own)
        if entry is not None:
            self.rejection = because(ReasonCode.NOT_FINAL, f"{entry.decision.calls} calls")
        return self._measure(candidates, entry.decision if entry else None)

    def _reject(self, entry: Entry, why: Reason) -> None:
        self.entry, self.rejected, self.rejection = None, entry, why

    def _run(self, run: Runnable) -> Runnable:
        if (slot := self._slot()) is not None:
            slot.run = run
        return run

    def _deploy(self, candidates: Candidates, deployment: Deployment) -> Runnable:
        """Run one candidate from now on, and release the memory of the other one."""
        # The slot first: no call that begins from now on finds what is released below.
        run = self._run(candidates.runnable(deployment))
        candidates.release_other(deployment)
        return run

    def _measure(self, candidates: Candidates, cached: Decision | None) -> Runnable:
        context = self._context
        pending = self._pending = self._new_pending()
        pending.recorded_calls = (
            -1.0 if cached is None else float("inf") if rules.is_noisy(cached) else cached.calls
        )
        # A program that ended after so many calls would leave this trial unfinished, too. So it begins after
        # as many.
        trial = PartitionTrial(
            pending,
            candidates,
            context.decisions,
            self._deploy,
            cached.calls if cached is not None else 0,
            context.role,
        )
        return self._run(trial)

    def _validate(self, candidates: Candidates, entry: Entry, expected: cost.Cost) -> Runnable:
        """Deploy the decision of another user or host, and begin a trial if validation fails."""
        deployment = entry.decision.deployment

        def finish(candidates: Candidates, holds: bool) -> Runnable:
            if holds:
                return self._deploy(candidates, deployment)
            cost_was = f"{deployment} {expected.host_us:.1f} us of host time, {expected.span_us:.1f} us on the GPU {taken_by(entry)}"
            self._reject(entry, because(ReasonCode.COST_DIFFERS, cost_was))
            return self._measure(candidates, None)

        pending = self._pending = self._new_pending()
        pending.unfinished_as = entry.decision, Source.CACHE
        decisions = self._context.decisions
        decisions.report.count(validated=1)
        return self._run(
            Validation(pending, deployment, expected, self._sizes, candidates, finish, decisions)
        )

    def _follow(self, candidates: Candidates, own: Decision | None) -> Runnable:
        """Run KERNELS until there is a decision: that of the leader, or `own` once the store takes it.

        With collectives, run GRAPH: the leader's GRAPH would wait for slower KERNELS here.
        """

        def deploy(decision: Decision) -> Runnable:
            decisions.followed(pending, decision)
            return self._deploy(candidates, decision.deployment)

        decisions, role, digest = self._context.decisions, self._context.role, self.graph.digest
        pending = self._new_pending()
        pending.unfinished_as = rules.not_measured(Reason(ReasonCode.RANKS_UNDECIDED)), Source.UNFINISHED

        def ask(waited_s: float) -> Decision | None:
            return role.wait(digest, waited_s) if own is None else role.propose(digest, own)

        def lead(waited_s: float) -> Runnable | None:
            if own is not None or not role.takes_over(digest, waited_s):
                return None
            decisions.close_one(pending)
            return self._measure(candidates, None)

        waits = Deployment.GRAPH if candidates.recordings.run_kernels_or_record else Deployment.KERNELS
        follower = Follower(candidates.runnable(waits), ask, deploy, decisions.report, lead=lead)
        decisions.open(pending, follower, lease=False)
        return self._run(follower)

    def _new_pending(self) -> PendingGraph:
        return PendingGraph(self.graph, self._context.environment, self.rejected, self.rejection)

    def saving_us(self, kernels_us: float | None) -> float | None:
        """Return the microseconds that a call as a GRAPH saves, as it was measured here or elsewhere; None: that is not known.

        `kernels_us` is the least that a call as KERNELS takes: an entry of the cache states the cost of its own deployment only.
        """
        pending = self._pending
        measured = pending.measurements if pending is not None else ()
        costs = {each.deployment: cost.Cost(each.host_us, each.span_us) for each in measured}
        graph, kernels = costs.get(Deployment.GRAPH), costs.get(Deployment.KERNELS)
        if graph is not None and kernels is not None:
            return kernels.call_us - graph.call_us
        entry = pending.answer if pending is not None and pending.answer is not None else self.entry
        is_graph = entry is not None and entry.decision.deployment is Deployment.GRAPH
        stated = cost.of_entry(entry) if entry is not None and is_graph else None
        return None if stated is None or kernels_us is None else kernels_us - stated.call_us

    def interrupt(self) -> bool:
        """Have an open trial disregard the time until its next call: another size was called. Return whether the partition is undecided."""
        slot = self._slot()
        run = slot.run if slot is not None else None
        if isinstance(run, PartitionTrial):
            run.interrupt()
        return isinstance(run, PartitionTrial | Validation)

    def close(self) -> None:
        """Release the memory of sizes that have not come back for long, and retract the deployment from the report."""
        decisions, pending = self._context.decisions, self._pending
        # A trial or validation that is still open has reported no deployment.
        if pending is None or not decisions.close_one(pending):
            decisions.report.retract_deployment(self.graph, self._context.environment)
        if self.candidates is not None:
            self.candidates.recordings.close()

    # --- what is reported and recorded of it without a trial ---

    def report(self, decision: Decision, otherwise: Source) -> None:
        """Report a deployment that was not measured here: that of the cache, or another one with the source `otherwise`."""
        is_cached = self.entry is not None and self.entry.decision == decision
        source = Source.CACHE if is_cached else otherwise
        because = None if is_cached else self.rejection
        context = self._context
        context.decisions.report.record_deployment(self.graph, context.environment, decision, source, because)

    def report_only_kernels(self, decision: Decision) -> None:
        """Report and record that the partition can only run as KERNELS, with the reason, unless the cache has this already."""
        role = self._context.role
        # If the store fails, the others find out for themselves.
        agreed = role.propose(self.graph.digest, decision) or decision
        source = Source.RULE if agreed == decision else Source.GROUP
        # The group may have agreed on GRAPH, which cannot be had on this rank.
        if agreed.deployment is not Deployment.KERNELS:
            agreed = rules.not_measured(Reason(ReasonCode.RANKS_NOT_OFFERED, agreed.deployment))
        self.report(agreed, source)
        if self.entry is None:
            self._record(decision)

    def decided_by_size(self) -> None:
        """Report and record that each dynamic size has a decision of its own, unless the cache has an entry."""
        decision = rules.only_kernels(ReasonCode.DECIDED_BY_SIZE)
        if self.entry is None and self.rejected is None:
            self._record(decision)
        self.report(decision, Source.RULE)

    def _record(self, decision: Decision) -> None:
        context = self._context
        if context.role.leads:  # one rank does so for all
            context.decisions.cache.record(context.environment, [Record(self.graph, decision)])
