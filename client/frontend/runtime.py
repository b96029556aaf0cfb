"""What one process knows: its view of the cache, its report, the regions that are being measured. No torch is patched here."""

from __future__ import annotations

import itertools
import os
import socket
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.autotune import cost
from pygraphd.client.autotune.partition_trial import Decided, Region, Tally
from pygraphd.client.autotune.validation import DISPUTED
from pygraphd.client.backend import torch_private
from pygraphd.client.common import log
from pygraphd.client.common.report import Report
from pygraphd.client.decisions import fingerprint, rejection, rules
from pygraphd.client.decisions.leases import Claims, Interest, Turn
from pygraphd.client.decisions.ranks.session_ranks import Ranks
from pygraphd.client.decisions.rejection import Rejection
from pygraphd.client.decisions.service import Cache
from pygraphd.client.dispatch.compiled_graph import Known, Plan
from pygraphd.client.dispatch.shapes import IDLE_TICKS, REMEMBERED, SETUPS_OF_EACH, Steps
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.settings import Trust
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import MAX_SIZES, Decision, Deployment, Entry, Graph, Kind, Record
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Source

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import CompiledFacts, Runnable
    from pygraphd.client.dispatch.shapes import Bounds
    from pygraphd.client.recording.capture import CudaRecorder
    from pygraphd.client.recording.recordings import Recordings
    from pygraphd.schema.keys import Environment


LEFT_TO_ANOTHER = Reason(ReasonCode.LEFT_TO_ANOTHER_PROCESS)
SWITCHED_OFF = "PYGRAPH_RELOCATE=0"
CANNOT_RECORD = "relocatable graphs cannot be had in this process"
FORWARD_NOT_OURS = "its forward was compiled without PyGraph"


class Session:
    """The state of the hook in one process; a forked child has to make its own."""

    def __init__(self, locations: Locations | None = None) -> None:
        self.locations = locations or locate()
        self.report = Report()
        self.ranks = Ranks(self.report)
        self.options = settings.read(os.environ)
        if self.options.log is not None:
            log.print_from(self.options.log)
        bounds = self.options.sizes
        self.report.bounds = {
            "sizes": bounds.sizes,
            "size_calls": bounds.calls,
            "remembered_sizes": REMEMBERED,
            "setups_per_size": SETUPS_OF_EACH,
            "idle_ticks": IDLE_TICKS,
            "integers": MAX_SIZES,
        }
        self._host = socket.gethostname()
        self.cache = Cache(self.locations, self._host, self.report, readonly=self.options.readonly)
        for misread in self.options.misread:
            self.report.count_failure(misread)
        self._claims = Claims(self.cache, self._trusted)
        self._checked: dict[int, tuple[Graph, Environment, Decision]] = {}
        self._numbers = itertools.count()
        self.pid = os.getpid()
        self._watched: dict[int, _Watched] = {}
        self._families: dict[int, object] = {}  # kept alive, so that their ids stay theirs
        self._steps: dict[int, Steps] = {}
        self._recorders: dict[int, CudaRecorder | None] = {}
        self._is_helper_prepared = False
        self._latest_options: tuple[tuple[str, str], ...] = ()
        self._options: dict[int, tuple[tuple[str, str], ...]] = {}

    def plan(self, compiled: Any, graph_kwargs: Mapping[str, Any]) -> Plan | None:
        """Look up the partitions of a compiled graph; None: Inductor is to run it as it does without us."""
        facts = torch_private.facts(compiled, graph_kwargs, self.options.graph_ops)
        box = graph_kwargs.get("boxed_forward_device_index")  # a forward and its backward share one
        if reason := self._why_not_ours(facts, box):
            self.report.count_left_to_torch(reason)
            return None
        family = box if box is not None else object()
        graphs = fingerprint.graphs(facts, self._options_of(family, is_backward=facts.is_backward))
        environment = fingerprint.environment(facts.device_index)
        part = self.ranks.part(family, graphs, environment)
        self.report.count(graphs=len(graphs))
        known = self.look_up(graphs, environment) if part.leads else Known({}, {})
        plan = Plan(self, facts, environment, graphs, known, family, part)
        if not facts.is_backward:
            torch_private.note_ours(box)
        return plan

    def _why_not_ours(self, facts: CompiledFacts, box: object) -> str | None:
        """Return why Inductor is to run a graph as it does without us."""
        if facts.device_index is None:
            return None  # there is nothing to be done, which is to be reported
        if not self.options.relocate:
            return SWITCHED_OFF
        if self._recorder_of(facts.device_index) is None:
            return CANNOT_RECORD
        # PyTorch's trees run its forward then, and have to run it, too.
        is_theirs = facts.cudagraphs_asked and facts.is_backward and not torch_private.is_ours(box)
        return FORWARD_NOT_OURS if is_theirs else None

    def look_up(self, graphs: Sequence[Graph], environment: Environment) -> Known:
        """Look graphs up."""
        found = self.cache.lookup(environment, [graph.digest for graph in graphs])
        why_not = {graph: self._why_not_believed(entry) for graph, entry in found.items()}
        doubted = {graph: doubt for graph, doubt in why_not.items() if doubt is not None}
        entries = {graph: entry for graph, entry in found.items() if graph not in doubted}
        rejected = {graph: found[graph] for graph in doubted}
        for graph in graphs:
            entry, doubt = found.get(graph.digest), doubted.get(graph.digest)
            state = "unknown" if entry is None else doubt.why if doubt else entry.decision.deployment
            log.info("%s: looked up: %s", graph.name, state)
        hits = sum(graph.digest in entries for graph in graphs)
        self.report.count(looked_up=len(graphs), hits=hits, misses=len(graphs) - hits)
        return Known(entries, rejected, doubted)

    def _options_of(self, family: object, *, is_backward: bool) -> tuple[tuple[str, str], ...]:
        """Return the options in force; for a backward, those of its forward.

        A backward is compiled with its forward if the code comes from a cache, and at its first call if not; the options
        in force may differ, and its key must not.
        """
        if is_backward and id(family) in self._options:
            return self._options[id(family)]
        options = torch_private.kernel_options()
        self._families[id(family)] = family
        self._options[id(family)] = self._latest_options = (
            self._latest_options if options == self._latest_options else options
        )
        return options

    def _why_not_believed(self, entry: Entry) -> Rejection | None:
        return rejection.REFRESHED if self.options.refresh else self._why_not_trusted(entry)

    def _why_not_trusted(self, entry: Entry) -> Rejection | None:
        if self.options.trust is Trust.LOCAL and self._is_foreign(entry):
            return rejection.not_trusted(entry)
        age_s = time.time() - entry.measured_at if entry.measured_at is not None else 0.0
        if 0 < self.options.max_age_s < age_s:
            return rejection.too_old(age_s)
        return None if entry.decision.policy == POLICY_VERSION else rejection.other_policy(entry.decision)

    def _trusted(self, entry: Entry) -> bool:
        return self._why_not_trusted(entry) is None

    def _is_foreign(self, entry: Entry) -> bool:
        """Whether another user or host has decided; rows of old databases do not say where."""
        return entry.uid not in {None, os.geteuid()} or entry.host not in {"", self._host}

    def must_check(self, entry: Entry) -> bool:
        """Whether a decision is to be timed on a few calls; one that rests on no measurement has nothing to hold it against."""
        verify = self.options.trust is Trust.VERIFY
        return verify and cost.of_entry(entry) is not None and self._is_foreign(entry)

    def begin_check(self, graph: Graph, environment: Environment, decision: Decision) -> int:
        """Note that a graph runs as somebody else has decided, for the time being; returns a number for `end_check`."""
        self.report.count(checked=1)
        number = next(self._numbers)
        self._checked[number] = graph, environment, decision
        return number

    def end_check(self, number: int, *, holds: bool) -> None:
        """Note whether that decision stays."""
        noted = self._checked.pop(number, None)
        if noted is None:
            return  # it was forgotten meanwhile
        graph, environment, decision = noted
        if holds:
            self.report.record_deployment(graph, environment, decision, Source.CACHE)
        else:
            self.report.count(disputed=1)
            self.report.count_fallback(DISPUTED)

    def forget(self, graph: Graph, environment: Environment, tally: Tally | None, check: int) -> None:
        """Take back what was noted of a graph at a size that makes room: it is launched now, and may be set up again.

        `tally` is its region's, `check` what `begin_check` has returned, if there were any. Another copy of the graph may be at work.
        """
        is_open = self._watched.pop(id(tally), None) is not None
        is_open |= self._checked.pop(check, None) is not None
        if not is_open:
            self.report.retract_deployment(graph, environment)

    def watch(
        self,
        region: Region,
        environment: Environment,
        family: object,
        cached: Decision | None,
        rejected: Entry | None = None,
        doubt: Rejection | None = None,
    ) -> None:
        """Keep a region that is not decided, so that `close` can say at least how often it was called.

        `family` is one object for a forward and its backward. `cached` is what the cache knows of it, `rejected` what it says
        and what is not believed, `doubt` why what was known is not taken.
        """
        known_calls = -1.0 if cached is None else float("inf") if rules.is_noisy(cached) else cached.calls
        self._families[id(family)] = family
        is_backward = region.graph.kind is Kind.BACKWARD
        interest = Interest(environment, region.graph.digest, id(family), is_backward)
        self._claims.add(interest, rejected)
        self._watched[id(region.tally)] = _Watched(region.graph, region.tally, interest, known_calls, doubt)
        # A region that goes with its model is nothing to be waited for, nor to be kept from others.
        weakref.finalize(region, self._claims.remove, interest).atexit = False

    def turn(self, region: Region) -> Entry | Turn:
        """Return whose turn it is to measure a region, or the answer of another process that has."""
        watched = self._watched.get(id(region.tally))
        if watched is None:
            return Turn.OURS
        return self._claims.turn(watched.interest)

    def keep_turn(self, region: Region) -> None:
        """Note that this process is still measuring a region."""
        watched = self._watched.get(id(region.tally))
        if watched is not None:
            self._claims.keep(watched.interest)

    def agree(self, region: Region, result: Decided, offered: tuple[Deployment, ...]) -> Decision:
        """Return what is to run, of what is offered, in view of what other ranks have decided."""
        return self.ranks.agree(region.part, region.graph, result.decision, offered)

    @property
    def bounds(self) -> Bounds:
        """How many dynamic sizes are decided apart."""
        return self.options.sizes

    def steps(self, family: object) -> Steps:
        """Return the dynamic sizes of a forward and its backward, one for each family."""
        self._families[id(family)] = family
        return self._steps.setdefault(id(family), Steps(family))

    def relocatable(self, launch: Runnable, device_index: int, facts: GraphFacts) -> Recordings | None:
        """Return a callable as relocatable graphs, if these are wanted and can be had here; for the rest see there."""
        recorder = self._recorder_of(device_index)
        if recorder is None:
            return None
        from pygraphd.client.recording.attention_host import make_recordings
        from pygraphd.client.recording.recordings import MAX_RECORDINGS
        from pygraphd.client.replay.exec_cache import MAX_EXECUTABLES

        recordings = max(self.options.sizes.sizes, MAX_RECORDINGS)
        self.report.bounds |= {"recordings": recordings, "executables": MAX_EXECUTABLES}
        return make_recordings(launch, recorder, self.report, facts, recordings, self.options.recheck_s)

    def _recorder_of(self, device_index: int) -> CudaRecorder | None:
        if device_index not in self._recorders:
            self._recorders[device_index] = self._recorder(device_index)
        return self._recorders[device_index]

    def _recorder(self, device_index: int) -> CudaRecorder | None:
        from pygraphd.client.backend import driver
        from pygraphd.client.recording.capture import CudaRecorder

        try:
            if reason := torch_private.missing_for_relocation():
                raise driver.DriverError(reason, 0)
            recorder = CudaRecorder(driver.load(), device_index)
        except driver.DriverError as error:
            self.report.count_failure(f"relocatable graphs: {error}")
            return None
        self.prepare_helper()
        return recorder

    def prepare_helper(self) -> None:
        """Have the compiled helper made if it never was; nobody waits for it, so this is best done before graphs are compiled."""
        if not (self.options.relocate and self.options.native) or self._is_helper_prepared:
            return
        if torch_private.missing_for_relocation():
            return
        self._is_helper_prepared = True
        from pygraphd.client.replay.native.ffi import helper

        if reason := helper.prepare(self.locations.cache, may_compile=not self.options.readonly):
            self.report.count_failure(f"compiled helper: {reason}")

    def helper_is_coming(self) -> bool:
        """Return whether it is about to be there; see `bulk.Helper.is_coming`."""
        if not self._is_helper_prepared:
            return False
        from pygraphd.client.replay.native.ffi import helper

        return helper.is_coming()

    def decided(self, region: Region, result: Decided, runs: Decision) -> None:
        """Take note of what runs from now on, and hand what this process found out to the cache."""
        watched = self._watched.pop(id(region.tally), None)
        if watched is None:
            return  # the session has been closed meanwhile
        self._claims.remove(watched.interest)
        environment = watched.interest.environment
        because = watched.doubt.reason(result.measurements) if watched.doubt is not None else None
        self.report.record_deployment(result.graph, environment, runs, _source(result, runs), because)
        if result.adopted is not None:
            self.report.count(adopted=1)
            return
        if result.measurements:
            self.report.count(measured=1)
        self.record(environment, [Record(result.graph, result.decision, result.measurements)])

    def record(self, environment: Environment, records: Sequence[Record]) -> None:
        """Hand records to the cache, if there are any."""
        if records:
            self.cache.record(environment, records)

    def close(self) -> None:
        """Record what was called too seldom to be measured; the last thing a process does here."""
        unfinished: dict[Environment, list[Record]] = {}
        for watched in list(self._watched.values()):  # other threads may still be at work
            environment, calls = watched.interest.environment, watched.tally.calls
            left = self._claims.is_left_to_others(watched.interest)
            decision = rules.not_measured(LEFT_TO_ANOTHER, calls) if left else rules.too_few_calls(calls)
            because = watched.doubt.reason() if watched.doubt is not None else None
            self.report.record_deployment(watched.graph, environment, decision, Source.UNFINISHED, because)
            if not left and watched.known_calls < calls:
                record = Record(watched.graph, decision)
                unfinished.setdefault(environment, []).append(record)
        for graph, environment, decision in list(self._checked.values()):
            self.report.record_deployment(graph, environment, decision, Source.CACHE)
        self.ranks.close()
        self._checked.clear()
        self._watched.clear()
        for environment, records in unfinished.items():
            self.record(environment, records)
        for reason in torch_private.graph_breaks():
            self.report.count_graph_break(reason)


@dataclass(frozen=True, slots=True)
class _Watched:
    """A region that is not decided: what is asked about it, how many calls the cache knows of (-1: none), and why that is not enough.

    Not the region itself: it holds a capture, whose memory is to go with the model.
    """

    graph: Graph
    tally: Tally
    interest: Interest
    known_calls: float
    doubt: Rejection | None


def _source(result: Decided, runs: Decision) -> Source:
    if runs != result.decision:
        return Source.GROUP
    if result.adopted is not None:
        return Source.CACHE
    return Source.MEASURED if result.measurements else Source.RULE
