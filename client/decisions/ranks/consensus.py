"""One decision for each graph and process group, as one rank sees it: it finds out for all, or waits for who does.

What a rank concludes is a proposal; what the graph's register holds is what runs, on every rank. A rank that cannot reach the
registers launches, and says so. Knows nothing of torch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

from pygraphd.client.decisions import rules
from pygraphd.client.decisions.ranks.write_once import RegisterError, Registers, Verdict
from pygraphd.schema.reasons import Reason, ReasonCode, because

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pygraphd.client.common.report import Report
    from pygraphd.schema.messages import Decision, Deployment

MAX_FAILURES = 2
"""Failures after which a rank asks a group's store no more."""
WAIT_LIMIT_S = 120.0
"""How long a rank waits for another's decision."""
ELSEWHERE = "decided in another environment"

_T = TypeVar("_T")


class Part:
    """What a process has to do about the graphs of one plan: here, without a group, to find out for itself."""

    leads: bool = True
    """Whether this process looks up and measures."""

    def settled(self, graph: str, own: Decision | None) -> Decision | None:
        """Return what is decided for a graph, if anything is; `own` is what this process knows already."""
        return own

    def propose(self, graph: str, decision: Decision) -> Decision:
        """Return what runs now that this process has come to a decision."""
        return decision

    def wait(self, graph: str, waited_s: float) -> Decision | None:
        """Return what another process has decided, or None to go on waiting."""
        return None


ALONE = Part()


class Agreement:
    """What one rank knows of its group's decisions; those that it had to take alone included."""

    def __init__(self, registers: Registers, report: Report, wait_limit_s: float = WAIT_LIMIT_S) -> None:
        self._registers = registers
        self._report = report
        self._wait_limit_s = wait_limit_s
        self._failures = 0
        self._known: dict[str, Decision] = {}
        self._claims: dict[str, bool] = {}

    def part(self, claim: str, graphs: Sequence[str], environment: str) -> Part:
        """Return this rank's part in some graphs; one rank leads for all graphs with the same claim."""
        if claim not in self._claims:
            leads = self._attempt(graphs, lambda: self._registers.claim(claim))
            if leads is None:
                return _GroupPart(self, environment, leads=False)
            self._claims[claim] = leads
        return _GroupPart(self, environment, leads=self._claims[claim])

    def look(self, graph: str, environment: str) -> Decision | None:
        """Return the decision for a graph, if there is one."""
        return self._adopt(graph, environment, lambda: self._registers.read(graph))

    def propose(self, graph: str, environment: str, decision: Decision) -> Decision:
        """Decide for the group unless somebody has; return what is decided."""
        verdict = Verdict(environment, decision)
        adopted = self._adopt(graph, environment, lambda: self._registers.write(graph, verdict))
        return adopted or _alone()

    def wait(self, graph: str, environment: str, waited_s: float) -> Decision | None:
        """Look at a graph that another rank measures; after the time limit, propose that all launch it."""
        decision = self.look(graph, environment)
        if decision is not None or waited_s < self._wait_limit_s:
            return decision
        late = rules.not_measured(Reason(ReasonCode.RANKS_LATE, f"{self._wait_limit_s:g} s"))
        return self.propose(graph, environment, late)

    def _adopt(self, graph: str, environment: str, action: Callable[[], Verdict | None]) -> Decision | None:
        if graph not in self._known:
            verdict = self._attempt([graph], action)
            if verdict is not None:
                self._known[graph] = _marked(verdict, environment)
        return self._known.get(graph)

    def _attempt(self, graphs: Sequence[str], action: Callable[[], _T]) -> _T | None:
        """Do something with the registers; if it fails, this rank is alone with these graphs from now on."""
        if self._failures < MAX_FAILURES:
            try:
                return action()
            except RegisterError as error:
                self._failures += 1
                self._report.count_failure(f"ranks: {error}")
        for graph in graphs:
            self._known.setdefault(graph, _alone())
        return None


def _alone() -> Decision:
    return rules.not_measured(Reason(ReasonCode.RANKS_UNREACHABLE))


def _marked(verdict: Verdict, environment: str) -> Decision:
    """Return a verdict's decision, with a word in its reason if it was taken on another kind of machine."""
    decision = verdict.decision
    if verdict.environment == environment:
        return decision
    detail = f"{decision.reason.detail}; {ELSEWHERE}" if decision.reason.detail else ELSEWHERE
    return dataclasses.replace(decision, reason=because(decision.reason.code, detail))


class _GroupPart(Part):
    """The part of a rank in a group."""

    def __init__(self, agreement: Agreement, environment: str, *, leads: bool) -> None:
        self._agreement = agreement
        self._environment = environment
        self.leads = leads

    def settled(self, graph: str, own: Decision | None) -> Decision | None:
        return self._agreement.look(graph, self._environment) if own is None else self.propose(graph, own)

    def propose(self, graph: str, decision: Decision) -> Decision:
        return self._agreement.propose(graph, self._environment, decision)

    def wait(self, graph: str, waited_s: float) -> Decision | None:
        return self._agreement.wait(graph, self._environment, waited_s)


def possible(decision: Decision, offered: Collection[Deployment]) -> Decision:
    """Return the group's decision, or KERNELS with a reason where it names what this process cannot run."""
    if decision.deployment in offered:
        return decision
    return rules.not_measured(Reason(ReasonCode.RANKS_NOT_OFFERED, decision.deployment))
