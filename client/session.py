"""What one process knows: its view of the cache, its report, the regions that are being measured. No torch is patched here.

For each compiled graph it makes a `Plan`: which partitions there are, what the cache says of them, and from that how each
is to run. A plan never fails: whatever goes wrong leaves the graph to PyTorch, with a reason in the report.
"""

from __future__ import annotations

import functools
import os
import socket
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client import _torch, fingerprint, policy
from pygraphd.client.agreement import ALONE, Part, possible
from pygraphd.client.cache import Cache
from pygraphd.client.following import Follower, Pace
from pygraphd.client.group import Groups
from pygraphd.client.region import Candidates, Decided, Region, Tally
from pygraphd.client.report import Report
from pygraphd.client.rota import Rota
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import (
    MAX_REASON,
    Decision,
    Deployment,
    Entry,
    Graph,
    Kind,
    Measurement,
    Record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pygraphd.client._torch import CompiledFacts, Cudagraphify, Runnable
    from pygraphd.client.capture import CudaRecorder
    from pygraphd.client.recycling import Link
    from pygraphd.client.relocatable import Relocatable

NO_DEVICE = "no CUDA device"
ON_THE_CPU = "runs on the CPU"
MODE_WITHOUT_TREES = "only LAUNCH in this mode: all else needs reduce-overhead or max-autotune"
NOT_CAPTURED = "PyTorch does not capture it: "
CAPTURED_DIFFERENTLY = (
    "its attention keeps random numbers elsewhere if captured: forward and backward must not differ"
)
STILL_WAITING = "ranks: the program ended before there was a decision"
RELOCATE_VARIABLE = "PYGRAPH_RELOCATE"
"""Relocatable graphs are tried only where this is 1: they have not been proven yet on any GPU."""


class Session:
    """The state of the hook in one process; a forked child has to make its own."""

    def __init__(self, locations: Locations | None = None) -> None:
        self.locations = locations or locate()
        self.report = Report()
        self.groups = Groups(self.report)
        self.rota = Rota()
        self.cache = Cache(self.locations, socket.gethostname(), self.report)
        self.pid = os.getpid()
        self._watched: dict[int, _Watched] = {}
        self._families: dict[int, object] = {}  # kept alive, so that their ids stay theirs
        self._links: dict[int, Link] = {}
        self._claims: dict[int, str] = {}
        self._paces: dict[int, Pace] = {}
        self._waiting = 0
        self._not_in_trees: set[int] = set()
        self._overruled: set[int] = set()
        """Families whose forward does not run in trees although it was measured so."""
        self._recorders: dict[int, CudaRecorder | None] = {}
        self._latest_options: tuple[tuple[str, str], ...] = ()
        self._options: dict[int, tuple[tuple[str, str], ...]] = {}
        self.tree_devices: set[int] = set()
        """Devices on which Inductor believes that a forward has run in a tree."""

    def plan(self, compiled: Any, graph_kwargs: Mapping[str, Any]) -> Plan:
        """Look up the partitions of a compiled graph."""
        facts = _torch.facts(compiled, graph_kwargs)
        box = graph_kwargs.get("boxed_forward_device_index")  # a forward and its backward share one
        family = box if box is not None else object()
        graphs = fingerprint.graphs(facts, self._options_of(family, is_backward=facts.is_backward))
        environment = fingerprint.environment(facts.device_index)
        part = self._part(family, graphs, environment)
        self.report.count(graphs=len(graphs))
        entries = self._look_up(graphs, environment) if part.leads else {}
        return Plan(self, facts, environment, graphs, entries, family, part)

    def _look_up(self, graphs: Sequence[Graph], environment: Environment) -> dict[str, Entry]:
        found = self.cache.lookup(environment, [graph.digest for graph in graphs])
        entries = {graph: entry for graph, entry in found.items() if self.usable(entry.decision)}
        hits = sum(graph.digest in entries for graph in graphs)
        self.report.count(looked_up=len(graphs), hits=hits, misses=len(graphs) - hits)
        return entries

    def _part(self, family: object, graphs: Sequence[Graph], environment: Environment) -> Part:
        """Return what this process has to do about some graphs: all of it, unless ranks share it.

        One rank leads for a forward and its backward, which are measured together.
        """
        agreement = self.groups.agreement()
        if agreement is None:
            return ALONE
        self._families[id(family)] = family
        claim = self._claims.setdefault(id(family), graphs[0].digest)
        part = agreement.part(claim, [graph.digest for graph in graphs], environment.digest())
        self.report.count(**{"led" if part.leads else "followed": len(graphs)})
        return part

    def _options_of(self, family: object, *, is_backward: bool) -> tuple[tuple[str, str], ...]:
        """Return the options in force; for a backward, those of its forward.

        A backward is compiled with its forward if the code comes from a cache, and at its first call if not; the options
        in force may differ, and its key must not.
        """
        if is_backward and id(family) in self._options:
            return self._options[id(family)]
        options = _torch.kernel_options()
        self._families[id(family)] = family
        self._options[id(family)] = self._latest_options = (
            self._latest_options if options == self._latest_options else options
        )
        return options

    def watch(
        self, region: Region, environment: Environment, family: object, cached: Decision | None
    ) -> None:
        """Keep a region that is not decided, so that `close` can say at least how often it was called.

        `family` is one object for a forward and its backward.
        """
        known_calls = cached.calls if cached is not None else -1
        self._families[id(family)] = family
        self._watched[id(region.tally)] = _Watched(
            region.graph, region.tally, environment, id(family), known_calls
        )

    def settle(self, region: Region, decision: Decision, measurements: Sequence[Measurement]) -> Decision:
        """Return the decision for a measured region in view of its forward's."""
        watched = self._watched.get(id(region.tally))
        if watched is None or region.graph.kind is not Kind.BACKWARD:
            return decision
        in_trees = watched.family not in self._not_in_trees
        return policy.settle_backward(decision, measurements, forward_in_trees=in_trees)

    def agree(self, region: Region, result: Decided, offered: tuple[Deployment, ...]) -> Decision:
        """Return what is to run in view of what other ranks have decided."""
        own = result.decision
        if region.family in self._overruled:
            own = policy.settle_backward(own, result.measurements, forward_in_trees=False)
        decision = possible(region.part.propose(region.graph.digest, own), offered)
        lost_trees = own.deployment is Deployment.TREES and decision.deployment is not Deployment.TREES
        if lost_trees and region.graph.kind is not Kind.BACKWARD:
            self._overruled.add(region.family)
        return decision

    def follow(
        self,
        graph: Graph,
        launch: Runnable,
        family: object,
        part: Part,
        deploy: Callable[[Follower, Decision], Runnable],
    ) -> Follower:
        """Return what runs a graph until another rank has decided."""
        self._waiting += 1
        self._families[id(family)] = family
        pace = self._paces.setdefault(id(family), Pace())
        ask = functools.partial(part.wait, graph.digest)
        return Follower(launch, pace, ask, deploy, self.report, is_backward=graph.kind is Kind.BACKWARD)

    def followed(self, decision: Decision) -> None:
        """Take note of another rank's decision for a graph that waited for it."""
        self._waiting -= 1
        self.report.deploy(decision)

    def usable(self, decision: Decision) -> bool:
        """Whether a cached decision is one that this process could have taken; anything else is looked at anew."""
        offered = {Deployment.LAUNCH, Deployment.TREES}
        if relocation_wanted():
            offered.add(Deployment.RELOCATE)
            if decision.reason.startswith((MODE_WITHOUT_TREES, NOT_CAPTURED)):
                return False
        return decision.policy == policy.POLICY_VERSION and decision.deployment in offered

    def relocatable(
        self, launch: Runnable, device_index: int, link: Link | None = None
    ) -> Relocatable | None:
        """Return a callable as relocatable graphs, if these are wanted and can be had here; for `link` see there."""
        if not relocation_wanted():
            return None
        if device_index not in self._recorders:
            self._recorders[device_index] = self._recorder(device_index)
        recorder = self._recorders[device_index]
        if recorder is None:
            return None
        from pygraphd.client.relocatable import Relocatable

        return Relocatable(launch, recorder, self.report, link)

    def link(self, family: object) -> Link | None:
        """Return what a forward and its backward know of each other's memory, one for each family."""
        if not relocation_wanted():
            return None
        from pygraphd.client.recycling import Link

        self._families[id(family)] = family
        return self._links.setdefault(id(family), Link())

    def _recorder(self, device_index: int) -> CudaRecorder | None:
        from pygraphd.client import driver
        from pygraphd.client.capture import CudaRecorder

        try:
            if reason := _torch.missing_for_relocation():
                raise driver.DriverError(reason, 0)
            return CudaRecorder(driver.load(), device_index)
        except driver.DriverError as error:
            self.report.fail(f"relocatable graphs: {error}")
            return None

    def decided(self, region: Region, result: Decided) -> None:
        """Take a region's result and hand it to the cache."""
        watched = self._watched.pop(id(region.tally), None)
        if watched is None:
            return  # the session has been closed meanwhile
        if result.measurements:
            self.report.count(measured=1)
            in_trees = result.decision.deployment is Deployment.TREES
            if region.graph.kind is not Kind.BACKWARD and not in_trees:
                self._not_in_trees.add(watched.family)
        self.record(watched.environment, [Record(result.graph, result.decision, result.measurements)])

    def record(self, environment: Environment, records: Sequence[Record]) -> None:
        """Hand records to the cache, if there are any."""
        if records:
            self.cache.record(environment, records)

    def close(self) -> None:
        """Record what was called too seldom to be measured; the last thing a process does here."""
        unfinished: dict[Environment, list[Record]] = {}
        for watched in self._watched.values():
            decision = policy.too_few_calls(watched.tally.calls)
            self.report.deploy(decision)
            if watched.known_calls < watched.tally.calls:
                unfinished.setdefault(watched.environment, []).append(Record(watched.graph, decision))
        for _ in range(self._waiting):
            self.report.deploy(policy.not_measured(STILL_WAITING, 0))
        self._watched.clear()
        self._waiting = 0
        for environment, records in unfinished.items():
            self.record(environment, records)


@dataclass(frozen=True, slots=True)
class _Watched:
    """A region that is not decided: where it runs, its family, and how many calls the cache knows of (-1: none).

    Not the region itself: it holds a capture, whose memory is to go with the model.
    """

    graph: Graph
    tally: Tally
    environment: Environment
    family: int
    known_calls: int


class Plan:
    """How the partitions of one compiled graph are to run. Made before Inductor's `post_compile`, completed after it."""

    def __init__(
        self,
        session: Session,
        facts: CompiledFacts,
        environment: Environment,
        graphs: tuple[Graph, ...],
        entries: Mapping[str, Entry],
        family: object,
        part: Part,
    ) -> None:
        self._session = session
        self._facts = facts
        self._environment = environment
        self._graphs = graphs
        self._entries = entries
        self._family = family
        self._part = part
        self._link = None if facts.is_inference else session.link(family)
        self._next = 0
        self._open = 0
        self._launches = False
        self._compiled: Callable[[], Any] = lambda: None
        self._without_realign: tuple[Any, Any] | None = None

    def cudagraphify(self, original: Cudagraphify, runnable: Runnable, kwargs: Mapping[str, Any]) -> Runnable:
        """Return what runs the next partition: what the cache says, or a region that finds out."""
        graph = self._graphs[self._next]
        self._next += 1
        candidates = Candidates(
            launch=runnable,
            trees=original(runnable, **kwargs),
            device_index=kwargs["device_index"],
            is_backward=kwargs["is_backward"],
            relocate=self._session.relocatable(
                runnable, kwargs["device_index"], None if kwargs["is_backward"] else self._link
            ),
        )
        if self._facts.captured_differently:
            return self._leave_to_trees(graph, candidates, self._entries.get(graph.digest))
        return self._run_of(graph, candidates)

    def _run_of(self, graph: Graph, candidates: Candidates) -> Runnable:
        """Return what the group or the cache says, or what finds out."""
        entry = self._entries.get(graph.digest)
        usable = entry is not None and entry.decision.final and candidates.offers(entry.decision.deployment)
        decision = self._part.settled(graph.digest, entry.decision if entry and usable else None)
        if decision is not None:
            return self._deploy(candidates, possible(decision, candidates.offered))
        if not self._part.leads:
            return self._follow(graph, candidates)
        return self._measure(graph, candidates, entry.decision if entry else None)

    def _leave_to_trees(self, graph: Graph, candidates: Candidates, entry: Entry | None) -> Runnable:
        """Run a graph as PyTorch has it, whatever would be faster."""
        decision = policy.only_trees(CAPTURED_DIFFERENTLY)
        if entry is None or entry.decision != decision:
            self._record([Record(graph, decision)])
        return self._deploy(candidates, decision)

    def _deploy(self, candidates: Candidates, decision: Decision) -> Runnable:
        self._session.report.deploy(decision)
        self._launches |= decision.deployment is not Deployment.TREES
        return candidates.runnable(decision.deployment)

    def _measure(self, graph: Graph, candidates: Candidates, cached: Decision | None) -> Region:
        calls = cached.calls if cached is not None else 0
        region = Region(
            graph,
            candidates,
            self._session,
            self._on_deployed,
            id(self._family),
            warm_up_calls=calls,
            part=self._part,
        )
        self._open += 1
        self._session.watch(region, self._environment, self._family, cached)
        return region

    def _follow(self, graph: Graph, candidates: Candidates) -> Follower:
        def deploy(follower: Follower, decision: Decision) -> Runnable:
            decision = possible(decision, candidates.offered)
            candidates.let_go_of_all_but(decision.deployment)
            self._session.followed(decision)
            runnable = candidates.runnable(decision.deployment)
            self._on_deployed(follower, runnable, decision.deployment)
            return runnable

        self._open += 1
        launch = candidates.runnable(Deployment.LAUNCH)
        return self._session.follow(graph, launch, self._family, self._part, deploy)

    def _record(self, records: Sequence[Record]) -> None:
        """Add to the cache what this process knows of itself; one rank does for all."""
        if self._part.leads:
            self._session.record(self._environment, records)

    def complete(self, compiled: Any) -> None:
        """Finish what Inductor's `post_compile` has left to be done, now that it has run."""
        self._compiled = weakref.ref(compiled)
        whole = self._next == 0 and self._try_whole(compiled)
        if self._next and self._link is not None:
            from pygraphd.client import recycling

            recycling.watch(compiled, self._link, is_backward=self._facts.is_backward)
        if self._next == 0:
            self._only_launch()
        elif whole:
            return  # Inductor has seen to the alignment of its inputs
        elif self._open or self._launches:
            self._realign(compiled)

    def _try_whole(self, compiled: Any) -> bool:
        """Offer relocation for a graph of which PyTorch captures no part; return whether that can be.

        Nothing of it runs on the CPU, so that a recording holds all that it does. What the driver does not let be captured is
        found out then, and launched.
        """
        facts, device_index = self._facts, self._facts.device_index
        if (
            not facts.only_cuda
            or device_index is None
            or facts.captured_differently
            or len(self._graphs) != 1
        ):
            return False
        launch = compiled.current_callable
        relocate = self._session.relocatable(launch, device_index, None if facts.is_backward else self._link)
        if relocate is None:
            return False
        candidates = Candidates(
            launch=launch,
            trees=None,
            device_index=device_index,
            is_backward=facts.is_backward,
            relocate=relocate,
        )
        compiled.current_callable = self._run_of(self._graphs[0], candidates)
        self._next = 1
        return True

    def _only_launch(self) -> None:
        """Record that nothing but LAUNCH was to be had, and why, for each partition that the cache does not know."""
        decision = self._only_launch_decision()
        for graph in self._graphs:
            agreed = self._part.propose(graph.digest, decision)
            self._session.report.deploy(possible(agreed, [Deployment.LAUNCH]))
        unknown = [graph for graph in self._graphs if graph.digest not in self._entries]
        self._record([Record(graph, decision) for graph in unknown])

    def _only_launch_decision(self) -> Decision:
        if not torch.cuda.is_available():
            return policy.only_launch(NO_DEVICE)
        if not self._facts.on_cuda:
            return policy.only_launch(ON_THE_CPU)
        if not self._facts.cudagraphs_asked:
            return policy.only_launch(MODE_WITHOUT_TREES)
        reason = one_line(f"{NOT_CAPTURED}{self._facts.refusal or 'it did not try'}")
        # What another graph or a setting of the process has led to may be otherwise next time.
        return policy.only_launch(reason) if self._facts.refused_for_good else policy.not_measured(reason, 0)

    def _realign(self, compiled: Any) -> None:
        # Inductor leaves the alignment of inputs to the captured graph where it believes that there is one.
        before = compiled.current_callable
        _torch.realign(compiled)
        self._without_realign = (compiled.current_callable, before)

    def _on_deployed(self, region: Runnable, runnable: Runnable, deployment: Deployment) -> None:
        self._open -= 1
        self._launches |= deployment is not Deployment.TREES
        compiled = self._compiled()
        if compiled is None:
            return
        if not self._open and not self._launches and self._without_realign is not None:
            _torch.replace_callable(compiled, *self._without_realign)
        _torch.replace_callable(compiled, region, runnable)


def relocation_wanted() -> bool:
    """Whether relocatable graphs are to be tried."""
    return os.environ.get(RELOCATE_VARIABLE) == "1"


def one_line(text: str) -> str:
    """Return the first line of a reason, printable and short enough for the cache."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return "".join(c if c.isprintable() else " " for c in line)[:MAX_REASON]
