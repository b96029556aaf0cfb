"""One decision for each graph in a process group, as seen by one rank: the leader looks up and measures, other ranks wait.

The decision of a rank is a proposal; the value in the graph's register runs on every rank. A rank that cannot reach the registers
runs KERNELS, with a reason. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, TypeVar

from pygraphd.client.common.bounded_lru import BoundedLRU
from pygraphd.client.decisions import rules
from pygraphd.client.decisions.ranks.write_once import RegisterError, Registers, Verdict
from pygraphd.schema.messages import Decision
from pygraphd.schema.reasons import Reason, ReasonCode, because

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.common.report import Report

MAX_STORE_FAILURES = 2
"""Failures after which a rank does not ask the group's store again."""
WAIT_LIMIT_S = 120.0
"""Seconds that a rank waits for the leader's decision."""
MAX_AGREED_GRAPHS = 4096
"""Graphs whose decisions are kept: those used last. The registers have the decisions of all graphs."""
OTHER_ENVIRONMENT = "decided in another environment"

_T = TypeVar("_T")


class RankRole:
    """The role of a process for the graphs of one compiled graph. This class is the role without a process group: it decides alone."""

    leads: bool = True
    """Whether this process looks up and measures the graphs."""

    def decision_for(self, graph: str, own: Decision | None) -> Decision | None:
        """Return the decision for a graph; None: there is none yet. A leader proposes `own`, the decision of its cache, if it has one."""
        return own

    def propose(self, graph: str, decision: Decision) -> Decision:
        """Propose this process's decision; return the decision that runs."""
        return decision

    def wait(self, graph: str, waited_s: float) -> Decision | None:
        """Return the leader's decision, or None to go on waiting."""
        return None


ALONE = RankRole()


class Agreement:
    """One rank's view of the decisions of its group, and of those that it took alone after an error."""

    def __init__(self, registers: Registers, report: Report, wait_limit_s: float = WAIT_LIMIT_S) -> None:
        self.registers = registers
        self.wait_limit_s = wait_limit_s
        self._report = report
        self._failures = 0
        self._known = BoundedLRU[str, Decision](MAX_AGREED_GRAPHS)
        self._leads = BoundedLRU[str, bool](MAX_AGREED_GRAPHS)

    def role(self, leader_key: str, graphs: Sequence[str], environment: str) -> RankRole:
        """Return this rank's role for some graphs; one rank leads for all graphs with the same `leader_key`."""
        if leader_key not in self._leads:
            leads = self._attempt(graphs, lambda: self.registers.become_leader(leader_key))
            if leads is None:
                # Not remembered: `_attempt` has decided these graphs, and may reach the store for the next.
                return _GroupRole(self, environment, leads=False)
            self._leads[leader_key] = leads
        return _GroupRole(self, environment, leads=self._leads[leader_key])

    def adopt(self, graph: str, environment: str, action: Callable[[], Verdict | None]) -> Decision | None:
        """Return the decision for a graph that `action` finds in its register; None: there is none yet."""
        if graph not in self._known:
            verdict = self._attempt([graph], action)
            if verdict is not None:
                self._known[graph] = _marked(verdict, environment)
        return self._known.get(graph)

    def _attempt(self, graphs: Sequence[str], action: Callable[[], _T]) -> _T | None:
        """Run `action` on the registers; after a failure, this rank decides these graphs alone."""
        if self._failures < MAX_STORE_FAILURES:
            try:
                return action()
            except RegisterError as error:
                self._failures += 1
                self._report.count_failure(f"ranks: {error}")
        # What was agreed on before the failure stays.
        for graph in graphs:
            if graph not in self._known:
                self._known[graph] = _alone()
        return None


def _alone() -> Decision:
    return rules.not_measured(Reason(ReasonCode.RANKS_UNREACHABLE))


def _marked(verdict: Verdict, environment: str) -> Decision:
    """Return a verdict's decision; its reason says so if it was taken in another environment."""
    decision = verdict.decision
    if verdict.environment == environment:
        return decision
    # Ranks with different GPUs share decisions, which may cost speed here: the reason tells.
    detail = f"{decision.reason.detail}; {OTHER_ENVIRONMENT}" if decision.reason.detail else OTHER_ENVIRONMENT
    return dataclasses.replace(decision, reason=because(decision.reason.code, detail))


class _GroupRole(RankRole):
    """The role of a rank in a process group."""

    def __init__(self, agreement: Agreement, environment: str, *, leads: bool) -> None:
        self._agreement = agreement
        self._environment = environment
        self.leads = leads

    def decision_for(self, graph: str, own: Decision | None) -> Decision | None:
        if own is not None:
            return self.propose(graph, own)
        registers = self._agreement.registers
        return self._agreement.adopt(graph, self._environment, lambda: registers.read(graph))

    def propose(self, graph: str, decision: Decision) -> Decision:
        registers, verdict = self._agreement.registers, Verdict(self._environment, decision)
        adopted = self._agreement.adopt(graph, self._environment, lambda: registers.write(graph, verdict))
        return adopted or _alone()

    def wait(self, graph: str, waited_s: float) -> Decision | None:
        limit_s, decision = self._agreement.wait_limit_s, self.decision_for(graph, None)
        if decision is not None or waited_s < limit_s:
            return decision
        # Not taken alone: the leader may be writing at this moment, and the first write holds for all.
        return self.propose(graph, rules.not_measured(Reason(ReasonCode.RANKS_LATE, f"{limit_s:g} s")))
