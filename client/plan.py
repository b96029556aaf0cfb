"""How the partitions of one compiled graph are to run: as its group or the cache says, or by a region that finds out.

A plan never fails: whatever goes wrong leaves the graph to PyTorch, with a reason in the report. It is long because everything
that is ever put into a partition's slot, by whichever thread, takes the place of something else here and nowhere else.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pygraphd.client import _torch, costs, doubts, policy, whole
from pygraphd.client.agreement import ALONE, Part, possible
from pygraphd.client.aligning import Alignment
from pygraphd.client.attention import State
from pygraphd.client.candidates import Candidates, Deployed, Relocating, deployed
from pygraphd.client.checking import Checked, Claimed
from pygraphd.client.doubts import Doubt
from pygraphd.client.looking import Looked, Place
from pygraphd.client.region import Before, Region, Tally
from pygraphd.client.sized import Sized, Slot
from pygraphd.schema.messages import Decision, Deployment, Entry, Graph, Kind, Record
from pygraphd.schema.summary import Source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client._torch import CompiledFacts, Cudagraphify, Runnable
    from pygraphd.client.checking import Jury
    from pygraphd.client.following import Follower
    from pygraphd.client.graph_facts import GraphFacts
    from pygraphd.client.session import Session
    from pygraphd.client.sized import Sizes
    from pygraphd.schema.keys import Environment


@dataclass(frozen=True, slots=True)
class Known:
    """What the cache says of some graphs, by digest: what is believed, and what is not, and why."""

    entries: Mapping[str, Entry]
    rejected: Mapping[str, Entry]
    doubts: Mapping[str, Doubt] = field(default_factory=dict)


class Plan:
    """How the partitions of one compiled graph are to run. Made before Inductor's `post_compile`, completed after it."""

    def __init__(
        self,
        session: Session,
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
        self._looks: dict[str, int] = {}
        self._tallies: dict[str, Tally] = {}
        self._checks: dict[str, int] = {}
        self._part = part
        self._link = None if facts.is_inference else session.link(family)
        self._beforehand = session.families.graph_facts(id(family), facts)
        self._next = 0
        self._alignment = Alignment()
        self._at_once: list[tuple[Graph, Deployed]] = []
        self._may_relocate = False
        self._relocates = False
        self._watching = False
        self._compiled: Callable[[], Any] = lambda: None

    def cudagraphify(self, original: Cudagraphify, runnable: Runnable, kwargs: Mapping[str, Any]) -> Runnable:
        """Return what runs the next partition: what the cache says, or a region that finds out."""
        graph = self._graphs[self._next]
        self._next += 1
        device_index = kwargs["device_index"]
        beforehand = self._beforehand.of_partition(self._facts.maps, graph.partition)
        candidates = Candidates(
            launch=runnable,
            trees=None,
            device_index=device_index,
            is_backward=kwargs["is_backward"],
            make_trees=functools.partial(original, runnable, **kwargs),
            make_relocate=functools.partial(self._relocatable, runnable, device_index, beforehand),
        )
        if self._facts.state != State():
            if self._goes_with_trees(device_index):
                return self._leave_to_trees(graph, candidates.renewed(), self._entries.get(graph.digest))
            candidates = self._without_trees(candidates)
        return self._run_of_any_size(graph, candidates)

    def _goes_with_trees(self, device_index: int) -> bool:
        """Whether a graph with a `State` runs as PyTorch has it: a forward that cannot be relocated, and its backward.

        PyTorch's trees hand the state over on the GPU, all else on the CPU.
        """
        families, family = self._session.families, id(self._family)
        if not self._facts.is_backward and (
            self._facts.state is None or not self._session.may_relocate(device_index)
        ):
            families.note_state_in_trees(family)
        return families.state_in_trees(family)

    def _without_trees(self, candidates: Candidates) -> Candidates:
        understood = self._facts.state is not None
        return replace(
            candidates, make_trees=None, make_relocate=candidates.make_relocate if understood else None
        )

    def _relocatable(self, launch: Runnable, device_index: int, facts: GraphFacts) -> Relocating | None:
        made = self._session.relocatable(launch, device_index, self._link, facts)
        self._may_relocate |= made is not None
        return made

    # --- dynamic sizes ---

    def _run_of_any_size(self, graph: Graph, candidates: Candidates) -> Runnable:
        """Return what runs a graph by its sizes if it may have any; ranks, which may see different ones, decide for all at once."""
        if not self._facts.has_dynamic_sizes or self._part is not ALONE:
            return self._run_of(graph, candidates.renewed())
        some = candidates.with_relocation()
        sized = Sized(
            candidates.runnable(Deployment.KERNELS),
            self._session.options.sizes,
            self._steps,
            functools.partial(self._begin_by_size, graph),
            functools.partial(self._slot, graph, some),
            functools.partial(self._without_sizes, graph, some),
            self._session.report,
        )
        self._by_size[graph.digest] = weakref.ref(sized)
        self._alignment.launches = True  # those that do not come back
        return sized

    def _begin_by_size(self, graph: Graph) -> bool:
        """Note that a graph has dynamic sizes; return whether they are those of its step: it is the first that has any."""
        decision = policy.only_launch(policy.BY_SIZE)
        if graph.digest not in self._entries and graph.digest not in self._rejected:
            self._record([Record(graph, decision)])
        self._note(graph, decision, Source.RULE)
        return graph.kind is not Kind.BACKWARD and self._steps.lead()

    def _without_sizes(self, graph: Graph, candidates: Candidates, sized: Sized) -> Runnable:
        """Put in place what runs a graph whose sizes are all the same, or too many to be told apart."""
        del self._by_size[graph.digest]
        run = self._run_of(graph, candidates.renewed())
        self._replace(graph, sized, run)
        self._look_again_at_all()
        return run

    def _slot(self, graph: Graph, candidates: Candidates, sizes: Sizes, own: Sizes) -> Slot:
        """Return what runs a graph at one set of sizes, as the cache says, or by a region that finds out."""
        at_sizes, there = graph.at(sizes), candidates.at(own).renewed()
        self._by_size[at_sizes.digest] = self._by_size[graph.digest]
        self._families[at_sizes.digest] = self._steps.family()
        self._integers[at_sizes.digest] = own
        self._session.report.count(sizes=1)
        known = self._session.look_up([at_sizes], self._environment)
        self._entries.update(known.entries)
        self._rejected.update(known.rejected)
        self._doubts.update(known.doubts)
        run = self._run_of(at_sizes, there)
        self._look_again_at_all()
        # Not all candidates: the memory of trees goes when nobody can call them any more.
        return Slot(run, functools.partial(self._let_go, at_sizes, there.relocate))

    def _let_go(self, graph: Graph, relocate: Relocating | None) -> None:
        """Give back what a graph keeps at sizes that have not come back for long, and take back what was said of it."""
        self._session.drift.forget(self._looks.pop(graph.digest, -1))
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
        if entry is not None and entry.decision.reason == policy.BY_SIZE:
            # A program without a group has found so; it says nothing of all sizes at once.
            self._rejected[graph.digest] = self._entries.pop(graph.digest)
            self._doubts[graph.digest] = doubts.BY_SIZE
            entry = None
        usable = entry is not None and entry.decision.final and candidates.offers(entry.decision.deployment)
        if entry is not None and usable and self._part is ALONE:
            family = id(self._family_of(graph))
            if self._session.families.leaves_without_trees(family, graph.kind, entry.decision):
                self._doubts[graph.digest] = doubts.OUT_OF_TREES
                return self._measure(graph, candidates, None, entry)
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
            self._doubts[graph.digest] = doubts.NOT_OFFERED if is_final else doubts.unfinished(entry.decision)
        return self._measure(graph, candidates, entry.decision if entry else None)

    def _note_forward(self, graph: Graph, deployment: Deployment | None) -> None:
        if graph.kind is not Kind.BACKWARD:
            family = id(self._family_of(graph))
            self._session.families.note_forward(family, (graph.digest, graph.partition), deployment)

    def _leave_to_trees(self, graph: Graph, candidates: Candidates, entry: Entry | None) -> Runnable:
        """Run a graph as PyTorch has it, whatever would be faster."""
        decision = policy.only_trees(policy.CAPTURED_DIFFERENTLY)
        if entry is None or entry.decision != decision:
            self._record([Record(graph, decision)])
        return self._deploy(graph, candidates, decision, Source.RULE)

    def _deploy(
        self, graph: Graph, candidates: Candidates, decision: Decision, otherwise: Source
    ) -> Runnable:
        self._note(graph, decision, otherwise)
        self._note_forward(graph, decision.deployment)
        self._note_deployed(decision.deployment)
        entry = self._entries.get(graph.digest)
        known = entry is not None and entry.decision == decision
        cost = costs.of_entry(entry) if entry is not None and known else None
        made = deployed(candidates, decision.deployment, cost)
        self._at_once.append((graph, made))
        return made.run

    def _note_deployed(self, deployment: Deployment) -> None:
        self._session.trees_have_run |= deployment is Deployment.TREES
        self._session.has_relocated |= deployment is Deployment.GRAPH
        self._alignment.launches |= deployment is not Deployment.TREES
        self._relocates |= deployment is Deployment.GRAPH

    def _note(self, graph: Graph, decision: Decision, otherwise: Source) -> None:
        """Report how a graph runs that is not measured here: as the cache has it, or why it runs otherwise."""
        entry = self._entries.get(graph.digest)
        looked_up = entry is not None and entry.decision == decision
        source, doubt = Source.CACHE if looked_up else otherwise, self._doubts.get(graph.digest)
        because = doubt.told() if doubt is not None and not looked_up else ""
        self._session.report.deploy(graph, self._environment, decision, source, because)

    def _measure(
        self,
        graph: Graph,
        candidates: Candidates,
        cached: Decision | None,
        disputed: Entry | None = None,
        before: Before | None = None,
        *,
        tells: bool = True,
    ) -> Region:
        calls = cached.calls if cached is not None else 0
        region = Region(
            graph,
            candidates,
            self._session,
            functools.partial(self._on_decided, graph, before),
            id(self._family_of(graph)),
            warm_up_calls=calls,
            part=self._part,
            before=before,
        )
        self._alignment.begin()
        self._note_forward(graph, None)
        self._tallies[graph.digest] = region.tally
        rejected = disputed or self._rejected.get(graph.digest)
        doubt = self._doubts.get(graph.digest)
        family = self._family_of(graph)
        self._session.watch(region, self._environment, family, cached, rejected, doubt, tells=tells)
        return region

    def _check(self, graph: Graph, candidates: Candidates, entry: Entry) -> Checked:
        """Run a graph as somebody else has decided, and measure it if that does not hold here."""
        decision = entry.decision
        runnable, cost = candidates.runnable(decision.deployment), costs.of_entry(entry)
        assert cost is not None

        def settle(checked: Checked, holds: bool) -> Runnable:
            self._session.end_check(number, holds=holds)
            if holds:
                made = deployed(candidates, decision.deployment, cost)
                self._on_deployed(graph, checked, made)
                return made.run
            self._doubts[graph.digest] = doubts.disputed(entry)
            region = self._measure(graph, candidates, None, entry)
            self._alignment.end(self._compiled())
            self._replace(graph, checked, region)
            return region

        self._alignment.begin()
        self._note_forward(graph, decision.deployment)
        number = self._session.begin_check(graph, self._environment, decision)
        self._checks[graph.digest] = number
        claimed = Claimed(decision.deployment, cost, self._integers.get(graph.digest, ()))
        jury = self._session.families.jury(id(self._family_of(graph)))
        return Checked(runnable, claimed, candidates, settle, self._session.report, jury)

    def _follow(self, graph: Graph, candidates: Candidates) -> Follower:
        def deploy(follower: Follower, decision: Decision) -> Runnable:
            decision = possible(decision, candidates.offered)
            self._session.ranks.followed(graph, self._environment, decision)
            made = deployed(candidates, decision.deployment)
            self._on_deployed(graph, follower, made)
            return made.run

        self._alignment.begin()
        launch = candidates.runnable(Deployment.KERNELS)
        ranks = self._session.ranks
        return ranks.follow(graph, self._environment, launch, self._family, self._part, deploy)

    def _record(self, records: Sequence[Record]) -> None:
        """Add to the cache what this process knows of itself; one rank does for all."""
        if self._part.leads:
            self._session.record(self._environment, records)

    def complete(self, compiled: Any) -> None:
        """Finish what Inductor's `post_compile` has left to be done, now that it has run."""
        self._compiled = weakref.ref(compiled)
        self._complete(compiled)
        self._look_again_at_all()

    def _complete(self, compiled: Any) -> None:
        relocated_whole = self._next == 0 and self._try_whole(compiled)
        if self._next == 0:
            self._only_launch()
        elif relocated_whole:
            self._watch(compiled)  # and Inductor has seen to the alignment of its inputs
        else:
            self._watch(compiled)
            self._alignment.complete(compiled)

    def _watch(self, compiled: Any) -> None:
        """Have it be observed what a forward saves and its backward takes, if the forward is relocated or may be."""
        self._note_link()
        if self._link is None or self._watching or not self._link_is_wanted():
            return
        from pygraphd.client import recycling

        recycling.watch(compiled, self._link, is_backward=self._facts.is_backward)
        self._watching = True

    def _note_link(self) -> None:
        if self._link is not None and not self._facts.is_backward:
            undecided = self._alignment.undecided or self._by_size
            self._link.wanted = self._relocates or bool(undecided and self._may_relocate)
            self._link.pending &= self._link.wanted
            if not self._link.wanted:
                self._link.withdraw()

    def _link_is_wanted(self) -> bool:
        return self._link is not None and self._link.wanted

    def _try_whole(self, compiled: Any) -> bool:
        """Offer relocation for a graph of which PyTorch captures no part; return whether that can be.

        Nothing of it runs on the CPU, so that a recording holds all that it does. What the driver does not let be captured is
        found out then, and launched.
        """
        facts, device_index = self._facts, self._facts.device_index
        if device_index is None or not whole.may_be_relocated(facts, len(self._graphs)):
            return False
        launch = compiled.current_callable
        candidates = Candidates(
            launch=launch,
            trees=None,
            device_index=device_index,
            is_backward=facts.is_backward,
            make_relocate=functools.partial(self._relocatable, launch, device_index, self._beforehand),
        ).renewed()
        if candidates.relocate is None:
            return False
        compiled.current_callable = self._run_of_any_size(self._graphs[0], candidates)
        self._next = 1
        return True

    def _only_launch(self) -> None:
        """Record that nothing but KERNELS was to be had, and why, for each partition that the cache does not know."""
        decision = whole.only_launch(self._facts)
        for graph in self._graphs:
            agreed = self._part.propose(graph.digest, decision)
            otherwise = Source.RULE if agreed == decision else Source.GROUP
            self._note(graph, possible(agreed, [Deployment.KERNELS]), otherwise)
        unknown = [graph for graph in self._graphs if graph.digest not in self._entries]
        self._record([Record(graph, decision) for graph in unknown])

    def _on_decided(self, graph: Graph, before: Before | None, region: Region, made: Deployed) -> None:
        if before is not None and made.deployment is not before.deployment:
            self._session.drift.changed(id(self._family_of(graph)))
        self._on_deployed(graph, region, made)

    def _on_deployed(self, graph: Graph, region: Runnable, made: Deployed) -> None:
        self._note_deployed(made.deployment)
        is_there = self._replace(graph, region, made.run)
        compiled = self._compiled()
        self._alignment.end(compiled)
        if compiled is None:
            return
        self._note_link()
        if self._watching and not self._alignment.undecided and not self._link_is_wanted():
            from pygraphd.client import recycling

            self._watching = not recycling.unwatch(compiled)
        if is_there:
            self._look_again(compiled, graph, made)

    def _look_again_at_all(self) -> None:
        """Have what was put in place at once be timed again now and then."""
        compiled = self._compiled()
        for graph, made in self._at_once if compiled is not None else ():
            self._look_again(compiled, graph, made)
        self._at_once.clear()

    def _look_again(self, compiled: Any, graph: Graph, made: Deployed) -> None:
        """Have what was deployed be timed again now and then; of ranks, by the one that leads."""
        if made.cost is None or not self._part.leads:
            return
        claimed = Claimed(made.deployment, made.cost, self._integers.get(graph.digest, ()))
        drift, family = self._session.drift, id(self._family_of(graph))
        number = drift.add(
            family,
            functools.partial(self._look, graph, made, claimed),
            functools.partial(self._has_rivals, made),
        )
        self._looks[graph.digest] = number
        weakref.finalize(compiled, drift.forget, number).atexit = False
        if made.adopted is not None and self._session.must_check(made.adopted):
            self._session.report.count(checked=1)
            jury = self._session.families.jury_of_adopted(family)
            self._look(graph, made, claimed, number, jury, is_first=True)

    def _has_rivals(self, made: Deployed) -> bool:
        """Whether a graph may be measured anew for what a look, which holds it against launches, does not see.

        A relocatable graph launches the same kernels as trees do; these are held against it if they have run here anyway.
        """
        session, candidates = self._session, made.candidates
        return candidates.has_rivals(
            made.deployment,
            may_relocate=session.may_relocate(candidates.device_index),
            may_try_trees=session.may_try_trees(),
        )

    def _look(
        self,
        graph: Graph,
        made: Deployed,
        claimed: Claimed,
        number: int,
        jury: Jury,
        *,
        is_first: bool = False,
    ) -> None:
        """Time a graph on its next calls, and measure it anew if it does not cost what it did, or is not the faster way any more."""
        drift, run = self._session.drift, made.run

        def settle(checked: Checked, holds: bool) -> Runnable:
            try:
                is_retrial = jury.is_retrial
                # First what may fail, while it still is looked at.
                anew = self._made_anew(made, is_retrial=is_retrial) if not holds else None
                note = drift.retried if is_retrial else drift.drifted
                if anew is not None and (note(number) or (is_first and not drift.is_over)):
                    return self._measure_again(checked, graph, made, claimed, anew)
                self._replace(graph, checked, run)
                return run
            except BaseException:
                self._replace(graph, checked, run)
                raise
            finally:
                self._alignment.end_look(self._compiled())

        checked = self._looked(graph, made, claimed, settle, jury)
        if self._put_in_place(graph, run, checked):
            self._session.report.count(rechecked=1)
        else:
            # It is still being timed since the last look, or is not where it could be timed.
            checked.withdraw()

    def _put_in_place(self, graph: Graph, run: Runnable, checked: Checked) -> bool:
        """Put what times a graph in its place, and only then have it begin; return whether that could be."""
        if not self._replace(graph, run, checked):
            return False
        try:
            self._alignment.begin_look(self._compiled())
        except BaseException:
            self._replace(graph, checked, run)
            checked.withdraw()
            raise
        checked.is_begun = True
        return True

    def _looked(
        self,
        graph: Graph,
        made: Deployed,
        claimed: Claimed,
        settle: Callable[[Checked, bool], Runnable],
        jury: Jury,
    ) -> Checked:
        session = self._session
        if made.deployment is Deployment.KERNELS:  # of all else, nothing is left
            return Checked(made.run, claimed, made.candidates, settle, session.report, jury)
        why_not = functools.partial(session.why_not_launch, made.candidates)
        place = Place(graph, id(self._family_of(graph)), session.rota, session.timeline, why_not)
        return Looked(made.run, claimed, made.candidates, settle, session.report, jury, place)

    def _made_anew(self, made: Deployed, *, is_retrial: bool) -> tuple[Candidates, Before]:
        """Return what a graph is to be measured anew in, and how it ran until now."""
        is_partial = is_retrial and not self._session.may_try_trees()
        candidates = made.candidates.with_relocation() if is_partial else made.candidates.renewed()
        return candidates, Before(made.deployment, made.cost, may_stay=is_retrial, is_partial=is_partial)

    def _measure_again(
        self,
        checked: Checked,
        graph: Graph,
        made: Deployed,
        claimed: Claimed,
        anew: tuple[Candidates, Before],
    ) -> Region:
        candidates, before = anew
        entry = self._session.note_anew(
            graph, self._environment, checked.objection, is_retrial=before.may_stay
        )
        outdated = entry if entry is not None and claimed.is_of(entry) else None
        cost_us = made.cost.cost_us if made.cost is not None else None
        self._doubts[graph.digest] = doubts.drifted(made.deployment, cost_us, overtaken=checked.is_overtaken)
        # What others have found meanwhile, who may have tried all, stays.
        tells = not before.is_partial or outdated is not None
        region = self._measure(graph, candidates, None, outdated, before, tells=tells)
        self._replace(graph, checked, region)
        compiled = self._compiled()
        if compiled is not None:
            self._watch(compiled)
        return region

    def _replace(self, graph: Graph, one: Runnable, other: Runnable) -> bool:
        """Put one callable in the place of another; return whether that was there."""
        compiled = self._compiled()
        if compiled is None:
            return False
        return self._alignment.replaced(compiled, one, other) or self._put(compiled, graph, one, other)

    def _put(self, compiled: Any, graph: Graph, one: Runnable, other: Runnable) -> bool:
        if not graph.sizes:
            return _torch.replace_callable(compiled, one, other)
        sized = self._by_size[graph.digest]()
        return sized is not None and sized.replace(graph.sizes, one, other)
