"""The figures of `pygraphd report`: the share of a step in CUDA graphs, the time saved in a step, and the host time spent once.

A summary does not know the program's steps. A step is taken to be one call of each compiled graph; of a graph that is decided by size, the
mean over its sizes. The time of a call is the longer of its host time and its span on the GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.cli.explain import explain_summary, open_catalogues
from pygraphd.cli.summaries import SPENT_TIMES, Facts, Summary
from pygraphd.daemon import spool
from pygraphd.errors import CommandError
from pygraphd.schema.messages import MAX_COUNT, Deployment
from pygraphd.schema.policy import reason_text
from pygraphd.schema.reasons import ReasonCode
from pygraphd.schema.summary import Deployed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pygraphd.cli.explain import Explanation
    from pygraphd.schema.locations import Locations

_NONE = Facts()
# Dynamo's name of the module itself, where the whole of it was compiled.
_WHOLE = "L['self']"
# Dynamo begins the path of a module with the variable that holds it: L for locals, G for globals.
_VARIABLE = re.compile(r"^[LG]\['(\w+)'\]")
_OF_TORCH = re.compile(r"/(?:site|dist)-packages/|/torch/")


@dataclass(frozen=True, slots=True)
class Row:
    """One compiled graph, or one of its sizes, as it ran; `times` equal ones. An unknown value is None or empty.

    `call_us` has the time of a call in each deployment measured, and `calls` the calls in a step.
    """

    ran: Deployed
    times: int
    facts: Facts
    call_us: dict[Deployment, float]
    calls: float

    @property
    def module(self) -> str:
        """The path of the module, as the user writes it."""
        path = self.facts.module.replace("/", ".")
        if path == _WHOLE:
            return "the whole module"
        return _VARIABLE.sub(lambda match: "" if match[1] == "self" else match[1], path).lstrip(".")

    @property
    def places(self) -> tuple[str, ...]:
        """The source lines: the user's own, or else those of libraries."""
        own = tuple(place for place in self.facts.places if not _OF_TORCH.search(place))
        return own or self.facts.places

    @property
    def is_graph(self) -> bool:
        """Whether it runs as GRAPH."""
        return self.ran.deployment is Deployment.GRAPH

    @property
    def is_recorded(self) -> bool:
        """Whether its kernels are in a GRAPH: it may be one that is not recorded yet."""
        return self.is_graph and self.facts.nodes is not None

    @property
    def kernels(self) -> int | None:
        """The number of its kernels: those of its recording, or else those that its generated code calls."""
        return self.facts.launches if self.facts.nodes is None else self.facts.nodes

    @property
    def reason(self) -> str:
        """Why it runs so, as text."""
        return reason_text(self.ran.reason, final=self.ran.final)

    @property
    def step_ms(self) -> float | None:
        """The time that it takes in a step."""
        return self._ms(self.ran.deployment)

    @property
    def kernels_ms(self) -> float | None:
        """The time that it would take in a step as KERNELS."""
        return self._ms(Deployment.KERNELS)

    @property
    def saved_ms(self) -> float | None:
        """The time that it saves in a step; None if it was not measured both ways."""
        if self.step_ms is None or self.kernels_ms is None:
            return None
        return self.kernels_ms - self.step_ms

    @property
    def decided_s(self) -> float | None:
        """The seconds from its compilation, or from the first call of its size, to the decision."""
        if self.facts.seen_at is None or self.facts.decided_at is None:
            return None
        # The clock may have been set back between the two.
        return max(0.0, self.facts.decided_at - self.facts.seen_at)

    def _ms(self, deployment: Deployment) -> float | None:
        us = self.call_us.get(deployment)
        return None if us is None else us * self.calls / 1e3


@dataclass(frozen=True, slots=True)
class Coverage:
    """The kernels in a step. Of a graph that is not recorded, those count that its generated code calls; a call of a library is one."""

    kernels_in_graphs: int
    graphs: int
    """The graphs that have these."""
    graphs_not_recorded: int
    """The graphs that will be recorded."""
    kernels_outside: int
    graphs_not_counted: int
    """The graphs whose kernels are not known."""


def _in_step(counts: Iterable[float]) -> int:
    return round(math.fsum(counts))


# Without slots: `cached_property` needs a dictionary in the instance.
@dataclass(frozen=True)
class Report:
    """The rows of a program, the longest in a step first, and its summary.

    `problem`: why the cache could not be asked; empty if it was. `target`: the word that names the summary to commands; empty: the newest one.
    `written_at`: when the summary was written, which is the end of the program, in seconds since the epoch; None: not known.
    """

    rows: tuple[Row, ...]
    summary: Summary
    problem: str = ""
    target: str = ""
    written_at: float | None = None

    @property
    def compared(self) -> list[Row]:
        """The rows that were measured both ways, or are known to run as KERNELS for a known time."""
        return [row for row in self.rows if row.saved_ms is not None]

    @property
    def without_ms(self) -> float:
        """A step's time in compiled graphs as KERNELS alone, as far as it is known."""
        return math.fsum(row.kernels_ms or 0.0 for row in self.compared)

    @property
    def with_ms(self) -> float:
        """A step's time in the same graphs as they ran."""
        return math.fsum(row.step_ms or 0.0 for row in self.compared)

    @property
    def gain_ms(self) -> float:
        """The time saved in a step."""
        return self.without_ms - self.with_ms

    @property
    def cost_ms(self) -> float:
        """The host time that PyGraph took, once in the process."""
        return math.fsum(self.summary.spent_ms.values())

    @property
    def paid_back_after(self) -> int | None:
        """The number of steps after which the gain exceeds the cost; None: never, as far as is known."""
        # For the least of gains the quotient may be infinite, for which `ceil` raises.
        if self.gain_ms <= 0 or self.cost_ms > MAX_COUNT * self.gain_ms:
            return None
        # Rounded, as the last digit of a quotient could add a step.
        return math.ceil(round(self.cost_ms / self.gain_ms, 6))

    def share(self, row: Row) -> float | None:
        """Return a row's share of a step's time in compiled graphs, as far as that is known."""
        return None if row.step_ms is None or not self._known_ms else row.step_ms / self._known_ms

    # Each row asks for it: a sum for each of ten thousand graphs would take time that grows with their
    # square.
    @functools.cached_property
    def _known_ms(self) -> float:
        return math.fsum(each.step_ms or 0.0 for each in self.rows)

    @property
    def coverage(self) -> Coverage:
        """The kernels in a step, in GRAPHs and outside."""
        inside = [row for row in self.rows if row.is_recorded]
        outside = [row for row in self.rows if not row.is_recorded]
        return Coverage(
            _in_step((row.kernels or 0) * row.calls for row in inside),
            _in_step(row.calls for row in inside),
            _in_step(row.calls for row in outside if row.is_graph),
            _in_step((row.kernels or 0) * row.calls for row in outside)
            + _in_step(row.facts.launches_between * row.calls for row in self.rows),
            _in_step(row.calls for row in outside if row.kernels is None),
        )

    def as_json(self) -> dict[str, Any]:
        """Return the JSON of `report --json`."""
        return {
            "schema": 1,
            "program": self.summary.program,
            "pid": self.summary.pid,
            "coverage": dataclasses.asdict(self.coverage),
            "gain": {
                "without_ms": self.without_ms,
                "with_ms": self.with_ms,
                "gain_ms": self.gain_ms,
                "compared": len(self.compared),
            },
            "cost": {**self.summary.spent_ms, "paid_back_after_steps": self.paid_back_after},
            "memory": dataclasses.asdict(self.summary.memory),
            "graphs": [self._row_json(row) for row in self.rows],
            "left_out": self.summary.left_out,
            "notes": self.summary.notes,
            "problem": self.problem,
        }

    def _row_json(self, row: Row) -> dict[str, Any]:
        facts, ran = row.facts, row.ran
        return {
            "graph": ran.graph,
            "kind": ran.kind,
            "sizes": list(ran.sizes),
            "times": row.times,
            "partition": facts.partition,
            "partitions": facts.partitions,
            "module": row.module,
            "places": list(row.places),
            "operators": facts.operators,
            "kernels": row.kernels,
            "memory_bytes": facts.memory_bytes,
            "deployment": ran.deployment,
            "final": ran.final,
            "source": ran.source,
            "reason": dataclasses.asdict(ran.reason),
            "against": dataclasses.asdict(ran.against),
            "text": row.reason,
            "call_us": row.call_us,
            "share": self.share(row),
            "saved_ms": row.saved_ms,
            "decided_s": row.decided_s,
        }


def report(summary: Summary, locations: Locations, target: str = "") -> Report:
    """Return the report of a summary, which `target` names. Costs that it does not have are those of cache and spool, if these can be read."""
    try:
        with open_catalogues(locations, spool.state(locations.spool).waiting) as catalogues:
            return Report(_rows(summary, explain_summary(summary, *catalogues)), summary, target=target)
    # The summary is what is reported: without the cache, at most some costs are missing.
    except (OSError, CommandError) as error:
        problem = f"the cache cannot be read: {error}"
        return Report(_rows(summary, explain_summary(summary)), summary, problem, target)


def _rows(summary: Summary, explanations: Iterable[Explanation]) -> tuple[Row, ...]:
    ran = [(each, each.ran) for each in explanations]
    known, largest = summary.facts, _largest(summary.facts)
    explained = [(each, ran, _facts(known, largest, ran.graph)) for each, ran in ran if ran is not None]
    sizes = Counter(facts.whole for _, ran, facts in explained if ran.sizes and facts.whole)
    rows = []
    for each, ran_as, facts in explained:
        if ran_as.reason.code is ReasonCode.DECIDED_BY_SIZE and sizes[ran_as.graph]:
            continue  # its calls are those of its sizes
        calls = each.times / sizes[facts.whole] if ran_as.sizes and facts.whole else float(each.times)
        rows.append(Row(ran_as, each.times, facts, _call_us(facts, each.figures), calls))
    # A stable order: graphs of equal time stay as the program compiled them.
    return tuple(sorted(rows, key=lambda row: -(row.step_ms or 0.0)))


def _facts(known: dict[str, Facts], largest: dict[str, Facts], digest: str) -> Facts:
    """Return the facts of a graph; of one at dynamic sizes also those of the whole, and of one without those of its largest recording."""
    facts = known.get(digest, _NONE)
    if facts.whole:
        whole = known.get(facts.whole, _NONE)
        inherited = (
            "partition",
            "partitions",
            "operators",
            "module",
            "places",
            "launches",
            "launches_between",
        )
        return dataclasses.replace(facts, **{name: getattr(whole, name) for name in inherited})
    if facts.nodes is None and (at_a_size := largest.get(digest)) is not None:
        return dataclasses.replace(facts, nodes=at_a_size.nodes, memory_bytes=at_a_size.memory_bytes)
    return facts


def _largest(known: dict[str, Facts]) -> dict[str, Facts]:
    """Return the facts of the largest recording of each graph with recordings at sizes, by the digest of the whole."""
    largest: dict[str, Facts] = {}
    for facts in known.values():
        if facts.whole and (facts.nodes or 0) > (largest.get(facts.whole, _NONE).nodes or 0):
            largest[facts.whole] = facts
    return largest


def _call_us(facts: Facts, figures: Sequence[dict[str, Any]]) -> dict[Deployment, float]:
    # What the process has measured itself comes first: the cache may have measurements of another one by now.
    if facts.figures:
        return {each.deployment: max(each.host_us, each.span_us) for each in facts.figures}
    return {Deployment(row["deployment"]): max(row["host_us"], row["span_us"]) for row in figures}


def spent(summary: Summary) -> list[tuple[str, float]]:
    """Return the parts of the cost that are not zero, by name, in milliseconds."""
    names = dict(zip(SPENT_TIMES, ("looking up", "measuring", "validating", "recording"), strict=True))
    # Less would be shown as 0.0 ms.
    return [(names[name], ms) for name, ms in summary.spent_ms.items() if ms >= 0.05]
