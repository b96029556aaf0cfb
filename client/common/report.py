"""What ran how, and why: the counters of one process, and the summary that `PYGRAPH_SUMMARY=FILE` asks for at exit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraphd.client.common import log, summary_file
from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import reason_text
from pygraphd.schema.summary import SUMMARY_VERSION, Deployed, Source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.schema.keys import Environment
    from pygraphd.schema.messages import Decision, Graph
    from pygraphd.schema.reasons import Reason

SUMMARY_VARIABLE = "PYGRAPH_SUMMARY"
MAX_DECISIONS = 10_000
"""Decisions that a summary lists. A job that goes on compiling only counts the rest, so that its memory is bounded."""
MAX_REASONS = 200
"""Reasons that name lines of the user's; further ones are counted together."""
_OWNER_VARIABLE = "_PYGRAPH_SUMMARY_OWNER"


class Report:
    """Counters of one process. Adding never fails and takes no lock that a user's code could hold."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.lookup_ms = 0.0
        self.measuring_ms = 0.0
        self.checking_ms = 0.0
        self.recording_ms = 0.0
        self.daemon_version: str | None = None
        self.bounds: dict[str, int] = {}
        """What bounds what is kept of a graph, by name: `sizes` and `size_calls` (options), `remembered_sizes` (of those not decided yet),
        `setups_per_size` (times `sizes`: how often sizes are set up in all), `idle_ticks` (changes of size, or calls of one and the same that
        is not decided, after which a size that was not used makes room), `integers` (what has more in a call is decided as a whole),
        and once a graph may be relocated `recordings` of it, and `executables` of each."""
        self._left_on_cpu: Counter[str] = Counter()
        self._graph_breaks: Counter[str] = Counter()
        self._left_to_torch: Counter[str] = Counter()
        self._deployed: Counter[Deployment] = Counter()
        self._nodes_in_graphs = 0
        self._reasons: Counter[str] = Counter()
        self._environments: dict[str, Environment] = {}
        self._decisions: list[Deployed] = []

    def count(self, **counts: int) -> None:
        """Add to the named counters.

        They are `graphs`, `looked_up`, `hits`, `misses`, `measured`, `recorded`, `spooled`, `withheld` (records that were not to
        be added), `waited` (regions that another process was measuring), `adopted` (of these, those that took up its answer),
        `checked` (decisions from elsewhere that were timed) and `disputed` (of these, those that did not hold);
        `sizes` (how often a graph was set up to be decided at one of its dynamic sizes);
        `placed` (uses of known CPU values that take them from the GPU now), `placed_inputs`
        (uses of inputs that do) and `sent` (how often such inputs went there);
        under a process group `led` and `followed` (graphs that this rank finds out about, and that it leaves to another); and of
        relocatable graphs
        `captured` (recordings made), `staged` (inputs that these copy), `checked_results` (calls that were launched as well, to be held
        against the graph) and `wrong_results` (of these, those that differed).
        """
        with self._lock:
            self.counts.update(counts)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Count the host's time within as that of recording a relocatable graph and verifying it, whatever comes of it."""
        began = time.perf_counter()
        try:
            yield
        finally:
            elapsed_ms = (time.perf_counter() - began) * 1e3
            with self._lock:
                self.recording_ms += elapsed_ms

    def note_nodes(self, more: int) -> None:
        """Note that so many more kernels and copies are in recordings that serve."""
        with self._lock:
            self._nodes_in_graphs += more

    def count_failure(self, reason: str) -> None:
        """Note that something of ours did not work; the user's program goes on."""
        with self._lock:
            self.failures[reason] += 1
            is_first = self.failures[reason] == 1
        if is_first:
            log.warning("%s", reason)

    def count_fallback(self, reason: str) -> None:
        """Note that one call was launched plainly although its graph was being measured."""
        with self._lock:
            self.fallbacks[reason] += 1

    def count_left_to_torch(self, reason: str) -> None:
        """Note that Inductor runs a compiled graph as it does without us, and why."""
        with self._lock:
            self._left_to_torch[reason] += 1
        log.info("a graph is left to PyTorch: %s", reason)

    def count_left_on_cpu(self, reason: str, times: int = 1) -> None:
        """Note that compiled graphs go on taking values from the CPU."""
        self._add_reason(self._left_on_cpu, reason, times)

    def count_graph_break(self, reason: str) -> None:
        """Note that Dynamo has ended a graph, and why."""
        self._add_reason(self._graph_breaks, reason, 1)

    def _add_reason(self, reasons: Counter[str], reason: str, times: int) -> None:
        with self._lock:
            known = reason in reasons or len(reasons) < MAX_REASONS
            reasons[reason if known else "others"] += times

    def record_deployment(
        self,
        graph: Graph,
        environment: Environment,
        decision: Decision,
        source: Source,
        because: Reason | None = None,
    ) -> None:
        """Note how one more region runs from now on, and where that is known from; `because`: see `Deployed`."""
        key, deployment, text = environment.digest(), decision.deployment, _text(decision)
        deployed = Deployed(
            graph.digest,
            graph.kind,
            key,
            deployment,
            decision.reason,
            decision.final,
            source,
            graph.sizes,
            decision.against,
            because,
        )
        with self._lock:
            self._deployed[deployment] += 1
            self._reasons[text] += 1
            if len(self._decisions) < MAX_DECISIONS:
                self._environments[key] = environment
                self._decisions.append(deployed)
        log.info("%s: deployed as %s: %s (%s)", graph.name, deployment.value, text, source.value)

    @property
    def deployments(self) -> int:
        """How many regions run as decided."""
        return self._deployed.total()

    def retract_deployment(self, graph: Graph, environment: Environment) -> None:
        """Forget how a region runs at a size that makes room."""
        key = environment.digest()
        with self._lock:
            for index, each in enumerate(self._decisions):
                if (each.graph, each.kind, each.environment) == (graph.digest, graph.kind, key):
                    del self._decisions[index]
                    self._deployed[each.deployment] -= 1
                    self._reasons[_text(each)] -= 1
                    return

    def summary(self) -> dict[str, Any]:
        """Return the JSON object that a summary file holds."""
        with self._lock:
            names = (
                "graphs",
                "looked_up",
                "hits",
                "misses",
                "measured",
                "recorded",
                "spooled",
                "withheld",
                "waited",
                "adopted",
                "checked",
                "disputed",
                "sizes",
                "placed",
                "placed_inputs",
                "sent",
                "led",
                "followed",
                "captured",
                "staged",
                "checked_results",
                "wrong_results",
            )
            return {
                "schema": SUMMARY_VERSION,
                **{name: self.counts[name] for name in names},
                "deployed": {deployment.value: self._deployed[deployment] for deployment in Deployment},
                "nodes_in_graphs": self._nodes_in_graphs,
                "reasons": dict(+self._reasons),
                "fallbacks": dict(self.fallbacks),
                "failures": dict(self.failures),
                "left_to_torch": dict(self._left_to_torch),
                "left_on_cpu": dict(self._left_on_cpu),
                "graph_breaks": dict(self._graph_breaks),
                "lookup_ms": round(self.lookup_ms, 3),
                "measuring_ms": round(self.measuring_ms, 3),
                "checking_ms": round(self.checking_ms, 3),
                "recording_ms": round(self.recording_ms, 3),
                "bounds": dict(self.bounds),
                "daemon": {"version": self.daemon_version},
                "environments": {key: each.factors() for key, each in self._environments.items()},
                "decisions": [dataclasses.asdict(each) for each in self._decisions],
                "decisions_left_out": self._deployed.total() - len(self._decisions),
            }


def _text(decided: Decision | Deployed) -> str:
    return reason_text(decided.reason, final=decided.final)


def claim_summary() -> None:
    """Make this process the one that writes the summary file itself; processes that it starts write beside it."""
    target = os.environ.get(SUMMARY_VARIABLE)
    if target and _OWNER_VARIABLE not in os.environ:
        os.environ[_OWNER_VARIABLE] = str(os.getpid())
        with contextlib.suppress(OSError):  # there may be no folder any more
            os.environ[SUMMARY_VARIABLE] = str(Path(target).absolute())  # the program may change its folder


def write_summary(report: Report) -> None:
    """Write the summary if it is asked for; raises OSError if it cannot be written.

    A process started by the one that claimed the file adds `.RANK` (or its process id) to the name, and writes nothing if
    it compiled nothing, so that workers do not overwrite the program's own summary.
    """
    target = os.environ.get(SUMMARY_VARIABLE)
    if not target:
        return
    suffix = ""
    if os.environ.get(_OWNER_VARIABLE) != str(os.getpid()):
        if not report.counts["graphs"]:
            return
        suffix = f".{os.environ.get('RANK') or os.getpid()}"
    text = json.dumps(report.summary(), indent=2) + "\n"
    summary_file.write(Path(target), text.encode(), suffix)
