"""Of many processes one measures a graph, the others take up its answer, and none waits for ever.

The daemon's own leases stand behind the clients' caches here, without the socket; tests/daemon has both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.decisions.leases import (
    LONGEST_POLL_S,
    TRANSITIONS,
    LeaseState,
    PendingGraph,
)
from pygraphd.client.decisions.leases import Leases as ProcessLeases
from pygraphd.daemon.leases import Holder, Leases
from pygraphd.daemon.peer import Peer
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Decision, Deployment, Entry, Graph, Kind, LeaseAnswer
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.decisions.cache import Cache

ENVIRONMENT = Environment("GPU", "9.0", 1, 1, "", "t", "t", "c", "d", "c")
ANSWER = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), 1)


def test_the_table_of_transitions_is_complete() -> None:
    assert set(TRANSITIONS) == set(LeaseState)
    assert all(LeaseState.OPEN not in following for following in TRANSITIONS.values())


@dataclass(frozen=True)
class Key:
    """A graph, by which each process knows one of its own."""

    graph: str
    is_backward: bool


FORWARD, BACKWARD, OTHER = Key("a" * 64, False), Key("b" * 64, True), Key("c" * 64, False)


class Process:
    """The leases of one process, by key."""

    def __init__(self, leases: ProcessLeases) -> None:
        self.leases = leases
        self.graphs: dict[Key, PendingGraph] = {}

    def add(self, key: Key, rejected: Entry | None = None) -> None:
        kind = Kind.BACKWARD if key.is_backward else Kind.FORWARD
        self.graphs[key] = PendingGraph(Graph(key.graph, kind, 0, 1, 1), ENVIRONMENT, rejected)
        self.leases.add(self.graphs[key])

    def turn(self, key: Key) -> Entry | LeaseState:
        return self.leases.acquire(self.graphs[key])

    def keep(self, key: Key) -> None:
        self.leases.renew(self.graphs[key])

    def remove(self, key: Key) -> None:
        self.leases.remove(self.graphs[key])

    def is_left_to_others(self, key: Key) -> bool:
        return self.leases.is_left_to_others(self.graphs[key])


class Daemon:
    """What all processes share: a clock, leases, answers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.leases = Leases(60.0, lambda: self.now)
        self.entries: dict[str, Entry] = {}
        self.asked: list[tuple[str, ...]] = []
        self.sent: list[float] = []
        """When leases were asked for, also without an answer."""
        self.absent = self.interrupts = False

    def process(self, name: str) -> Process:
        client = cast("Cache", Client(self, name))
        return Process(ProcessLeases(client, lambda entry: entry.decision.policy == 1, lambda: self.now))

    def record(self, key: Key, decision: Decision = ANSWER) -> None:
        self.entries[key.graph] = Entry(key.graph, decision)
        self.leases.recorded(ENVIRONMENT.digest(), [key.graph], [], Peer(0, 0))


class Client:
    """A process's way to the daemon."""

    def __init__(self, daemon: Daemon, name: str) -> None:
        self._daemon = daemon
        self._name = name

    def lease(self, environment: Environment, graphs: Sequence[str]) -> LeaseAnswer | None:
        self._daemon.sent.append(self._daemon.now)
        if self._daemon.interrupts:
            raise KeyboardInterrupt
        if self._daemon.absent:
            return None
        self._daemon.asked.append(tuple(graphs))
        holder = Holder(self._name, 0, None)
        granted = self._daemon.leases.ask(environment.digest(), graphs, holder)
        return LeaseAnswer(environment.digest(), "1", granted, self._daemon.leases.seconds)

    def lookup(self, environment: Environment, graphs: Sequence[str]) -> dict[str, Entry]:
        found = self._daemon.entries
        return {graph: found[graph] for graph in graphs if graph in found}


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


def interested(daemon: Daemon, name: str, *keys: Key) -> Process:
    process = daemon.process(name)
    for key in keys:
        process.add(key)
    return process


def test_one_measures_and_the_other_takes_up_the_answer(daemon: Daemon) -> None:
    first, second = (interested(daemon, name, FORWARD) for name in ("first", "second"))

    assert (first.turn(FORWARD), second.turn(FORWARD)) == (LeaseState.OURS, LeaseState.OTHERS)
    assert [each.is_left_to_others(FORWARD) for each in (first, second)] == [False, True]
    daemon.record(FORWARD)
    daemon.now = LONGEST_POLL_S

    assert second.turn(FORWARD) == daemon.entries[FORWARD.graph]


def test_an_answer_that_is_there_already_is_taken_up_at_once(daemon: Daemon) -> None:
    daemon.record(FORWARD)
    assert interested(daemon, "late", FORWARD).turn(FORWARD) == daemon.entries[FORWARD.graph]


@pytest.mark.parametrize(
    "answer",
    [
        Decision(Deployment.GRAPH, Reason(ReasonCode.OTHER), 2),
        Decision(Deployment.KERNELS, Reason(ReasonCode.OTHER), 1, final=False),
    ],
    ids=["not usable", "not final"],
)
def test_not_every_answer_is_one(daemon: Daemon, answer: Decision) -> None:
    daemon.record(FORWARD, answer)
    assert interested(daemon, "late", FORWARD).turn(FORWARD) is LeaseState.OURS


def test_without_a_daemon_everybody_measures(daemon: Daemon) -> None:
    daemon.absent = True
    for name in ("first", "second"):
        assert interested(daemon, name, FORWARD).turn(FORWARD) is LeaseState.OURS


def test_a_daemon_that_goes_away_leaves_the_graph_to_whoever_asks_next(daemon: Daemon) -> None:
    interested(daemon, "first", FORWARD).turn(FORWARD)
    second = interested(daemon, "second", FORWARD)
    assert second.turn(FORWARD) is LeaseState.OTHERS
    daemon.absent = True
    daemon.now = LONGEST_POLL_S

    assert second.turn(FORWARD) is LeaseState.OURS


def test_only_what_is_called_is_asked_for_a_backward_as_a_forward(daemon: Daemon) -> None:
    first = interested(daemon, "first", FORWARD, BACKWARD, OTHER)

    assert [first.turn(each) for each in (BACKWARD, FORWARD)] == [LeaseState.OURS] * 2
    assert daemon.asked == [(BACKWARD.graph,), (FORWARD.graph,)]
    assert interested(daemon, "second", OTHER).turn(OTHER) is LeaseState.OURS


def test_what_is_no_longer_called_is_not_kept_from_others(daemon: Daemon) -> None:
    first, second = (interested(daemon, name, FORWARD, OTHER) for name in ("first", "second"))
    assert [first.turn(each) for each in (FORWARD, OTHER)] == [LeaseState.OURS] * 2
    for step in range(200):
        daemon.now = float(step)
        first.keep(FORWARD)

    assert [second.turn(each) for each in (FORWARD, OTHER)] == [LeaseState.OTHERS, LeaseState.OURS]


def test_what_waits_is_looked_for_in_one_go(daemon: Daemon) -> None:
    first, second = (interested(daemon, name, FORWARD, OTHER) for name in ("first", "second"))
    for process in (first, second):
        for each in (FORWARD, OTHER):
            process.turn(each)
    for each in (FORWARD, OTHER):
        daemon.record(each)
    daemon.asked.clear()
    daemon.now = LONGEST_POLL_S

    assert [second.turn(each) for each in (FORWARD, OTHER)] == [*daemon.entries.values()]
    assert [set(graphs) for graphs in daemon.asked] == [{FORWARD.graph, OTHER.graph}]


def test_while_another_thread_asks_nobody_measures(daemon: Daemon) -> None:
    first = interested(daemon, "first", FORWARD)
    with first.leases._asking:
        assert first.turn(FORWARD) is LeaseState.OTHERS
    assert first.turn(FORWARD) is LeaseState.OURS


def test_there_may_be_more_than_fit_into_a_request(daemon: Daemon) -> None:
    many = [Key(f"{index:064x}", False) for index in range(2500)]
    first, second = (interested(daemon, name, *many) for name in ("first", "second"))
    assert {first.turn(each) for each in many} == {LeaseState.OURS}
    assert {second.turn(each) for each in many} == {LeaseState.OTHERS}
    daemon.asked.clear()
    daemon.now = LONGEST_POLL_S
    second.turn(many[0])

    assert [len(graphs) for graphs in daemon.asked] == [1024, 1024, 452]


def test_an_answer_that_was_rejected_is_no_answer_however_it_is_worded(daemon: Daemon) -> None:
    before = Entry(FORWARD.graph, ANSWER, 1, "elsewhere", 10.0, measured_at=5.0)
    for now, taken in (
        (dataclasses.replace(before, cost_us=900.0), False),
        (
            dataclasses.replace(
                before, decision=dataclasses.replace(ANSWER, reason=Reason(ReasonCode.OTHER, "rederived"))
            ),
            False,
        ),
        (dataclasses.replace(before, measured_at=6.0), True),
    ):
        process = daemon.process("one")
        process.add(FORWARD, before)
        daemon.entries[FORWARD.graph] = now
        assert (process.turn(FORWARD) == now) is taken


def test_looks_become_rare_and_cost_nothing_in_between(daemon: Daemon) -> None:
    interested(daemon, "first", FORWARD).turn(FORWARD)
    second = interested(daemon, "second", FORWARD)
    daemon.asked.clear()
    for step in range(600_00):  # ten minutes, a hundred calls a second, while the first holds on
        daemon.now = step / 100
        second.turn(FORWARD)
        if step % 1000 == 0:
            daemon.leases.ask(ENVIRONMENT.digest(), [FORWARD.graph], Holder("first", 0, None))

    assert 60 <= len(daemon.asked) <= 66


def test_who_measures_long_holds_on(daemon: Daemon) -> None:
    first, second = (interested(daemon, name, FORWARD) for name in ("first", "second"))
    first.turn(FORWARD)
    for step in range(600):
        daemon.now = float(step)
        first.keep(FORWARD)
        assert second.turn(FORWARD) is LeaseState.OTHERS

    assert len([1 for asked in daemon.asked if asked]) < 200


def test_a_renewal_that_fails_is_made_again_at_the_next_interval(daemon: Daemon) -> None:
    first = interested(daemon, "first", FORWARD)
    first.turn(FORWARD)
    for step in range(61):  # by its end the lease has run out
        daemon.now, daemon.absent = float(step), step < 60
        first.keep(FORWARD)

    assert (daemon.sent, daemon.asked) == ([0.0, 20.0, 40.0, 60.0], [(FORWARD.graph,)] * 2)
    assert interested(daemon, "second", FORWARD).turn(FORWARD) is LeaseState.OTHERS


def test_a_renewal_that_is_interrupted_is_made_again_too(daemon: Daemon) -> None:
    first = interested(daemon, "first", FORWARD)
    first.turn(FORWARD)
    daemon.now, daemon.interrupts = 20.0, True
    with pytest.raises(KeyboardInterrupt):
        first.keep(FORWARD)
    daemon.now, daemon.interrupts = 40.0, False
    first.keep(FORWARD)

    assert daemon.sent == [0.0, 20.0, 40.0]
    daemon.now = 70.0  # after the end of the first lease
    assert interested(daemon, "second", FORWARD).turn(FORWARD) is LeaseState.OTHERS


def test_what_is_decided_is_not_prolonged(daemon: Daemon) -> None:
    first = interested(daemon, "first", FORWARD)
    first.turn(FORWARD)
    first.remove(FORWARD)
    daemon.asked.clear()
    daemon.now = 1000.0
    first.keep(FORWARD)

    assert daemon.asked == []
    assert first.turn(FORWARD) is LeaseState.OURS  # nothing to be waited for


STEPS = st.lists(st.tuples(st.integers(0, 3), st.floats(0, 30), st.booleans()), max_size=60)


@given(steps=STEPS)
def test_never_two_at_once_and_all_end_with_one_answer(steps: list[tuple[int, float, bool]]) -> None:
    daemon = Daemon()
    processes = [interested(daemon, str(index), FORWARD) for index in range(4)]
    measuring: set[int] = set()
    for index, wait, finishes in steps:
        daemon.now += wait
        for each in measuring:
            processes[each].keep(FORWARD)
        if processes[index].turn(FORWARD) is LeaseState.OURS:
            measuring.add(index)
        assert len(measuring) == 1
        if finishes and index in measuring:
            daemon.record(FORWARD)
            break
    daemon.now += LONGEST_POLL_S
    answers = {index: process.turn(FORWARD) for index, process in enumerate(processes)}
    done = bool(daemon.entries)
    assert all(
        isinstance(answer, Entry) is (done and index not in measuring) for index, answer in answers.items()
    )
