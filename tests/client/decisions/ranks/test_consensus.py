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
    OTHER_ENVIRONMENT,
    UNLED_S,
    WAIT_LIMIT_S,
    Agreement,
)
from pygraphd.client.decisions.ranks.following import LONGEST_S, PATIENT_CALLS, Follower
from pygraphd.client.decisions.ranks.reachability import FIRST_PAUSE_S, LONGEST_PAUSE_S, MAX_STORE_FAILURES
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
    """Four ranks over one store, and the time."""

    values: dict[str, bytes] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=lambda: [Report() for _ in range(4)])
    now: float = 1000.0

    def rank(self, number: int, failing: dict[int, bool] | None = None) -> Agreement:
        return self.on(MemoryStore(self.values, failing or {}), number)

    def on(self, store: MemoryStore, number: int = 0) -> Agreement:
        registers = Registers(lambda: store, str(number))
        return Agreement(registers, self.reports[number], clock=lambda: self.now)


ALWAYS = dict.fromkeys(range(1, 10**4), False)
"""All operations of a store fail."""


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
    assert not ALONE.takes_over(GRAPH, 1e9)


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


def test_after_the_time_limit_all_run_kernels() -> None:
    group = Group()
    leader, other = (group.rank(number).role(GRAPH, [GRAPH], HERE) for number in range(2))
    assert other.wait(GRAPH, WAIT_LIMIT_S - 1) is None

    late = other.wait(GRAPH, WAIT_LIMIT_S)

    assert late == rules.not_measured(Reason(ReasonCode.RANKS_LATE, "120 s"))
    assert leader.propose(GRAPH, FASTER) == late


def test_one_of_the_ranks_that_wait_for_a_graph_that_no_rank_leads_does() -> None:
    """As for a backward that the leader of the forward does not have."""
    group = Group()
    leader, *others = (group.rank(number).role(GRAPH, [GRAPH], HERE) for number in range(3))
    assert leader.leads

    assert [each.takes_over(OTHER, UNLED_S - 1) for each in others] == [False, False]
    assert [each.takes_over(OTHER, UNLED_S) for each in others[::-1]] == [True, False]
    assert [each.takes_over(GRAPH, WAIT_LIMIT_S) for each in others] == [False, False]

    assert others[1].propose(OTHER, FASTER) == others[0].wait(OTHER, UNLED_S) == FASTER


def test_that_another_rank_leads_is_asked_once_however_long_this_one_waits() -> None:
    group = Group()
    group.rank(0).role(GRAPH, [GRAPH], HERE)
    store = MemoryStore(group.values)
    other = group.on(store, 1).role(GRAPH, [GRAPH], HERE)
    asked = store.operations

    assert not any(other.takes_over(GRAPH, UNLED_S + waited_s) for waited_s in range(20))

    assert store.operations == asked + 1


def test_without_a_store_no_rank_takes_over() -> None:
    group = Group()
    store = MemoryStore(group.values)
    role = group.on(store).role(GRAPH, [], HERE)
    store.failing = ALWAYS

    assert not role.takes_over(OTHER, UNLED_S)


def test_what_was_decided_in_another_environment_is_adopted_and_marked() -> None:
    group = Group()
    group.rank(0).role(GRAPH, [GRAPH], HERE).propose(GRAPH, FASTER)
    long = Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER, "x" * MAX_DETAIL), 1)
    group.rank(0).role(OTHER, [OTHER], HERE).propose(OTHER, long)

    other = group.rank(1).role(GRAPH, [GRAPH], THERE)

    adopted = other.decision_for(GRAPH, None)
    assert adopted == Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER, OTHER_ENVIRONMENT), 1)
    assert other.decision_for(OTHER, None) == long


def test_after_a_pause_of_the_store_a_rank_agrees_as_before() -> None:
    group = Group()
    group.rank(0).role(GRAPH, [GRAPH], HERE).propose(GRAPH, FASTER)
    store = MemoryStore(group.values, failing=ALWAYS)
    rank = group.on(store, 1)

    role = rank.role(GRAPH, [GRAPH], HERE)
    assert not role.leads  # it decides nothing alone
    assert role.decision_for(GRAPH, None) is None
    assert store.operations == 1  # no call waits for the store a second time
    store.failing = {}
    group.now += FIRST_PAUSE_S

    assert role.wait(GRAPH, 0.0) == FASTER
    assert rank.role(OTHER, [OTHER], HERE).leads
    assert dict(group.reports[1].failures) == {"ranks: ConnectionError": 1}


def test_what_a_leader_has_decided_in_a_pause_of_the_store_it_proposes_after_it() -> None:
    group = Group()
    store = MemoryStore(group.values)
    leader, other = (each.role(GRAPH, [GRAPH], HERE) for each in (group.on(store), group.rank(1)))
    store.failing = ALWAYS

    assert leader.propose(GRAPH, FASTER) is None
    assert other.wait(GRAPH, 0.0) is None
    store.failing = {}
    assert leader.propose(GRAPH, FASTER) is None
    group.now += FIRST_PAUSE_S

    assert leader.propose(GRAPH, FASTER) == FASTER
    assert other.wait(GRAPH, 0.0) == FASTER


def test_a_rank_that_is_about_to_decide_alone_asks_once_more() -> None:
    """Its first proposal may have taken effect, and other ranks run it."""
    group = Group()
    store = MemoryStore(group.values)
    leader, other = (each.role(GRAPH, [GRAPH], HERE) for each in (group.on(store), group.rank(1)))
    store.failing = {**ALWAYS, store.operations + 1: True}
    assert leader.propose(GRAPH, FASTER) is None
    while group.now < 1000.0 + WAIT_LIMIT_S - 1:
        group.now += 1.0
        assert leader.propose(GRAPH, FASTER) is None
    store.failing = {}  # in a pause, which lasts for longer than the limit

    agreed = None
    while agreed is None:
        group.now += 1.0
        agreed = leader.propose(GRAPH, FASTER)

    assert agreed == other.wait(GRAPH, 0.0) == FASTER


def test_a_store_that_stays_away_costs_a_bounded_number_of_operations_and_has_the_rank_run_kernels() -> None:
    group = Group()
    store = MemoryStore(failing=ALWAYS)
    role = group.on(store).role(GRAPH, [GRAPH], HERE)
    asked = []
    for _ in range(149):
        group.now += 1.0
        assert role.propose(GRAPH, FASTER) is None
        asked.append(store.operations)
    group.now += 1.0

    alone = role.propose(GRAPH, FASTER)  # by the first question after the limit

    assert alone is not None
    assert (alone.deployment, alone.reason) == (Deployment.KERNELS, RANKS_UNREACHABLE)
    assert asked[-1] == 4  # after 10, 20 and 40 seconds, beside the first
    others = [f"{number:064x}" for number in range(2 * MAX_STORE_FAILURES)]
    for other in others:
        group.now += LONGEST_PAUSE_S
        assert role.propose(other, FASTER) == alone
    store.failing = {}
    assert role.propose(OTHER, FASTER) == alone
    assert store.operations == MAX_STORE_FAILURES
    assert dict(group.reports[0].failures) == {"ranks: ConnectionError": MAX_STORE_FAILURES}


def test_a_rank_that_asks_no_more_waits_no_more() -> None:
    """As after many failures, each of which passed."""
    group = Group()
    store = MemoryStore(group.values)
    role = group.on(store).role(GRAPH, [GRAPH], HERE)
    for number in range(MAX_STORE_FAILURES):
        store.failing = ALWAYS
        assert role.propose(f"{number:064x}", FASTER) is None or number == MAX_STORE_FAILURES - 1
        if number < MAX_STORE_FAILURES - 1:
            store.failing = {}
            group.now += FIRST_PAUSE_S
            assert role.propose(f"{number:064x}", FASTER) == FASTER

    assert role.propose(OTHER, FASTER) == rules.not_measured(RANKS_UNREACHABLE)


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
    group, store, graphs = Group(), MemoryStore(), [each * 64 for each in "abcd"]
    ranks = group.on(store)
    if is_lost:
        store.failing = ALWAYS
        ranks.role(GRAPH, [GRAPH], HERE)
        group.now += WAIT_LIMIT_S
    first = [ranks.role(graph, [graph], HERE).propose(graph, FASTER) for graph in graphs]

    again = [ranks.role(graph, [graph], HERE) for graph in graphs]

    assert [role.leads for role in again] == [not is_lost] * 4
    assert [role.propose(graph, KERNELS) for role, graph in zip(again, graphs, strict=True)] == first
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

    def __init__(self, number: int, fate: Fate, group: Group) -> None:
        self.fate = fate
        self.agreement = group.rank(number, fate.failing)
        self.report = group.reports[number]
        self.clock = lambda: group.now
        self.deployed: Decision | None = None
        self.run: Any = self.plan
        self.calls = 0
        self.leads = False

    def plan(self, inputs: list[Any]) -> None:
        role = self.agreement.role(GRAPH, [GRAPH], self.fate.environment)
        if self.fate.refuses:
            # It runs KERNELS whether or not the others know.
            self.deployed = role.propose(GRAPH, KERNELS) or rules.not_measured(RANKS_UNREACHABLE)
        else:
            self.deployed = role.decision_for(GRAPH, self.fate.hit if role.leads else None)
        self.role, self.leads = role, role.leads
        self.run = self.measure if role.leads else self.follower()

    def measure(self, inputs: list[Any]) -> None:
        self.calls += 1
        if self.deployed is None and self.fate.calls is not None and self.calls >= self.fate.calls:
            self.deployed = self.role.propose(GRAPH, self.fate.measured)

    def follower(self) -> Runnable:
        def deploy(decision: Decision) -> Runnable:
            self.deployed = decision
            return lambda inputs: None

        ask = lambda waited_s: self.role.wait(GRAPH, waited_s)  # noqa: E731
        if self.deployed is not None:
            return lambda inputs: None
        return Follower(lambda inputs: None, ask, deploy, self.report, self.clock, self.lead)

    def lead(self, waited_s: float) -> Runnable | None:
        if not self.role.takes_over(GRAPH, waited_s):
            return None
        self.leads, self.calls = True, 0
        return self.measure


@pytest.mark.parametrize("step_s", [0.1, 30.0])
def test_where_no_rank_leads_all_run_what_one_of_them_measures_however_slow_the_program(
    step_s: float,
) -> None:
    group = Group(values={f"asks/{GRAPH}": b"a rank without this graph"})
    ranks = [Rank(number, Fate(None, FASTER, 24, False, HERE, {}), group) for number in range(4)]
    for _ in range(int(WAIT_LIMIT_S / 0.1)):
        group.now += step_s
        for rank in ranks:
            rank.run([])

    assert [rank.deployed for rank in ranks] == [FASTER] * 4
    assert [rank.leads for rank in ranks].count(True) == 1


@given(fates=st.lists(FATES, min_size=4, max_size=4), steps=STEPS)
def test_every_rank_runs_the_same(fates: list[Fate], steps: list[tuple[int, float]]) -> None:
    group = Group()
    ranks = [Rank(number, fate, group) for number, fate in enumerate(fates)]
    for number, seconds in steps:
        ranks[number].run([])
        group.now += seconds
    for _ in range(2 * (SLOW + PATIENT_CALLS + int(WAIT_LIMIT_S / LONGEST_S))):
        group.now += LONGEST_S
        for rank in ranks:
            rank.run([])

    reached = [rank for rank in ranks if not rank.report.failures]
    running = {rank.deployed.deployment for rank in reached if rank.deployed is not None}
    assert len(running) <= 1
    for rank in ranks:
        # Who leads and never comes to a decision goes on measuring; nobody waits for it for ever.
        assert rank.deployed is not None or (rank.leads and rank.fate.calls is None)
        if rank.report.failures and rank.deployed is not None and rank.deployed.reason == RANKS_UNREACHABLE:
            assert rank.deployed.deployment is Deployment.KERNELS
        elif rank.deployed is not None:
            running.add(rank.deployed.deployment)
    assert len(running) <= 1
