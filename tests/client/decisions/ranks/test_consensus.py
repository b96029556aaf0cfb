"""One value for all ranks, in whatever order they come, however late they are and whatever fails."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.common.report import Report
from pygraphd.client.decisions import rules
from pygraphd.client.decisions.ranks import consensus
from pygraphd.client.decisions.ranks.consensus import (
    ALONE,
    MAX_STORE_FAILURES,
    OTHER_ENVIRONMENT,
    WAIT_LIMIT_S,
    Agreement,
)
from pygraphd.client.decisions.ranks.following import LONGEST_S, PATIENT_CALLS, Follower
from pygraphd.client.decisions.ranks.write_once import Registers
from pygraphd.schema.messages import Decision, Deployment
from pygraphd.schema.reasons import MAX_DETAIL, Reason, ReasonCode
from tests.support.memory_store import MemoryStore

if TYPE_CHECKING:
    from pygraphd.client.backend.torch_private import Runnable

RANKS_UNREACHABLE = Reason(ReasonCode.RANKS_UNREACHABLE)
GRAPH, OTHER = "a" * 64, "b" * 64
HERE, THERE = "e" * 64, "f" * 64
FASTER = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), 1)
KERNELS = Decision(Deployment.KERNELS, Reason(ReasonCode.NO_GAIN), 1)


@dataclass
class Group:
    """Four ranks over one store."""

    values: dict[str, bytes] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=lambda: [Report() for _ in range(4)])

    def rank(self, number: int, failing: dict[int, bool] | None = None) -> Agreement:
        store = MemoryStore(self.values, failing or {})
        return Agreement(Registers(lambda: store, str(number)), self.reports[number])


def test_one_rank_leads_for_a_key() -> None:
    group = Group()
    ranks = [group.rank(number) for number in range(4)]

    assert [rank.role(GRAPH, [GRAPH], HERE).leads for rank in ranks] == [True, False, False, False]
    assert [rank.role(OTHER, [OTHER], HERE).leads for rank in ranks[::-1]] == [True, False, False, False]
    assert ranks[0].role(GRAPH, [OTHER], HERE).leads


def test_without_a_group_a_process_does_as_it_finds() -> None:
    assert ALONE.leads
    assert (ALONE.decision_for(GRAPH, None), ALONE.decision_for(GRAPH, FASTER)) == (None, FASTER)
    assert ALONE.propose(GRAPH, FASTER) is FASTER
    assert ALONE.wait(GRAPH, 1e9) is None


def test_what_a_leader_knows_is_decided_at_once() -> None:
    group = Group()
    leader, other = (group.rank(number).role(GRAPH, [GRAPH], HERE) for number in range(2))

    assert other.decision_for(GRAPH, None) is None
    assert leader.decision_for(GRAPH, FASTER) == FASTER
    assert other.decision_for(GRAPH, None) == FASTER


def test_a_leader_whose_proposal_loses_adopts_what_is_decided() -> None:
    group = Group()
    leader, other = (group.rank(number).role(GRAPH, [GRAPH], HERE) for number in range(2))

    assert other.propose(GRAPH, KERNELS) == KERNELS

    assert leader.decision_for(GRAPH, FASTER) == KERNELS
    assert leader.propose(GRAPH, FASTER) == KERNELS


def test_after_the_time_limit_all_launch() -> None:
    group = Group()
    leader, other = (group.rank(number).role(GRAPH, [GRAPH], HERE) for number in range(2))
    assert other.wait(GRAPH, WAIT_LIMIT_S - 1) is None

    late = other.wait(GRAPH, WAIT_LIMIT_S)

    assert late == rules.not_measured(Reason(ReasonCode.RANKS_LATE, "120 s"))
    assert leader.propose(GRAPH, FASTER) == late


def test_what_was_decided_in_another_environment_is_adopted_and_marked() -> None:
    group = Group()
    group.rank(0).role(GRAPH, [GRAPH], HERE).propose(GRAPH, FASTER)
    long = Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER, "x" * MAX_DETAIL), 1)
    group.rank(0).role(OTHER, [OTHER], HERE).propose(OTHER, long)

    other = group.rank(1).role(GRAPH, [GRAPH], THERE)

    adopted = other.decision_for(GRAPH, None)
    assert adopted == Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER, OTHER_ENVIRONMENT), 1)
    assert other.decision_for(OTHER, None) == long


def test_a_rank_whose_store_fails_launches_that_graph_and_asks_no_more_after_two_failures() -> None:
    group = Group()
    group.rank(0).role(GRAPH, [GRAPH], HERE).propose(GRAPH, FASTER)
    store = MemoryStore(group.values, failing={1: False, 3: False})
    lost = Agreement(Registers(lambda: store, "1"), group.reports[1])

    role = lost.role(OTHER, [OTHER], HERE)
    alone = role.decision_for(OTHER, None)
    assert alone is not None
    assert (role.leads, alone.deployment, alone.reason) == (False, Deployment.KERNELS, RANKS_UNREACHABLE)
    assert role.propose(OTHER, FASTER) == alone
    assert store.operations == 1

    assert lost.role(GRAPH, [GRAPH], HERE).decision_for(GRAPH, None) == alone
    operations = store.operations
    assert lost.role("c" * 64, ["d" * 64], HERE).propose("d" * 64, FASTER) == alone
    assert store.operations == operations
    assert dict(group.reports[1].failures) == {"ranks: ConnectionError": MAX_STORE_FAILURES}


def test_what_is_known_is_not_asked_again() -> None:
    store = MemoryStore()
    role = Agreement(Registers(lambda: store, "0"), Report()).role(GRAPH, [GRAPH], HERE)
    role.propose(GRAPH, FASTER)
    operations = store.operations

    assert role.decision_for(GRAPH, None) == role.propose(GRAPH, KERNELS) == role.wait(GRAPH, 1e9) == FASTER
    assert store.operations == operations


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_bounded_number_of_graphs_is_known_and_the_others_are_read_again(
    monkeypatch: pytest.MonkeyPatch, *, is_lost: bool
) -> None:
    monkeypatch.setattr(consensus, "MAX_AGREED_GRAPHS", 2)
    store, graphs = MemoryStore(), [each * 64 for each in "abcd"]
    if is_lost:
        store.failing = dict.fromkeys(range(1, 9), False)
    ranks = Agreement(Registers(lambda: store, "0"), Report())
    first = [ranks.role(graph, [graph], HERE).propose(graph, FASTER) for graph in graphs]

    again = [ranks.role(graph, [graph], HERE) for graph in graphs]

    assert [role.leads for role in again] == [not is_lost] * 4
    assert [role.decision_for(graph, None) for role, graph in zip(again, graphs, strict=True)] == first
    assert (len(ranks._known), len(ranks._leads)) == (2, 0 if is_lost else 2)


# --- any order, any delay, any failure ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Fate:
    """What one rank brings along: a hit, what it would measure and in how many calls (None: it never gets there),
    whether it cannot capture at all, its environment, and which operations of its store fail."""

    hit: Decision | None
    measured: Decision
    calls: int | None
    refuses: bool
    environment: str
    failing: dict[int, bool]


SLOW = 30
"""Calls of a leader that comes too late, where each takes `LONGEST_S`."""
DECISIONS = st.sampled_from(
    [FASTER, KERNELS, Decision(Deployment.GRAPH, Reason(ReasonCode.OTHER, "GRAPH saves host time"), 1)]
)
FATES = st.builds(
    Fate,
    hit=st.none() | DECISIONS,
    measured=DECISIONS,
    calls=st.none() | st.integers(1, SLOW),
    refuses=st.integers(0, 5).map(lambda number: number == 0),
    environment=st.sampled_from([HERE, HERE, THERE]),
    failing=st.just({}) | st.dictionaries(st.integers(1, 6), st.booleans(), max_size=3),
)
STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([0.0, 0.2, 30.0])), max_size=40)


class Rank:
    """One rank as `session.Plan` has it: plans a graph at its first step, calls it in the following ones."""

    def __init__(self, number: int, fate: Fate, group: Group, clock: dict[str, float]) -> None:
        self.fate = fate
        self.agreement = group.rank(number, fate.failing)
        self.report = group.reports[number]
        self.clock = lambda: clock["now"]
        self.deployed: Decision | None = None
        self.run: Any = self.plan
        self.calls = 0

    def plan(self, inputs: list[Any]) -> None:
        role = self.agreement.role(GRAPH, [GRAPH], self.fate.environment)
        if self.fate.refuses:
            self.deployed = role.propose(GRAPH, KERNELS)
        else:
            self.deployed = role.decision_for(GRAPH, self.fate.hit if role.leads else None)
        self.role = role
        self.run = self.measure if role.leads else self.follower()

    def measure(self, inputs: list[Any]) -> None:
        self.calls += 1
        if self.deployed is None and self.calls == self.fate.calls:
            self.deployed = self.role.propose(GRAPH, self.fate.measured)

    def follower(self) -> Runnable:
        def deploy(decision: Decision) -> Runnable:
            self.deployed = decision
            return lambda inputs: None

        ask = lambda waited_s: self.role.wait(GRAPH, waited_s)  # noqa: E731
        if self.deployed is not None:
            return lambda inputs: None
        return Follower(lambda inputs: None, ask, deploy, self.report, self.clock)


@given(fates=st.lists(FATES, min_size=4, max_size=4), steps=STEPS)
def test_every_rank_runs_the_same(fates: list[Fate], steps: list[tuple[int, float]]) -> None:
    group, clock = Group(), {"now": 0.0}
    ranks = [Rank(number, fate, group, clock) for number, fate in enumerate(fates)]
    for number, seconds in steps:
        ranks[number].run([])
        clock["now"] += seconds
    for _ in range(SLOW + PATIENT_CALLS + int(WAIT_LIMIT_S / LONGEST_S)):
        clock["now"] += LONGEST_S
        for rank in ranks:
            rank.run([])

    reached = [rank for rank in ranks if not rank.report.failures]
    running = {rank.deployed.deployment for rank in reached if rank.deployed is not None}
    assert len(running) <= 1
    for rank in ranks:
        # Who leads and never comes to a decision goes on measuring; nobody waits for it for ever.
        assert rank.deployed is not None or (rank.role.leads and rank.fate.calls is None)
        if rank.report.failures and rank.deployed is not None and rank.deployed.reason == RANKS_UNREACHABLE:
            assert rank.deployed.deployment is Deployment.KERNELS
        elif rank.deployed is not None:
            running.add(rank.deployed.deployment)
    assert len(running) <= 1
