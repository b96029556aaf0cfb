"""One process measures a graph at a time; a lease ends with its answer, its time, or its holder."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.daemon import leases as module
from pygraphd.daemon.leases import Holder, Leases
from pygraphd.daemon.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

SECONDS = 60.0
E, A, B = "e" * 64, "a" * 64, "b" * 64
US = Peer(os.getpid(), 0)


class Clock:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def holder(name: str, peer: Peer = US) -> Holder:
    return Holder.of(name, peer)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Leases:
    return Leases(SECONDS, clock)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    started = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield started
    started.kill()
    started.communicate()


def test_the_first_to_ask_gets_it(leases: Leases) -> None:
    assert leases.ask(E, [A], holder("first")) == (A,)
    assert leases.ask(E, [A, B], holder("second")) == (B,)
    assert leases.ask(E, [A, B], holder("first")) == (A,)


def test_environments_are_apart(leases: Leases) -> None:
    assert leases.ask(E, [A], holder("first")) == (A,)
    assert leases.ask("f" * 64, [A], holder("second")) == (A,)


def test_it_ends_in_time_unless_it_is_asked_for_again(leases: Leases, clock: Clock) -> None:
    leases.ask(E, [A, B], holder("first"))
    clock.now = SECONDS / 2
    leases.ask(E, [A], holder("first"))
    clock.now = SECONDS

    assert leases.ask(E, [A, B], holder("second")) == (B,)
    clock.now = SECONDS * 1.5
    assert leases.ask(E, [A, B], holder("third")) == (A,)


def test_it_ends_with_its_holder(leases: Leases, process: subprocess.Popen[bytes]) -> None:
    dying = Peer(process.pid, 0)
    leases.ask(E, [A], holder("first", dying))
    assert leases.ask(E, [A], holder("second")) == ()

    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert leases.ask(E, [A], holder("second")) == (A,)


def test_of_a_holder_from_elsewhere_only_time_tells(leases: Leases, clock: Clock) -> None:
    leases.ask(E, [A], holder("first", Peer(0, 0)))
    assert leases.ask(E, [A], holder("second")) == ()
    clock.now = SECONDS
    assert leases.ask(E, [A], holder("second")) == (A,)


def test_a_final_answer_of_anybody_ends_it(leases: Leases) -> None:
    leases.ask(E, [A, B], holder("first"))
    leases.recorded(E, [A], [], Peer(1, 0))

    assert leases.ask(E, [A, B], holder("second")) == (A,)


def test_what_is_not_final_ends_only_its_own_holders(leases: Leases) -> None:
    leases.ask(E, [A, B], holder("first"))
    leases.recorded(E, [], [A, B], Peer(1, 0))
    assert leases.ask(E, [A, B], holder("second")) == ()
    leases.recorded(E, [], [A], US)
    assert leases.ask(E, [A, B], holder("second")) == (A,)


def test_what_is_not_final_from_elsewhere_ends_nothing(leases: Leases) -> None:
    leases.ask(E, [A], holder("first", Peer(0, 0)))
    leases.recorded(E, [], [A], Peer(0, 0))
    assert leases.ask(E, [A], holder("second")) == ()


def test_their_number_is_bounded_and_beyond_it_everybody_may_measure(
    leases: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_LEASES", 2)
    assert leases.ask(E, ["1", "2"], holder("first")) == ("1", "2")
    for name in ("first", "second"):
        assert leases.ask(E, ["3"], holder(name)) == ("3",)
    assert len(leases) == 2


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from("xyz"), st.lists(st.sampled_from("abcd"), max_size=4)),
        st.tuples(st.just("wait"), st.floats(0, 90)),
        st.tuples(st.just("answer"), st.sampled_from("abcd")),
    ),
    max_size=40,
)


@given(steps=STEPS)
def test_no_two_hold_one_graph_at_a_time(steps: list[tuple[object, ...]]) -> None:
    clock = Clock()
    leases = Leases(SECONDS, clock)
    held: dict[str, tuple[str, float]] = {}
    for step in steps:
        match step:
            case ("ask", str(name), list(graphs)):
                free = [
                    graph
                    for graph in graphs
                    if graph not in held or held[graph][0] == name or held[graph][1] <= clock.now
                ]
                assert list(leases.ask(E, graphs, holder(name))) == free
                held.update(dict.fromkeys(free, (name, clock.now + SECONDS)))
            case ("wait", float(seconds)):
                clock.now += seconds
            case ("answer", str(graph)):
                held.pop(graph, None)
                leases.recorded(E, [graph], [], Peer(1, 0))
    assert {graph for graph, (_, until) in held.items() if until > clock.now} <= {
        graph for _, graph in leases._leases
    }


def test_a_lease_that_was_granted_for_less_time_ends_before_an_earlier_one(
    leases: Leases, clock: Clock
) -> None:
    """The daemon's settings may shorten leases while it runs."""
    leases.ask(E, [A], holder("first"))
    leases.seconds = SECONDS / 10
    leases.ask(E, [B], holder("second"))

    clock.now = SECONDS / 10

    assert leases.by_pid() == {os.getpid(): [A]}
    assert leases.ask(E, [A, B], holder("third")) == (B,)
