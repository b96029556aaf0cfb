"""One decision for each graph in a process group, as seen by one rank: the leader looks up and measures, other ranks wait.

The decision of a rank is a proposal; the value in the graph's register runs on every rank. A rank that cannot reach the registers runs
KERNELS and asks again later. After a time limit it keeps KERNELS, with a reason. Needs no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import TYPE_CHECKING

from pygraphd.client.common.bounded_lru import BoundedLRU
from pygraphd.client.decisions import rules
from pygraphd.client.decisions.ranks.reachability import Reachability
from pygraphd.client.decisions.ranks.write_once import RegisterError, Registers, Verdict
from pygraphd.schema.messages import Decision
from pygraphd.schema.reasons import Reason, ReasonCode, because

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.common.report import Report

WAIT_LIMIT_S = 120.0
"""Seconds that a rank waits for the leader's decision, or with a proposal for a store that does not answer."""
UNLED_S = 10.0
"""Seconds after which a rank leads itself for a graph that no rank leads, as a backward that only this rank has."""
MAX_AGREED_GRAPHS = 4096
"""Graphs whose decisions are kept: those used last. The registers have the decisions of all graphs."""
OTHER_ENVIRONMENT = "decided in another environment"


class RankRole:
    """The role of a process for the graphs of one compiled graph. This class is the role without a process group: it decides alone."""

    leads: bool = True
    """Whether this process looks up and measures the graphs."""

    def decision_for(self, graph: str, own: Decision | None) -> Decision | None:
        """Return the decision for a graph; None: there is none yet. A leader proposes `own`, the decision of its cache, if it has one."""
        return own

    def propose(self, graph: str, decision: Decision) -> Decision | None:
        """Propose this process's decision; return the decision that runs. None: the store does not answer, to be tried again later."""
        return decision

    def wait(self, graph: str, waited_s: float) -> Decision | None:
        """Return the leader's decision, or None to go on waiting."""
        return None

    def takes_over(self, graph: str, waited_s: float) -> bool:
        """Return whether this process measures a graph, for which it waits, from now on: no rank does."""
        return False


ALONE = RankRole()


class Agreement:
    """One rank's view of the decisions of its group, and of those that it took alone after errors."""

    def __init__(
        self,
        registers: Registers,
        report: Report,
        wait_limit_s: float = WAIT_LIMIT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.registers = registers
        self.wait_limit_s = wait_limit_s
        self.reachability = Reachability(report, clock)
        self._known = BoundedLRU[str, Decision](MAX_AGREED_GRAPHS)
        self._leads = BoundedLRU[str, bool](MAX_AGREED_GRAPHS)

    def role(self, leader_key: str, graphs: Sequence[str], environment: str) -> RankRole:
        """Return this rank's role for some graphs; one rank leads for all graphs with the same `leader_key` that it compiles."""
        registers, ask = self.registers, self.reachability.ask
        if leader_key not in self._leads:
            try:
                self._leads[leader_key] = ask(lambda: registers.become_leader(leader_key))
            except RegisterError:
                # Not remembered: the store may answer for the backward. To follow is right, whoever leads.
                return _GroupRole(self, environment, leads=False)
        leads = self._leads[leader_key]
        if leads:
            # Or another rank would measure them, too, which costs time and nothing else.
            with contextlib.suppress(RegisterError):
                ask(lambda: [registers.lead(graph) for graph in graphs])
        return _GroupRole(self, environment, leads=leads)

    def adopt(self, graph: str, environment: str, operation: Callable[[], Verdict | None]) -> Decision | None:
        """Return the decision for a graph that `operation` finds in its register; None: there is none yet. Raises RegisterError."""
        if graph not in self._known:
            verdict = self.reachability.ask(operation)
            if verdict is not None:
                self._known[graph] = _marked(verdict, environment)
        return self._known.get(graph)

    def decide_alone(self, graph: str) -> Decision | None:
        """Return KERNELS for a graph, for good, if the store has not answered for the limit; None before that."""
        if self.reachability.failing_s < self.wait_limit_s:
            return None
        self._known[graph] = decision = rules.not_measured(Reason(ReasonCode.RANKS_UNREACHABLE))
        return decision


def _marked(verdict: Verdict, environment: str) -> Decision:
    """Return a verdict's decision; its reason says so if it was taken in another environment."""
    decision = verdict.decision
    if verdict.environment == environment:
        return decision
    # Ranks with different GPUs share decisions, which may cost speed here: the reason tells.
    detail = f"{decision.reason.detail}; {OTHER_ENVIRONMENT}" if decision.reason.detail else OTHER_ENVIRONMENT
    return dataclasses.replace(decision, reason=because(decision.reason.code, detail))


class _GroupRole(RankRole):
    def __init__(self, agreement: Agreement, environment: str, *, leads: bool) -> None:
        self._agreement = agreement
        self._environment = environment
        self._led_by_others = set[str]()
        self.leads = leads

    def decision_for(self, graph: str, own: Decision | None) -> Decision | None:
        if own is not None:
            return self.propose(graph, own)
        registers = self._agreement.registers
        try:
            return self._agreement.adopt(graph, self._environment, lambda: registers.read(graph))
        except RegisterError:
            return None

    def propose(self, graph: str, decision: Decision) -> Decision | None:
        registers, verdict = self._agreement.registers, Verdict(self._environment, decision)
        try:
            return self._agreement.adopt(graph, self._environment, lambda: registers.write(graph, verdict))
        except RegisterError:
            return self._agreement.decide_alone(graph)

    def wait(self, graph: str, waited_s: float) -> Decision | None:
        limit_s, decision = self._agreement.wait_limit_s, self.decision_for(graph, None)
        if decision is not None or waited_s < limit_s:
            return decision
        # Not taken alone: the leader may be writing at this moment, and the first write holds for all.
        return self.propose(graph, rules.not_measured(Reason(ReasonCode.RANKS_LATE, f"{limit_s:g} s")))

    def takes_over(self, graph: str, waited_s: float) -> bool:
        agreement = self._agreement
        if waited_s < UNLED_S or graph in self._led_by_others:
            return False
        try:
            leads = agreement.reachability.ask(lambda: agreement.registers.lead(graph))
        except RegisterError:
            return False
        if not leads:
            self._led_by_others.add(graph)  # the register keeps its value
        return leads
