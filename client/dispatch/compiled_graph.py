"""How the partitions of one compiled graph are to run: as its group or the cache says, or by a region that finds out.

A plan never fails: whatever goes wrong has the graph be launched, with a reason in the report. It is long because everything that is
ever put into a partition's slot, by whichever thread, takes the place of something else here and nowhere else.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from pygraphd.client.analysis import graph_facts
from pygraphd.client.autotune import cost as costs
from pygraphd.client.autotune.candidates import Candidates, Relocating
from pygraphd.client.autotune.partition_trial import Host, Region, Tally
from pygraphd.client.autotune.validation import Checked
from pygraphd.client.backend import torch_private
from pygraphd.client.decisions import rejection, rules
from pygraphd.client.decisions.ranks.consensus import ALONE, Part, possible
from pygraphd.client.decisions.rejection import Rejection
from pygraphd.client.dispatch import unpartitioned
from pygraphd.client.dispatch.shapes import OfSize, Sized
from pygraphd.client.dispatch.slot import Slot
from pygraphd.schema.messages import Decision, Deployment, Entry, Graph, Kind, Record
from pygraphd.schema.reasons import ReasonCode
from pygraphd.schema.summary import Source

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import CompiledFacts, Runnable
    from pygraphd.client.decisions.ranks.following import Follower
    from pygraphd.client.decisions.ranks.session_ranks import Ranks
    from pygraphd.client.dispatch.shapes import Bounds, Sizes, Steps
    from pygraphd.schema.keys import Environment


CAPTURED_BY_OTHERS = "its partitions are captured by something else than Inductor's own"


@dataclass(frozen=True, slots=True)
class Known:
    """What the cache says of some graphs, by digest: what is believed, and what is not, and why."""

    entries: Mapping[str, Entry]
    rejected: Mapping[str, Entry]
    doubts: Mapping[str, Rejection] = field(default_factory=dict)


class Process(Host, Protocol):
    """What a plan needs of the process around it."""

    ranks: Ranks

    @property
    def bounds(self) -> Bounds:
        """How many dynamic sizes are decided apart."""

    def look_up(self, graphs: Sequence[Graph], environment: Environment) -> Known:
        """Look graphs up."""

    def record(self, environment: Environment, records: Sequence[Record]) -> None:
        """Hand records to the cache."""

    def steps(self, family: object) -> Steps:
        """Return the dynamic sizes of a forward and its backward."""

    def relocatable(self, launch: Runnable, device_index: int, facts: GraphFacts) -> Relocating | None:
        """Return a callable as relocatable graphs, if these can be had."""

    def must_check(self, entry: Entry) -> bool:
        """Whether a decision is to be timed on a few calls."""

    def begin_check(self, graph: Graph, environment: Environment, decision: Decision) -> int:
        """Note that a decision is being checked; return a number for `end_check`."""

    def end_check(self, number: int, *, holds: bool) -> None:
        """Note whether that decision stays."""

    def forget(self, graph: Graph, environment: Environment, tally: Tally | None, check: int) -> None:
        """Take back what was noted of a graph at a size that makes room."""

    def watch(
        self,
        region: Region,
        environment: Environment,
        family: object,
        cached: Decision | None,
        rejected: Entry | None = None,
        doubt: Rejection | None = None,
    ) -> None:
        """Note a region that is not decided yet."""


class Plan:
    """How the partitions of one compiled graph are to run. Made before Inductor's `post_compile`, completed after it."""

    def __init__(
        self,
        session: Process,
        facts: CompiledFacts,
        environment: Environment,
        graphs: tuple[Graph, ...],
        known: Known,
        family: object,
        part: Part,
    ) -> None:
        self._session = session
        self._facts = replace(facts, text="", user_kernels="")  # long, and told already
        self._environment = environment
        self._graphs = graphs
        self._entries = dict(known.entries)
        self._rejected = dict(known.rejected)
        self._doubts = dict(known.doubts)
        """Of each graph whose decision was known and not taken."""
        self._family = family
        self._steps = session.steps(family)
        self._families: dict[str, object] = {}  # of graphs at some sizes, by digest
        self._by_size: dict[str, weakref.ref[Sized]] = {}
        self._integers: dict[str, Sizes] = {}
        """Of these graphs, the integers that they are given: not those of the forward that they go by."""
        self._tallies: dict[str, Tally] = {}
        self._checks: dict[str, int] = {}
        self._part = part
        self._beforehand = graph_facts.facts_of(facts)
        """None: it has to be launched."""
        self._next = 0
        self._slots: dict[int, weakref.ref[Slot]] = {}
        """By partition."""

    def cudagraphify(self, runnable: Runnable, kwargs: Mapping[str, Any]) -> Runnable:
        """Return what runs the next partition: what the cache says, or a region that finds out."""
        graph = self._graphs[self._next]
        self._next += 1
        whole = self._beforehand
        beforehand = whole.of_partition(self._facts.maps, graph.partition) if whole is not None else None
        return self._slot(graph, runnable, kwargs["device_index"], beforehand)

    def _slot(self, graph: Graph, launch: Runnable, device_index: int, facts: GraphFacts | None) -> Slot:
        slot = Slot(launch)
        self._slots[graph.partition] = weakref.ref(slot)
        relocate = None
        if facts is not None:
            relocate = self._session.relocatable(launch, device_index, replace(facts, name=graph.name))
        slot.run = self._run_of_any_size(graph, Candidates(launch, device_index, relocate))
        return slot

    # --- dynamic sizes ---

    def _run_of_any_size(self, graph: Graph, candidates: Candidates) -> Runnable:
        """Return what runs a graph by its sizes if it may have any; ranks, which may see different ones, decide for all at once."""
        if candidates.relocate is None:
            self._only_launch(graph, rules.only_kernels(ReasonCode.RANDOM_STATE_UNKNOWN))
            return candidates.launch
        if not self._facts.has_dynamic_sizes or self._part is not ALONE:
            return self._run_of(graph, candidates)
        sized = Sized(
            candidates.launch,
            self._session.bounds,
            self._steps,
            functools.partial(self._begin_by_size, graph),
            functools.partial(self._of_size, graph, candidates),
            functools.partial(self._without_sizes, graph, candidates),
            self._session.report,
        )
        self._by_size[graph.digest] = weakref.ref(sized)
        return sized

    def _begin_by_size(self, graph: Graph) -> bool:
        """Note that a graph has dynamic sizes; return whether they are those of its step: it is the first that has any."""
        decision = rules.only_kernels(ReasonCode.DECIDED_BY_SIZE)
        if graph.digest not in self._entries and graph.digest not in self._rejected:
            self._record([Record(graph, decision)])
        self._note(graph, decision, Source.RULE)
        return graph.kind is not Kind.BACKWARD and self._steps.lead()

    def _without_sizes(self, graph: Graph, candidates: Candidates, sized: Sized) -> Runnable:
        """Put in place what runs a graph whose sizes are all the same, or too many to be told apart."""
        del self._by_size[graph.digest]
        run = self._run_of(graph, candidates)
        self._replace(graph, sized, run)
        return run

    def _of_size(self, graph: Graph, candidates: Candidates, sizes: Sizes, own: Sizes) -> OfSize:
        """Return what runs a graph at one set of sizes, as the cache says, or by a region that finds out."""
        at_sizes, there = graph.at(sizes), candidates.at(own)
        self._by_size[at_sizes.digest] = self._by_size[graph.digest]
        self._families[at_sizes.digest] = self._steps.family()
        self._integers[at_sizes.digest] = own
        self._session.report.count(sizes=1)
        known = self._session.look_up([at_sizes], self._environment)
        self._entries.update(known.entries)
        self._rejected.update(known.rejected)
        self._doubts.update(known.doubts)
        run = self._run_of(at_sizes, there)
        return OfSize(run, functools.partial(self._let_go, at_sizes, there.relocate))

    def _let_go(self, graph: Graph, relocate: Relocating | None) -> None:
        """Give back what a graph keeps at sizes that have not come back for long, and take back what was said of it."""
        tally, check = self._tallies.pop(graph.digest, None), self._checks.pop(graph.digest, -1)
        self._session.forget(graph, self._environment, tally, check)
        if relocate is not None:
            relocate.close()

    def _family_of(self, graph: Graph) -> object:
        """Return one object for a forward and its backward, at some sizes or at all."""
        return self._families.get(graph.digest, self._family)

    # --- one graph ---

    def _run_of(self, graph: Graph, candidates: Candidates) -> Runnable:
        """Return what the group or the cache says, or what finds out."""
        entry = self._entries.get(graph.digest)
        if entry is not None and entry.decision.reason.code is ReasonCode.DECIDED_BY_SIZE:
            # A program without a group has found so; it says nothing of all sizes at once.
            self._rejected[graph.digest] = self._entries.pop(graph.digest)
            self._doubts[graph.digest] = rejection.STORED_BY_SIZE
            entry = None
        usable = entry is not None and entry.decision.final and candidates.offers(entry.decision.deployment)
        decision = self._part.settled(graph.digest, entry.decision if entry and usable else None)
        if decision is not None:
            decision = possible(decision, candidates.offered)
            # Of ranks, the one that leads finds out whether it holds; what all run stays, and the next program measures anew.
            if self._part.leads and entry and decision == entry.decision and self._session.must_check(entry):
                return self._check(graph, candidates, entry)
            return self._deploy(graph, candidates, decision, Source.GROUP)
        if not self._part.leads:
            return self._follow(graph, candidates)
        if entry is not None:
            is_final = entry.decision.final
            self._doubts[graph.digest] = (
                rejection.NOT_OFFERED if is_final else rejection.unfinished(entry.decision)
            )
        return self._measure(graph, candidates, entry.decision if entry else None)

    def _deploy(
        self, graph: Graph, candidates: Candidates, decision: Decision, otherwise: Source
    ) -> Runnable:
        self._note(graph, decision, otherwise)
        return candidates.deploy(decision.deployment)

    def _note(self, graph: Graph, decision: Decision, otherwise: Source) -> None:
        """Report how a graph runs that is not measured here: as the cache has it, or why it runs otherwise."""
        entry = self._entries.get(graph.digest)
        looked_up = entry is not None and entry.decision == decision
        source, doubt = Source.CACHE if looked_up else otherwise, self._doubts.get(graph.digest)
        because = doubt.reason() if doubt is not None and not looked_up else None
        self._session.report.record_deployment(graph, self._environment, decision, source, because)

    def _measure(
        self,
        graph: Graph,
        candidates: Candidates,
        cached: Decision | None,
        disputed: Entry | None = None,
    ) -> Region:
        calls = cached.calls if cached is not None else 0
        region = Region(
            graph,
            candidates,
            self._session,
            functools.partial(self._on_decided, graph),
            warm_up_calls=calls,
            part=self._part,
        )
        self._tallies[graph.digest] = region.tally
        rejected = disputed or self._rejected.get(graph.digest)
        doubt = self._doubts.get(graph.digest)
        family = self._family_of(graph)
        self._session.watch(region, self._environment, family, cached, rejected, doubt)
        return region

    def _check(self, graph: Graph, candidates: Candidates, entry: Entry) -> Checked:
        """Run a graph as somebody else has decided, and measure it if that does not hold here."""
        deployment, cost = entry.decision.deployment, costs.of_entry(entry)
        assert cost is not None

        def settle(checked: Checked, holds: bool) -> Runnable:
            self._session.end_check(number, holds=holds)
            if holds:
                run = candidates.deploy(deployment)
                self._replace(graph, checked, run)
                return run
            self._doubts[graph.digest] = rejection.cost_differs(entry)
            region = self._measure(graph, candidates, None, entry)
            self._replace(graph, checked, region)
            return region

        number = self._session.begin_check(graph, self._environment, entry.decision)
        self._checks[graph.digest] = number
        sizes = self._integers.get(graph.digest, ())
        return Checked(deployment, cost, sizes, candidates, settle, self._session.report)

    def _follow(self, graph: Graph, candidates: Candidates) -> Follower:
        def deploy(follower: Follower, decision: Decision) -> Runnable:
            decision = possible(decision, candidates.offered)
            self._session.ranks.followed(graph, self._environment, decision)
            run = candidates.deploy(decision.deployment)
            self._replace(graph, follower, run)
            return run

        ranks = self._session.ranks
        return ranks.follow(graph, self._environment, candidates.launch, self._part, deploy)

    def _record(self, records: Sequence[Record]) -> None:
        """Add to the cache what this process knows of itself; one rank does for all."""
        if self._part.leads:
            self._session.record(self._environment, records)

    def complete(self, compiled: Any) -> None:
        """Finish what Inductor's `post_compile` has left to be done, now that it has run."""
        if self._next:
            # Inductor believes that whoever captures sees to the alignment of inputs.
            compiled.current_callable = torch_private.aligned(compiled, compiled.current_callable)
        elif self._facts.is_split:
            self._fill_partitions(compiled)
        elif self._facts.refusal is None:
            self._session.report.count_left_to_torch(CAPTURED_BY_OTHERS)
            return
        elif not self._try_whole(compiled):
            for graph in self._graphs:
                is_known = self._beforehand is not None
                self._only_launch(graph, unpartitioned.only_kernels(self._facts, is_state_known=is_known))

    def _fill_partitions(self, compiled: Any) -> None:
        """Decide how each partition of a graph runs that Inductor has split for us, and does not capture."""
        partitions = torch_private.split_partitions(compiled)
        for number, launch in enumerate(partitions):
            partitions[number] = self.cudagraphify(launch, {"device_index": self._facts.device_index})

    def _try_whole(self, compiled: Any) -> bool:
        """Offer relocation for a graph of which PyTorch captures no part; return whether that can be.

        Nothing of it runs on the CPU, so that a recording holds all that it does. What the driver does not let be captured is
        found out then, and launched.
        """
        facts, device_index = self._facts, self._facts.device_index
        if device_index is None or self._beforehand is None:
            return False
        if not unpartitioned.may_be_relocated(facts, len(self._graphs)):
            return False
        compiled.current_callable = self._slot(
            self._graphs[0], compiled.current_callable, device_index, self._beforehand
        )
        self._next = 1
        return True

    def _only_launch(self, graph: Graph, decision: Decision) -> None:
        """Record that nothing but KERNELS was to be had for a graph, and why, unless the cache knows."""
        agreed = self._part.propose(graph.digest, decision)
        otherwise = Source.RULE if agreed == decision else Source.GROUP
        self._note(graph, possible(agreed, [Deployment.KERNELS]), otherwise)
        if graph.digest not in self._entries:
            self._record([Record(graph, decision)])

    def _on_decided(self, graph: Graph, before: Runnable, _deployment: Deployment, run: Runnable) -> None:
        """Have what was decided for a graph take the place of what has found that out."""
        self._replace(graph, before, run)

    def _replace(self, graph: Graph, one: Runnable, other: Runnable) -> bool:
        """Put one callable in the place of another; return whether that was there."""
        if graph.sizes:
            sized = self._by_size[graph.digest]()
            return sized is not None and sized.replace(graph.sizes, one, other)
        slot = self._slots[graph.partition]()
        return slot is not None and slot.replace(one, other)
