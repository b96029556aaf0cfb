"""What runs is measured anew in its turn, beside what it was chosen over: seldom, at a bounded cost, and what is good is not given up for noise."""

# ruff: noqa: F811 - fixtures of another file
from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client import checking, fingerprint, policy, region, retrials, workspaces
from pygraphd.client.report import Report
from pygraphd.client.retrials import FIRST, SHARE, Retrials
from pygraphd.client.session import Session
from pygraphd.client.timeline import Entry
from pygraphd.schema.messages import Decision, Deployment, Graph, Kind
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.summary import Source
from tests.client.test_looking import decided, expect
from tests.client.test_plan import (  # noqa: F401
    Clock,
    Compiled,
    Relocating,
    compile_pair,
    relocating,
    relocation_where_it_is_meant,
    run,
    session,
)
from tests.client.test_plan_of_ranks import pair as pair_of_rank
from tests.client.test_plan_of_ranks import ranks, wait_for  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.torch

LAUNCH, TREES, RELOCATE = Deployment.LAUNCH, Deployment.TREES, Deployment.RELOCATE
MORE = 160
"""Calls that end measuring anew."""


def yes() -> bool:
    return True


def begun(scheduled: Retrials, rounds: int, families: Sequence[int] = (1,)) -> list[tuple[int, int]]:
    """Return the families that are measured anew, each with its round."""
    return [
        (number, family)
        for number in range(1, rounds + 1)
        for family in families
        if scheduled.begin(family, number, [yes])
    ]


@pytest.fixture
def affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take measuring to cost next to nothing: programs of tests have run for milliseconds."""
    monkeypatch.setattr(retrials, "SHARE", 1e9)


def look(session: Session, models: tuple[Compiled, Compiled], times: int = 1) -> list[tuple[Any, Any]]:
    """Return what steps did after each of so many looks at one model."""
    steps = []
    for _ in range(times):
        session.drift.look()
        steps += run(*models, MORE)
    return steps


# --- when ---


def test_the_sixth_look_measures_anew_and_then_one_after_twice_as_many(affordable: None) -> None:
    assert begun(Retrials(Report()), 100) == [(6, 1), (18, 1), (42, 1), (90, 1)]


def test_one_family_in_a_round_is(affordable: None) -> None:
    assert begun(Retrials(Report()), 10, (1, 2, 3)) == [(6, 1), (7, 2), (8, 3)]


def test_what_has_changed_is_measured_anew_after_six_looks_again(affordable: None) -> None:
    scheduled = Retrials(Report())
    assert begun(scheduled, 6) == [(6, 1)]

    scheduled.changed(1)

    assert [number for number in range(7, 40) if scheduled.begin(1, number, [yes])] == [12, 24]


def test_without_rivals_nothing_is_and_that_is_asked_when_it_is_due(affordable: None) -> None:
    scheduled, asked = Retrials(Report()), []

    def has_rivals() -> bool:
        asked.append(True)
        return len(asked) > 3

    rounds = [number for number in range(1, 20) if scheduled.begin(1, number, [has_rivals])]

    assert rounds == [9]
    assert len(asked) == 4


def test_measuring_takes_a_bounded_share_of_the_time() -> None:
    report, now_s = Report(), 0.0
    scheduled = Retrials(report, lambda: now_s)
    report.measuring_ms, rounds = 500.0, []

    for number in range(1, 200):
        now_s += 600.0
        if scheduled.begin(1, number, [yes]):
            rounds.append(number)
            assert report.measuring_ms <= SHARE * 1e3 * now_s
            report.measuring_ms += 7_000.0  # of a program with many graphs

    # Half a second is affordable at the sixth look, and 7.5 are after 15,000 s; then what doubles each time is seldom enough.
    assert rounds == [6, 25, 49, 97, 193]


# --- what becomes of it ---


def test_a_capture_that_has_become_faster_is_found_though_launches_cost_what_they_did(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 60.0})

    assert look(session, pair, FIRST - 1)[-1] == (["launched"], ["launched"])
    expect(session, rechecked=2 * (FIRST - 1), drifted=0, retried=0, measured=2)
    assert look(session, pair)[-1] == (["captured"], ["captured"])

    expect(session, rechecked=2 * FIRST, drifted=0, retried=2, measured=4)
    assert session.report.fallbacks[checking.RETRIED] == 2
    assert not any(
        isinstance(slot, region.Region | checking.Checked)
        for compiled in pair
        for slot in compiled.compiled_fn_runner.partitions
    )
    told = compile_pair(Session(session.locations))
    assert run(*told, 1) == [(["captured"], ["captured"])]


def test_what_is_confirmed_is_looked_at_as_before_and_measured_anew_more_seldom(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0})
    pair, counts = decided(session, "launched"), session.report.counts
    rounds = []

    for number in range(1, 20):
        before = counts["retried"]
        assert look(session, pair)[-1] == (["launched"], ["launched"])
        if counts["retried"] > before:
            rounds.append(number)

    assert rounds == [FIRST, 3 * FIRST]
    expect(session, rechecked=2 * 19, drifted=0, retried=4, measured=6, recorded=0, spooled=6)
    assert session.report.summary()["deployed"] == {"LAUNCH": 2, "TREES": 0, "RELOCATE": 0}
    assert len(session.report.summary()["decisions"]) == 2


def test_what_has_changed_is_soon_measured_anew_once_more(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    """It may have been a mistake."""
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0, RELOCATE: 120.0})
    pair, counts, rounds = decided(session, "launched"), session.report.counts, []

    for number in range(1, 5 * FIRST):
        if number == 2 * FIRST:
            monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0, RELOCATE: 50.0})
        before = counts["retried"]
        look(session, pair)
        if counts["retried"] > before:
            rounds.append(number)

    assert run(*pair, 1) == [(["relocated"], ["relocated"])]
    assert rounds == [FIRST, 3 * FIRST, 4 * FIRST]
    expect(session, drifted=0)


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
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 60.0, TREES: 50.0, RELOCATE: 40.0})
    monkeypatch.setattr(Clock, "span_us", 20.0)
    pair = decided(session, "relocated")  # not so clearly that trees were not tried
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 60.0, TREES: 30.0, RELOCATE: 40.0})

    assert look(session, pair, FIRST - 1)[-1] == (["relocated"], ["relocated"])
    assert look(session, pair)[-1] == (["captured"], ["captured"])

    expect(session, rechecked=2 * FIRST, drifted=0, retried=2, measured=4)
    assert [each.closed for each in relocating] == [True, True]


def test_beside_relocated_graphs_what_is_launched_is_held_against_such_only(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0, RELOCATE: 120.0})
    decided(session, "launched")
    later = Session(session.locations)  # in which no trees have run
    another, environment = Graph("e" * 64, Kind.INFERENCE, 0, 1, 1), fingerprint.environment(0)
    later.report.deploy(another, environment, Decision(RELOCATE, "", POLICY_VERSION), Source.CACHE)
    pair = compile_pair(later)
    assert run(*pair, 1) == [(["launched"], ["launched"])]
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 20.0, RELOCATE: 80.0})

    steps = look(later, pair, FIRST)

    assert (["captured"], ["captured"]) not in steps
    assert steps[-1] == (["relocated"], ["relocated"])
    expect(later, retried=2, measured=2)


class Noisy(Clock):
    """A clock that nobody can rely on."""

    drawn = random.Random(1)

    def stop(self, call: Any, *, steady: bool = True) -> None:
        deployment, fair, part = call
        time = self.times_us[deployment] * self.drawn.choice([0.5, 0.7, 1.0, 1.3, 1.5])
        if fair:
            entry = Entry(
                id(self), deployment, fair, idle=True, began_us=0.0, host_us=time, span_us=time, part=part
            )
            self._samples.setdefault(deployment, []).append(entry)


def test_a_capture_is_not_given_up_because_it_is_too_noisy_to_tell(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    """In the first measuring, a launch would have been the answer."""
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 60.0, TREES: 50.0, RELOCATE: 90.0})
    pair = decided(session)
    look(session, pair, FIRST - 1)
    monkeypatch.setattr(region, "Profiler", Noisy)

    assert look(session, pair)[-1] == (["captured"], ["captured"])

    expect(session, rechecked=2 * FIRST, drifted=0, retried=2)
    summary = session.report.summary()
    assert summary["reasons"] == {policy.UNBEATEN: 2}
    assert {each["source"] for each in summary["decisions"]} == {"measured"}
    told = compile_pair(Session(session.locations))
    assert run(*told, 1) == [(["captured"], ["captured"])]
    monkeypatch.setattr(region, "Profiler", Clock)
    look(session, pair)
    expect(session, rechecked=2 * FIRST + 2, drifted=0, retried=2)


def test_what_there_is_no_memory_to_measure_anew_runs_and_is_looked_at_as_before(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 60.0})
    with monkeypatch.context() as short:
        short.setattr(region.Region, "_why_not_measure", lambda self: policy.NO_MEMORY)
        assert look(session, pair, FIRST)[-1] == (["launched"], ["launched"])
    expect(session, rechecked=2 * FIRST, retried=2, measured=2)

    assert look(session, pair, 2 * FIRST)[-1] == (["captured"], ["captured"])

    expect(session, rechecked=6 * FIRST, retried=4, measured=4)


@pytest.mark.parametrize("more_mib", [32, 512])
def test_memory_that_was_reserved_meanwhile_is_given_back(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None, more_mib: int
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    begin, begun = Clock.start, list[Deployment]()
    given_back: list[bool] = []

    def start(self: Any, deployment: Deployment, **rest: Any) -> Any:
        begun.extend([deployment] * (deployment is TREES))
        return begin(self, deployment, **rest)

    def reserved(device: int) -> int:
        return (1 << 30) + (more_mib << 20) * (bool(begun) and not given_back)

    monkeypatch.setattr(Clock, "start", start)
    monkeypatch.setattr(torch.cuda, "memory_reserved", reserved)
    monkeypatch.setattr(workspaces.workspaces, "empty_cache", lambda: given_back.append(True))

    look(session, pair, FIRST)

    assert len(given_back) == (more_mib > 64)
    expect(session, retried=2, drifted=0)


def test_of_ranks_the_one_that_leads_finds_out_for_the_next_program(
    ranks: list[Session], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    leader, other = ranks
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0})
    measured, followed = pair_of_rank(leader), pair_of_rank(other)
    assert run(*measured)[-1] == (["launched"], ["launched"])
    wait_for(other, followed)
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 50.0})

    for each, models in ((leader, measured), (other, followed)):
        assert look(each, models, FIRST)[-1] == (["launched"], ["launched"])

    assert [each.report.counts["retried"] for each in ranks] == [2, 0]
    assert run(*pair_of_rank(Session(leader.locations)), 3)[-1] == (["captured"], ["captured"])
    look(leader, measured, FIRST)
    assert leader.report.counts["retried"] == 2, "it runs as all do: it was not changed"


def test_nothing_is_begun_when_the_session_has_ended(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    look(session, pair, FIRST - 1)
    session.drift.look()

    session.close()

    assert run(*pair, MORE)[-1] == (["launched"], ["launched"])
    expect(session, retried=0, measured=2)
