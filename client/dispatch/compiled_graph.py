"""Gives each partition of one compiled graph a slot, and has its deployment decided.

No error reaches the program: where anything goes wrong, the graph runs as KERNELS with a reason in the report.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.analysis import graph_facts
from pygraphd.client.autotune.candidates import Candidates
from pygraphd.client.backend import torch_private
from pygraphd.client.decisions import rules
from pygraphd.client.decisions.decision_service import UNKNOWN, LookupResult
from pygraphd.client.decisions.ranks.consensus import ALONE
from pygraphd.client.dispatch.partition import Context, Partition
from pygraphd.client.dispatch.shapes import DecidedSize, KnownSizes, ShapeDispatcher, Sizes
from pygraphd.client.dispatch.slot import Slot
from pygraphd.schema import policy
from pygraphd.schema.messages import MAX_INTEGER_INPUTS, Decision, Deployment, Graph, Record
from pygraphd.schema.reasons import Reason, ReasonCode, because

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pygraphd.client.analysis.graph_facts import BackwardFacts, GraphFacts
    from pygraphd.client.backend.torch_private import CompiledFacts, Runnable


SIZES_OF_TENSORS = (
    "it reads sizes off its tensors, so that calls of several sizes cannot be told from each other"
)
CAPTURED_BY_OTHERS = "the program captures it itself, by a wrapper of partitions or a policy"


class CompiledGraph:
    """A graph that Inductor has compiled. Made before Inductor's `post_compile`, completed after it."""

    def __init__(
        self,
        context: Context,
        facts: CompiledFacts,
        graphs: tuple[Graph, ...],
        known: Mapping[str, LookupResult],
        backward: BackwardFacts | None = None,
    ) -> None:
        """Take one of `graphs` for each partition; `known` has the entries of the cache by digest, `backward` the facts of its backward."""
        self._context = context
        self._facts = replace(facts, text="", user_kernels="")  # long, and read already
        self._graphs = graphs
        self._known = known
        self._beforehand = graph_facts.facts_of(facts, backward)
        """The facts of the graph before its first call; None: it has to run as KERNELS."""
        self._next = 0

    def cudagraphify(self, runnable: Runnable, kwargs: Mapping[str, Any]) -> Runnable:
        """Return the slot of the next partition; `runnable` runs it as KERNELS."""
        graph = self._graphs[self._next]
        self._next += 1
        whole = self._beforehand
        beforehand = whole.of_partition(self._facts.maps, graph.partition) if whole is not None else None
        return self._slot(graph, runnable, kwargs["device_index"], beforehand)

    def complete(self, compiled: Any) -> None:
        """After `post_compile`: give slots to partitions without a call of `cudagraphify`, or record why they run as KERNELS."""
        facts, device_index = self._facts, self._facts.device_index
        if (self._next or facts.is_split) and not facts.calls_host_operators:
            for name in facts.host_operators:
                self._context.decisions.report.note("between_graphs", name)
        if self._next:
            # Inductor relies on whoever captures to realign inputs.
            torch_private.align_inputs(compiled)
        elif (
            facts.is_split
        ):  # around custom operators, on our request; Inductor does not capture the partitions
            partitions = torch_private.split_partitions(compiled)
            for number, run_kernels in enumerate(partitions):
                partitions[number] = self.cudagraphify(run_kernels, {"device_index": device_index})
        elif facts.refusal is None:
            self._context.decisions.report.count_left_to_torch(CAPTURED_BY_OTHERS)
        elif (
            device_index is not None
            and self._beforehand is not None
            and may_be_recorded_whole(facts, len(self._graphs))
        ):
            run, self._next = compiled.current_callable, 1
            compiled.current_callable = self._slot(self._graphs[0], run, device_index, self._beforehand)
        else:
            decision = decision_without_graph(facts, is_state_known=self._beforehand is not None)
            for graph in self._graphs:
                self._partition(graph, Slot(compiled.current_callable), None).report_only_kernels(decision)

    # --- partitions ---

    def _partition(self, graph: Graph, slot: Slot, candidates: Candidates | None) -> Partition:
        return Partition(self._context, graph, slot, candidates, self._known.get(graph.digest, UNKNOWN))

    def _slot(self, graph: Graph, run_kernels: Runnable, device_index: int, facts: GraphFacts | None) -> Slot:
        """Return the slot of a partition, which runs it as decided, by its sizes if it may have any."""
        slot, context = Slot(run_kernels), self._context
        is_decided_by_size = self._facts.has_dynamic_sizes and context.role is ALONE
        note_failed_check = functools.partial(
            _store_failed_check, context, graph, is_by_size=is_decided_by_size
        )

        def candidates() -> Candidates | None:
            if facts is None or self._facts.calls_host_operators or self._facts.reads_sizes:
                return None
            own = replace(facts, name=graph.name, digest=graph.digest)
            recordings = context.recordings(run_kernels, device_index, own, note_failed_check)
            if recordings is None:
                return None
            return Candidates(recordings.run_kernels_or_record or run_kernels, device_index, recordings)

        if (of_all_sizes := candidates()) is None:
            self._partition(graph, slot, None).report_only_kernels(_decision_without_candidates(self._facts))
            return slot
        partition = self._partition(graph, slot, of_all_sizes)
        if is_decided_by_size:
            slot.run = ShapeDispatcher(
                run_kernels,
                context.bounds,
                partition.decided_by_size,
                functools.partial(self._at_size, partition, candidates),
                partition.decide,
                context.decisions.report,
                # Its own entry says that another program has decided it by sizes.
                None
                if partition.entry is None
                else functools.partial(self._known_sizes, partition, candidates),
                context.time_budget,
            )
        else:
            partition.decide()  # ranks may see different sizes, and decide for all at once
        return slot

    def _known_sizes(self, partition: Partition, make: Callable[[], Candidates | None]) -> KnownSizes:
        """Look up the sizes of a partition that the cache has final decisions for."""
        context = self._context
        found = context.decisions.look_up_sizes(partition.graph, context.environment, context.bounds.sizes)
        recall = functools.partial(self._recall, partition, make, found)
        kernels = frozenset(
            sizes
            for sizes, known in found.items()
            if known.entry is not None and known.entry.decision.deployment is Deployment.KERNELS
        )
        return KnownSizes(tuple(found), recall, kernels)

    def _recall(
        self,
        partition: Partition,
        make: Callable[[], Candidates | None],
        found: Mapping[Sizes, LookupResult],
        sizes: Sizes,
    ) -> DecidedSize | None:
        """Decide a partition at one of the sizes that were `found`, if the cache still has a final decision for it."""
        context = self._context
        known = found[sizes]
        # It was listed at the first call: meanwhile it may have become too old.
        if known.entry and context.decisions.trust.why_rejected(known.entry) is None:
            context.decisions.use(partition.graph.at(sizes), context.environment, known)
        else:
            known = self._known_at(partition, sizes)
        is_final = known.entry is not None and known.entry.decision.final
        return self._at_size(partition, make, sizes, known) if is_final else None

    def _known_at(self, partition: Partition, sizes: Sizes) -> LookupResult:
        graph = partition.graph.at(sizes)
        known = self._context.decisions.look_up([graph], self._context.environment)
        return known.get(graph.digest, UNKNOWN)

    def _at_size(
        self,
        partition: Partition,
        make: Callable[[], Candidates | None],
        sizes: Sizes,
        known: LookupResult | None = None,
    ) -> DecidedSize:
        """Decide a partition at one set of sizes, with candidates of their own."""
        candidates = make()
        assert candidates is not None
        graph, slot, report = (
            partition.graph.at(sizes),
            Slot(candidates.run_kernels),
            self._context.decisions.report,
        )
        known = known or self._known_at(partition, sizes)
        report.count(sizes=1)
        report.note_graph(partition.graph.digest, sizes)
        at_size = Partition(self._context, graph, slot, candidates, known, sizes)
        at_size.decide()
        decision = known.entry.decision if known.entry is not None else None
        is_kernels = decision is not None and decision.final and decision.deployment is Deployment.KERNELS
        recordings = candidates.recordings
        return DecidedSize(
            slot,
            at_size.close,
            is_recorded=not is_kernels,
            recording_us=lambda: recordings.recording_us,
            replays=lambda: recordings.replayed,
            saving_us=at_size.saving_us,
            interrupt=at_size.interrupt,
        )


def _store_failed_check(
    context: Context, graph: Graph, sizes: Sizes, reason: Reason, *, is_by_size: bool
) -> None:
    """Record that a GRAPH failed a result check, whichever rank found it: later programs run the partition as KERNELS."""
    if is_by_size and 0 < len(sizes) <= MAX_INTEGER_INPUTS:
        graph = graph.at(sizes)
    context.decisions.cache.record(context.environment, [Record(graph, policy.only_kernels(reason))])


# --- graphs of which Inductor captures no part ---


def may_be_recorded_whole(facts: CompiledFacts, partitions: int) -> bool:
    """Return whether the whole graph runs on one GPU. Recording finds out whether the driver can capture it."""
    return facts.only_cuda and partitions == 1 and not facts.host_operators


def decision_without_graph(facts: CompiledFacts, *, is_state_known: bool = True) -> Decision:
    """Return the decision for a graph that can only run as KERNELS, with the reason.

    `is_state_known`: whether it is known where its attention keeps random numbers.
    """
    if not torch.cuda.is_available():
        return rules.only_kernels(ReasonCode.NO_DEVICE)
    if not facts.on_cuda:
        return rules.only_kernels(ReasonCode.ON_CPU)
    if facts.host_operators:
        return _custom_operators(facts)
    if not facts.cudagraphs_asked:
        code = ReasonCode.NOT_ON_ONE_GPU if is_state_known else ReasonCode.RANDOM_STATE_UNKNOWN
        return rules.only_kernels(code)
    reason = because(ReasonCode.NOT_CAPTURED_BY_TORCH, facts.refusal or "it did not try")
    # A refusal because of another graph or a setting of the process may not come again.
    return policy.only_kernels(reason, final=facts.refused_for_good)


def _decision_without_candidates(facts: CompiledFacts) -> Decision:
    """Return the decision for a partition that cannot be recorded, with the reason."""
    if facts.calls_host_operators:
        return _custom_operators(facts)
    if facts.reads_sizes:
        return rules.only_kernels(ReasonCode.CANNOT_BE_RECORDED, SIZES_OF_TENSORS)
    return rules.only_kernels(ReasonCode.RANDOM_STATE_UNKNOWN)


def _custom_operators(facts: CompiledFacts) -> Decision:
    return rules.only_kernels(ReasonCode.CUSTOM_OPERATORS, ", ".join(facts.host_operators))
