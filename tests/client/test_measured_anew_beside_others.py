"""What is measured anew in its turn beside relocated graphs, other processes, other ranks, and what the cache says meanwhile."""

# ruff: noqa: F811 - fixtures of another file
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client import claims, options, policy
from pygraphd.client.cache import Cache
from pygraphd.client.retrials import FIRST
from pygraphd.client.session import Session
from pygraphd.schema.messages import Deployment, Kind, LeaseAnswer
from pygraphd.schema.policy import NO_GAIN
from tests.client.test_looking import decided, expect
from tests.client.test_measured_anew import (  # noqa: F401
    Of,
    affordable,
    at_once,
    look,
    looks_find_nothing,
    of_each,
)
from tests.client.test_plan import (  # noqa: F401
    Clock,
    Compiled,
    Relocating,
    compile_pair,
    relocating,
    relocation_where_it_is_meant,
    run,
    session,
    sources,
)
from tests.client.test_plan_of_ranks import pair as pair_of_rank
from tests.client.test_plan_of_ranks import ranks, wait_for  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.region import Region
    from pygraphd.schema.keys import Environment

pytestmark = pytest.mark.torch

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH
MORE = 160
"""Calls that end measuring anew."""


def leasing_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the daemon say that another process measures whatever is asked for."""

    def lease(self: Cache, environment: Environment, graphs: Sequence[str]) -> LeaseAnswer:
        return LeaseAnswer(environment.digest(), "1", (), 60.0)

    monkeypatch.setattr(Cache, "lease", lease)


@pytest.fixture
def refused_for_now(relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have there be no room to relocate any graph."""
    made = Relocating.__init__

    def refuse(self: Relocating, refusal: str | None) -> None:
        made(self, "no room")
        self.for_good = False

    monkeypatch.setattr(Relocating, "__init__", refuse)


def beside_relocated(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> tuple[Session, tuple[Compiled, Compiled]]:
    """Return a program that has looked a launched pair up, and has relocated graphs, and no trees."""
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0, GRAPH: 120.0})
    decided(session, "launched")
    later = Session(session.locations)
    later.has_relocated = True
    pair = compile_pair(later)
    assert run(*pair, 1) == [(["launched"], ["launched"])]
    return later, pair


def test_beside_relocated_graphs_what_is_launched_is_held_against_such_only(
    session: Session,
    relocating: list[Relocating],
    monkeypatch: pytest.MonkeyPatch,
    affordable: None,
    looks_find_nothing: None,
) -> None:
    later, pair = beside_relocated(session, monkeypatch)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 20.0, GRAPH: 80.0})
    monkeypatch.setattr(Clock, "span_us", 20.0)  # not so clearly that trees would not be tried

    steps = look(later, pair, FIRST)

    assert (["captured"], ["captured"]) not in steps
    assert steps[-1] == (["relocated"], ["relocated"])
    expect(later, retried=2, measured=2)
    told = compile_pair(Session(session.locations))
    assert run(*told, 1) == [(["relocated"], ["relocated"])]


def test_what_was_confirmed_without_trees_is_nothing_to_tell(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    later, pair = beside_relocated(session, monkeypatch)
    made = Relocating.__init__
    monkeypatch.setattr(Relocating, "__init__", lambda self, refusal: made(self, "an output differs"))

    look(later, pair, FIRST)

    assert later.report.summary()["reasons"] == {policy.UNBEATEN: 2}
    told = Session(session.locations)
    compile_pair(told)
    assert told.report.summary()["reasons"] == {NO_GAIN: 2}
    assert len(later.drift._looks) == 2


def test_without_trees_nothing_is_said_against_what_another_program_has_found_since(
    session: Session,
    relocating: list[Relocating],
    monkeypatch: pytest.MonkeyPatch,
    affordable: None,
    looks_find_nothing: None,
) -> None:
    later, pair = beside_relocated(session, monkeypatch)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 40.0, GRAPH: 70.0})
    monkeypatch.setattr(Clock, "span_us", 20.0)
    with monkeypatch.context() as refreshing:
        refreshing.setenv(options.REFRESH, "1")
        decided(Session(session.locations))
    later.cache._spooled.clear()  # a daemon would tell

    assert look(later, pair, FIRST)[-1] == (["relocated"], ["relocated"])

    expect(later, retried=2, measured=2, recorded=0, spooled=0)
    told = compile_pair(Session(session.locations))
    assert run(*told, 1) == [(["captured"], ["captured"])]


def test_with_all_there_is_it_is_told_whatever_another_program_has_found(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    look(session, pair, FIRST - 1)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(options.REFRESH, "1")
        elsewhere.setattr(Clock, "times_us", {KERNELS: 200.0, TREES: 240.0})
        decided(Session(session.locations), "launched")
    session.cache._spooled.clear()  # a daemon would tell
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 60.0})

    assert look(session, pair)[-1] == (["captured"], ["captured"])

    expect(session, retried=2, measured=4, spooled=4)


def test_trees_are_not_tried_beside_the_relocated_half_of_the_family(
    session: Session,
    relocating: list[Relocating],
    affordable: None,
    of_each: Of,
    looks_find_nothing: None,
) -> None:
    of_each[Kind.FORWARD] = {KERNELS: 100.0, TREES: 120.0, GRAPH: 20.0}
    of_each[Kind.BACKWARD] = {KERNELS: 100.0, TREES: 120.0, GRAPH: 120.0}
    assert run(*compile_pair(session), MORE)[-1] == (["relocated"], ["launched"])
    later = Session(session.locations)
    pair = compile_pair(later)

    steps = look(later, pair, FIRST)

    expect(later, retried=2, drifted=0)
    assert not any("captured" in ahead + behind for ahead, behind in steps)


def test_relocated_graphs_are_not_held_against_trees_that_have_not_run(
    session: Session, relocating: list[Relocating], affordable: None
) -> None:
    pair = decided(session, "relocated")

    steps = look(session, pair, 3 * FIRST)

    assert (["captured"], ["captured"]) not in steps
    expect(session, rechecked=6 * FIRST, drifted=0, retried=0, measured=2)


def test_they_are_where_trees_have_run_anyway(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 60.0, TREES: 50.0, GRAPH: 40.0})
    monkeypatch.setattr(Clock, "span_us", 20.0)
    pair = decided(session, "relocated")  # not so clearly that trees were not tried
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 60.0, TREES: 30.0, GRAPH: 40.0})

    assert look(session, pair, FIRST - 1)[-1] == (["relocated"], ["relocated"])
    assert look(session, pair)[-1] == (["captured"], ["captured"])

    expect(session, rechecked=2 * FIRST, drifted=0, retried=2, measured=4)
    assert [each.closed for each in relocating] == [True, True]


def test_what_runs_well_is_not_launched_while_another_process_measures_it(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0, GRAPH: 190.0})
    pair = decided(session)
    look(session, pair, FIRST - 1)
    leasing_to_others(monkeypatch)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0, GRAPH: 30.0})

    assert look(session, pair)[-1] == (["relocated"], ["relocated"])

    expect(session, retried=2, measured=4, drifted=0)


def test_what_has_drifted_waits_for_another_process(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = decided(session)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 300.0, TREES: 200.0})
    leasing_to_others(monkeypatch)

    assert look(session, pair)[-1] == (["launched"], ["launched"])

    expect(session, drifted=2, waited=2, measured=2)


def test_an_answer_that_another_process_has_found_is_taken_up_without_measuring(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    look(session, pair, FIRST - 1)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 60.0})
    with monkeypatch.context() as refreshing:
        refreshing.setenv(options.REFRESH, "1")
        decided(Session(session.locations))
    session.cache._spooled.clear()  # a daemon would tell
    monkeypatch.setattr(Session, "turn", looking_up)

    assert look(session, pair)[-1] == (["captured"], ["captured"])

    expect(session, retried=2, adopted=2, measured=2)
    assert sources(session) == {("TREES", "cache")}
    assert len(session.drift._looks) == 2


def test_what_was_refused_for_now_stays_what_the_cache_says_of_it(
    session: Session, refused_for_now: None, affordable: None
) -> None:
    """The next program takes it as it is if it is refused for the same reason."""
    pair = compile_pair(session)
    assert run(*pair, 2 * MORE)[-1] == (["captured"], ["captured"])
    (reason,) = session.report.summary()["reasons"]

    look(session, pair, FIRST)

    expect(session, retried=2)
    told = Session(session.locations)
    assert run(*compile_pair(told), 10)[-1] == (["captured"], ["captured"])
    assert told.report.summary()["reasons"] == {reason: 2}
    expect(told, adopted=2, measured=0)


def test_what_is_being_measured_anew_when_the_program_ends_is_known_as_before(
    session: Session, refused_for_now: None, affordable: None
) -> None:
    """Also if that is not final."""
    pair = compile_pair(session)
    run(*pair, 2 * MORE)
    (reason,) = session.report.summary()["reasons"]
    look(session, pair, FIRST - 1)
    session.drift.look()
    run(*pair, 6)
    expect(session, retried=2)

    session.close()

    told = Session(session.locations)
    run(*compile_pair(told), 10)
    assert told.report.summary()["reasons"] == {reason: 2}


@pytest.mark.parametrize(
    ("trees", "relocated", "may"), [(False, False, True), (False, True, False), (True, True, True)]
)
def test_trees_are_tried_where_they_can_do_no_harm(
    session: Session, trees: bool, relocated: bool, may: bool
) -> None:
    session.trees_have_run, session.has_relocated = trees, relocated

    assert session.may_try_trees() is may


def test_a_graph_that_ran_in_trees_as_was_looked_up_has_brought_them_in(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0, GRAPH: 190.0})
    decided(session)
    later = Session(session.locations)
    before = later.trees_have_run

    run(*compile_pair(later), 1)

    assert (before, later.trees_have_run, later.has_relocated) == (False, True, False)


def test_what_has_drifted_is_held_against_all_there_is(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    later, pair = beside_relocated(session, monkeypatch)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 300.0, TREES: 20.0, GRAPH: 250.0})
    monkeypatch.setattr(Clock, "span_us", 20.0)

    assert look(later, pair)[-1] == (["captured"], ["captured"])


def looking_up(self: Session, region: Region) -> Any:
    """Say whose turn it is as with a daemon, which is asked for the answer of others first."""
    return self._claims.look_up(self._watched[id(region.tally)].interest) or claims.Turn.OURS


def test_of_ranks_the_one_that_leads_finds_out_for_the_next_program(
    ranks: list[Session], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    leader, other = ranks
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0})
    measured, followed = pair_of_rank(leader), pair_of_rank(other)
    assert run(*measured)[-1] == (["launched"], ["launched"])
    wait_for(other, followed)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0})

    for each, models in ((leader, measured), (other, followed)):
        assert look(each, models, FIRST)[-1] == (["launched"], ["launched"])

    assert [each.report.counts["retried"] for each in ranks] == [2, 0]
    assert run(*pair_of_rank(Session(leader.locations)), 3)[-1] == (["captured"], ["captured"])
    look(leader, measured, FIRST)
    assert leader.report.counts["retried"] == 2, "it runs as all do: it was not changed"
    monkeypatch.setattr(Session, "turn", looking_up)
    look(leader, measured, FIRST)
    assert leader.report.counts["retried"] == 4
    assert len(leader.drift._looks) == 2, "it still is when what the cache says is not what all run"
