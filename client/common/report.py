"""Counts events of a process, and writes the summary at exit if `PYGRAPH_SUMMARY=FILE` is set."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from pygraphd.client.common import log, summary_file
from pygraphd.schema.keys import Environment, sized_digest
from pygraphd.schema.messages import MAX_COUNT, Decision, Deployment, Graph, Measurement
from pygraphd.schema.policy import reason_text
from pygraphd.schema.summary import SUMMARY_VERSION, Deployed, Memory, Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pygraphd.schema.reasons import Reason

SUMMARY_VARIABLE = "PYGRAPH_SUMMARY"
MAX_DECISIONS = 10_000
"""Decisions that a summary lists at most; further ones are only counted, so that memory is bounded."""
OTHERS = "others"
MAX_REASONS = 200
"""Distinct reasons that are counted apart, as they name lines of the user's code; further ones are counted together."""
Noted = Literal["left_to_torch", "left_on_cpu", "graph_breaks", "between_graphs"]
"""Compiled graphs that PyTorch runs as without PyGraph; uses of CPU values that placement did not move; graph breaks of Dynamo; compiled
graphs that are split around a host operator, which runs between the parts at each call."""
_OWNER_VARIABLE = "_PYGRAPH_SUMMARY_OWNER"


class Report:
    """Counters of one process. Thread-safe; adding never fails, and takes no lock that a user's code could hold."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call a graph while this thread holds it
        self.counts: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self.lookup_ms = 0.0
        self.measuring_ms = 0.0
        self.checking_ms = 0.0
        self.recording_ms = 0.0
        self.daemon_version: str | None = None
        self.memory_limit = 0
        """`PYGRAPH_MEMORY` in bytes."""
        self._memory_requested = 0
        self._noted: dict[Noted, Counter[str]] = {kind: Counter() for kind in get_args(Noted)}
        self._deployed: Counter[Deployment] = Counter()
        self._nodes_in_graphs = 0
        self._reasons: Counter[str] = Counter()
        self._facts: dict[str, dict[str, Any]] = {}
        self._environments: dict[str, Environment] = {}
        self._decisions: list[tuple[Graph, Deployed]] = []

    def count(self, **counts: int) -> None:
        """Add to the named counters.

        Cache: `graphs`, `looked_up`, `hits`, `misses`, `recorded`, `spooled`, and `withheld` records, in a process that adds none; entries found `from_bundle`.
        Trials: `measured`, `waited` (another process measured), `adopted` (its decision was used), `validated` foreign decisions,
        `disputed` (validations that failed), `sizes` (setups of a graph at a dynamic size). Placement: `placed` uses of constants,
        `placed_inputs` (uses of inputs) and `sent` (uploads). Ranks: `led` and `followed` graphs. Recordings: `captured`,
        `checked_results` (result checks), `wrong_results` (result checks that failed), and `refused_for_memory`, which is in `memory`.
        """
        with self._lock:
            self.counts.update(counts)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Add the host time of a block to `recording_ms`: recording and verification, whether or not they succeed."""
        began = time.perf_counter()
        try:
            yield
        finally:
            elapsed_ms = (time.perf_counter() - began) * 1e3
            with self._lock:
                self.recording_ms += elapsed_ms

    def note_memory(self, size: int) -> None:
        """Note how many bytes of GPU memory a recording asks for at a time."""
        with self._lock:
            self._memory_requested = max(self._memory_requested, size)

    def note_nodes(self, more: int) -> None:
        """Add to the number of nodes in recordings. Those of a model that is gone stay: a program's models mostly go before its summary is written."""
        with self._lock:
            self._nodes_in_graphs += more

    def note_graph(self, digest: str, sizes: tuple[int, ...] = (), **facts: Any) -> None:
        """Note facts of a graph, or of a graph at dynamic sizes, for the summary. `seen_at` is the time of its first ones."""
        if sizes:
            digest, facts["whole"] = sized_digest(digest, sizes), digest
        with self._lock:
            if digest in self._facts or len(self._facts) < MAX_DECISIONS:
                self._facts.setdefault(digest, {"seen_at": time.time()}).update(facts)

    def count_failure(self, reason: str) -> None:
        """Count a failure of PyGraph, after which the user's program goes on; the first of a reason is logged."""
        # Logged without the lock: a handler is code of the program's.
        if self._add_reason(self.failures, reason, 1) == 1:
            log.warning("%s", reason)

    def count_fallback(self, reason: str) -> None:
        """Count a call that ran as KERNELS where a GRAPH ran or could have run, or a decision that failed its validation."""
        self._add_reason(self.fallbacks, reason, 1)

    def count_left_to_torch(self, reason: str) -> None:
        """Count a compiled graph that PyTorch runs as without PyGraph, and log the reason."""
        self.note("left_to_torch", reason)
        log.info("a graph is left to PyTorch: %s", reason)

    def note(self, kind: Noted, reason: str, times: int = 1) -> None:
        """Count a reason of a kind; of `between_graphs`, the name of a host operator."""
        self._add_reason(self._noted[kind], reason, times)

    def _add_reason(self, reasons: Counter[str], reason: str, times: int) -> int:
        """Add to the count of a reason, or of all others if there are too many; return the count."""
        with self._lock:
            key = reason if reason in reasons or len(reasons) < MAX_REASONS else OTHERS
            reasons[key] += times
            return reasons[key]

    def record_deployment(
        self,
        graph: Graph,
        environment: Environment,
        decision: Decision,
        source: Source,
        because: Reason | None = None,
        measured: Sequence[Measurement] = (),
    ) -> None:
        """Note that a graph is deployed, the source of its decision, and its measurements; `because`: see `Deployed`."""
        figures = [dataclasses.asdict(each) for each in measured]
        self.note_graph(graph.digest, decided_at=time.time(), figures=figures)
        key, deployment, text = environment.digest(), decision.deployment, _text(decision)
        how = decision.deployment, decision.reason, decision.final, source
        deployed = Deployed(graph.digest, graph.kind, key, *how, graph.sizes, decision.against, because)
        with self._lock:
            self._deployed[deployment] += 1
            self._add_reason(self._reasons, text, 1)
            if len(self._decisions) < MAX_DECISIONS:
                self._environments[key] = environment
                self._decisions.append((graph, deployed))
        said = deployment.value, text, decision.reason.code.value, source.value
        log.info("%s: deployed as %s: %s (%s, %s)", graph.name, *said)

    def retract_deployment(self, graph: Graph, environment: Environment) -> None:
        """Undo `record_deployment` for a graph at a size that is dropped; `graph` is the very object that was recorded."""
        key = environment.digest()
        with self._lock:
            for index, (recorded, each) in enumerate(self._decisions):
                # By identity: another model of the same code has an equal graph, whose deployment stays.
                if recorded is graph and each.environment == key:
                    del self._decisions[index]
                    self._deployed[each.deployment] -= 1
                    self._add_reason(self._reasons, _text(each), -1)
                    return

    def summary(self) -> dict[str, Any]:
        """Return the JSON object that a summary file holds."""
        with self._lock:
            names = (
                "graphs", "looked_up", "hits", "misses", "measured", "recorded", "spooled", "withheld", "from_bundle", "waited", "adopted", "validated",
                "disputed", "sizes", "placed", "placed_inputs", "sent", "led", "followed", "captured", "checked_results",
                "wrong_results",
            )  # fmt: skip
            limit, requested = min(self.memory_limit, MAX_COUNT), min(self._memory_requested, MAX_COUNT)
            return {
                "schema": SUMMARY_VERSION,
                **{name: self.counts[name] for name in names},
                "deployed": {deployment.value: self._deployed[deployment] for deployment in Deployment},
                "nodes_in_graphs": self._nodes_in_graphs,
                "memory": dataclasses.asdict(Memory(limit, requested, self.counts["refused_for_memory"])),
                # `+` drops the counts that `retract_deployment` has brought down to 0.
                "reasons": dict(+self._reasons),
                "fallbacks": dict(self.fallbacks),
                "failures": dict(self.failures),
                **{kind: dict(counts) for kind, counts in self._noted.items()},
                "lookup_ms": round(self.lookup_ms, 3),
                "measuring_ms": round(self.measuring_ms, 3),
                "checking_ms": round(self.checking_ms, 3),
                "recording_ms": round(self.recording_ms, 3),
                "daemon": {"version": self.daemon_version},
                "program": {"pid": os.getpid(), "name": "".join(getattr(sys, "argv", ())[:1])},
                # Copies, since other threads add facts while this is written as JSON.
                "facts": {digest: dict(facts) for digest, facts in self._facts.items()},
                "environments": {key: each.factors() for key, each in self._environments.items()},
                "decisions": [dataclasses.asdict(each) for _, each in self._decisions],
                "decisions_left_out": self._deployed.total() - len(self._decisions),
            }


def _text(decided: Decision | Deployed) -> str:
    return reason_text(decided.reason, final=decided.final)


def claim_summary() -> None:
    """Reserve the name of the summary file for this process; processes that it starts add a suffix to the name."""
    target = os.environ.get(SUMMARY_VARIABLE)
    if target and _OWNER_VARIABLE not in os.environ:
        # In the environment, so that child processes know whose name it is.
        os.environ[_OWNER_VARIABLE] = str(os.getpid())
        with contextlib.suppress(OSError):  # there may be no folder any more
            os.environ[SUMMARY_VARIABLE] = str(Path(target).absolute())  # the program may change its folder


def write_summary(report: Report) -> None:
    """Write the summary if it is asked for; raises OSError if it cannot be written.

    A child process adds `.RANK` (or its process id) to the name, so that workers do not overwrite the program's own summary. It writes
    nothing if it compiled nothing.
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
