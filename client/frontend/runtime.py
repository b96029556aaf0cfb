"""The state of one process: its view of the cache, its report, its devices, its pairs. Composition only; no torch is patched here."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch.utils.weak import WeakIdKeyDictionary

from pygraphd.client.backend import torch_private
from pygraphd.client.common import log
from pygraphd.client.common.report import Report
from pygraphd.client.decisions import fingerprint
from pygraphd.client.decisions.bundle import Bundle
from pygraphd.client.decisions.cache import Cache
from pygraphd.client.decisions.decision_service import DecisionService
from pygraphd.client.decisions.ranks.process_group import COLLECTIVES_OFF, Groups
from pygraphd.client.decisions.trust import TrustPolicy
from pygraphd.client.dispatch.compiled_graph import CAPTURED_BY_OTHERS, CompiledGraph
from pygraphd.client.dispatch.pair import Pair
from pygraphd.client.dispatch.partition import Context
from pygraphd.client.dispatch.time_budget import TimeBudget
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.devices import Devices
from pygraphd.client.placement import provenance
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.reasons import ReasonCode, because

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping

    from pygraphd.client.backend.torch_private import CompiledFacts

SWITCHED_OFF = "PYGRAPH_RELOCATE=0"
CANNOT_RECORD = "relocatable graphs cannot be had in this process"
USES_STREAMS = "it uses streams or events of the program"
FORWARD_NOT_OURS = "its forward was compiled without PyGraph"
_PLACE = re.compile(r"^ *# File: (.+:\d+ in .+?), code:", re.MULTILINE)


class Runtime:
    """The state of the hook in one process; a forked child has to make its own."""

    def __init__(self, locations: Locations | None = None) -> None:
        self.pid = os.getpid()
        self.locations = locations or locate()
        self.options = settings.read(os.environ)
        if self.options.log is not None:
            log.print_from(self.options.log)
        self.report = Report()
        self.report.memory_limit = self.options.memory_bytes
        host = socket.gethostname()
        self.cache = Cache(self.locations, host, self.report, readonly=self.options.readonly)
        folders = self.options.bundle, torch_private.inductor_cache
        self.cache.bundle = Bundle(self.locations, self.report, *folders)
        for misread in self.options.misread:
            self.report.count_failure(misread)
        trust = TrustPolicy(host, self.options.trust, self.options.refresh, self.options.max_age_s)
        self.decisions = DecisionService(self.cache, trust, self.report)
        self.groups = Groups(self.report, captures=self.options.collectives)
        self.devices = Devices(self.options, self.locations.cache, self.report, self.groups)
        self._time_budget = TimeBudget()
        self._pairs: MutableMapping[object, Pair] = WeakIdKeyDictionary()
        """The pairs, keyed by the box that Inductor passes with a forward and its backward. A pair is freed with its box."""

    def compiled_graph(self, compiled: Any, graph_kwargs: Mapping[str, Any]) -> CompiledGraph | None:
        """Look up the partitions of a compiled graph; None: Inductor is to run it as it does without PyGraph."""
        facts = torch_private.facts(compiled, graph_kwargs, self.options.graph_ops)
        box = graph_kwargs.get("boxed_forward_device_index")
        if reason := self._why_not_ours(facts, box):
            self.report.count_left_to_torch(reason)
            return None
        pair = self.pair(box)
        graphs = fingerprint.graphs(facts, pair.options_for(is_backward=facts.is_backward))
        environment = fingerprint.environment(facts.device_index)
        pair.leader_graph = pair.leader_graph or graphs[0].digest
        role = self.groups.role(pair.leader_graph, graphs, environment)
        self.report.count(graphs=len(graphs))
        places = [*dict.fromkeys(_PLACE.findall(facts.text))][:8]
        module = provenance.module_of(compiled)
        for each, count in zip(graphs, facts.launches, strict=True):
            known_facts = {name: value for name, value in asdict(each).items() if value is not None}
            self.report.note_graph(**known_facts, module=module, places=places, launches=count or None)
        self.report.note_graph(graphs[0].digest, launches_between=facts.launches_between)
        # Followers run what the leader decides, whatever the cache says here.
        known = self.decisions.look_up(graphs, environment) if role.leads else {}
        context = Context(
            self.decisions,
            self.options.sizes,
            self.devices.recordings,
            environment,
            role,
            self._time_budget,
        )
        if facts.is_backward:
            pair.backward.returned_sizes = facts.returned_sizes
        made = CompiledGraph(context, facts, graphs, known, pair.backward)
        if not facts.is_backward:
            # Last: if anything above raises, Inductor runs this forward, and has to run its backward.
            torch_private.note_ours(box)
        return made

    def _why_not_ours(self, facts: CompiledFacts, box: object) -> str | None:
        if facts.device_index is None:
            return None  # there is nothing to be done, which is to be reported
        if not self.options.relocate:
            return SWITCHED_OFF
        if facts.is_captured_by_others:
            return CAPTURED_BY_OTHERS
        if self.devices.recorder(facts.device_index) is None:
            return CANNOT_RECORD
        is_of_ours = facts.is_backward and torch_private.is_ours(box)
        if facts.cudagraphs_asked and facts.uses_streams and not is_of_ours:
            return USES_STREAMS
        if not is_of_ours and (reason := self._why_no_collectives(facts)):
            return reason
        # PyTorch's trees run its forward then, and have to run it, too.
        is_theirs = facts.cudagraphs_asked and facts.is_backward and not is_of_ours
        return FORWARD_NOT_OURS if is_theirs else None

    def _why_no_collectives(self, facts: CompiledFacts) -> str | None:
        """Return why PyTorch is to run a graph with collectives: as KERNELS it would lose the CUDA graphs that PyTorch makes in some modes."""
        for collectives in filter(None, facts.collectives):
            if not self.options.collectives:
                return COLLECTIVES_OFF
            if facts.cudagraphs_asked and (reason := self.groups.why_not_captured(collectives)):
                return str(because(ReasonCode.COLLECTIVES, reason))
        return None

    # --- pairs ---

    def pair(self, box: object | None) -> Pair:
        """Return the pair of the graphs that Inductor compiles with this box; None: a graph by itself."""
        return Pair() if box is None else self._pairs.setdefault(box, Pair())

    def has_pair(self, box: object | None) -> bool:
        """Return whether a graph was compiled with this box before."""
        return box is not None and box in self._pairs

    def adopt_pairs(self, parent: Runtime) -> None:
        """Go on with the pairs of the process that this one was forked from."""
        self._pairs = parent._pairs

    def close(self) -> None:
        """Report and record the remaining graphs; called last in a process."""
        self.devices.end_collectives()
        self.decisions.close()
        if not self.options.readonly:
            self.cache.bundle.write()
        for reason in torch_private.graph_breaks():
            self.report.note("graph_breaks", reason)
