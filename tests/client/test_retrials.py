"""When what runs is measured anew although nothing was found against it: seldom, at a bounded cost, all of a family or none."""

# ruff: noqa: F811 - fixtures of another file
from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pygraphd.client import checking, policy, retrials
from pygraphd.client.candidates import Candidates
from pygraphd.client.drift import Drift
from pygraphd.client.region import Before, Decided
from pygraphd.client.report import Report
from pygraphd.client.retrials import FIRST, SHARE, Retrials
from pygraphd.schema.messages import Decision, Deployment, Graph, Kind
from pygraphd.schema.policy import NO_GAIN, POLICY_VERSION
from tests.client.test_measured_anew import affordable, at_once  # noqa: F401

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


pytestmark = pytest.mark.torch

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH


def yes() -> bool:
    return True


def begin(scheduled: Retrials, family: int, number: int, *have_rivals: Callable[[], bool]) -> bool:
    """Measure a family anew if it is its turn."""
    is_due = scheduled.is_due(family, number, have_rivals or [yes])
    if is_due:
        for _ in ("forward", "backward"):
            scheduled.begun(family, number)
    return is_due


def begun(scheduled: Retrials, rounds: range, families: Sequence[int] = (1,)) -> list[tuple[int, int]]:
    """Return the families that are measured anew, each with its round."""
    return [(number, family) for number in rounds for family in families if begin(scheduled, family, number)]


def test_the_sixth_look_measures_anew_and_then_one_after_twice_as_many(affordable: None) -> None:
    assert begun(Retrials(Report()), range(1, 100)) == [(6, 1), (18, 1), (42, 1), (90, 1)]


def test_one_family_in_a_round_is(affordable: None) -> None:
    assert begun(Retrials(Report()), range(1, 10), (1, 2, 3)) == [(6, 1), (7, 2), (8, 3)]


def test_what_has_changed_is_measured_anew_after_six_looks_again(affordable: None) -> None:
    scheduled = Retrials(Report())
    assert begun(scheduled, range(1, 7)) == [(6, 1)]

    scheduled.changed(1)

    assert begun(scheduled, range(7, 40)) == [(12, 1), (24, 1)]


def test_what_is_not_begun_with_is_due_six_rounds_later_and_keeps_nobody_from_its_turn(
    affordable: None,
) -> None:
    scheduled = Retrials(Report())
    due, others = [], []

    for number in range(1, 22):
        due += [number] * scheduled.is_due(1, number, [yes])
        others += [number] * begin(scheduled, 2, number)

    assert due == [6, 12, 18]
    assert others == [7, 19]


def test_a_half_may_be_begun_with_when_the_other_has_changed_already(affordable: None) -> None:
    scheduled = Retrials(Report())
    assert begun(scheduled, range(1, 7)) == [(6, 1)]

    scheduled.changed(1)
    scheduled.begun(1, 7)

    assert begun(scheduled, range(8, 20)) == [(13, 1)]


def test_processes_that_began_together_measure_apart(
    affordable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(retrials, "SHARE", 1e9)
    first = []
    for process in range(100, 106):
        monkeypatch.setattr("os.getpid", lambda process=process: process)
        first += begun(Retrials(Report()), range(1, 12))
    assert sorted(first) == [(number, 1) for number in range(6, 12)]


def test_one_graph_of_a_family_that_has_rivals_is_enough(affordable: None) -> None:
    assert begin(Retrials(Report()), 1, 1, lambda: False, yes) is False
    scheduled = Retrials(Report())
    rounds = [number for number in range(1, 10) if begin(scheduled, 1, number, lambda: False, yes)]
    assert rounds == [6]


def test_without_rivals_nothing_is_and_that_is_asked_when_it_is_due(affordable: None) -> None:
    scheduled, asked = Retrials(Report()), []

    def has_rivals() -> bool:
        asked.append(True)
        return len(asked) > 3

    rounds = [number for number in range(1, 20) if begin(scheduled, 1, number, has_rivals)]

    assert rounds == [9]
    assert len(asked) == 4


def test_measuring_takes_a_bounded_share_of_the_time() -> None:
    report, now_s = Report(), 5_000.0  # of the machine; the program begins now
    scheduled = Retrials(report, lambda: now_s)
    report.measuring_ms, rounds = 500.0, []

    for number in range(1, 200):
        now_s += 600.0
        if begin(scheduled, 1, number):
            rounds.append(number)
            assert report.measuring_ms <= SHARE * 1e3 * 600.0 * number
            report.measuring_ms += 7_000.0  # of a program with many graphs

    # Half a second is affordable at the sixth look, and 7.5 are after 15,000 s; then what doubles each time is seldom enough.
    assert rounds == [6, 25, 49, 97, 193]


def test_a_rival_of_another_family_is_none(affordable: None) -> None:
    drift, juries = Drift(3600.0, Report()), []

    def see(number: int, jury: checking.Jury) -> None:
        jury.join(number)
        jury.came(number)
        juries.append((number, jury))

    drift.add(1, see, lambda: False)
    drift.add(2, see, yes)
    for _ in range(FIRST):
        drift.look()
    drift.close()

    assert [number for number, jury in juries if jury.is_retrial] == [1]


def test_all_of_a_family_are_measured_anew_once_all_have_come_or_none_is() -> None:
    def jury(*, spoil: str = "", came: Sequence[int] = (1, 2)) -> checking.Jury:
        made = checking.Jury()
        made.join(1)
        made.join(2)
        if spoil == "before":
            made.withdrew(1)
        if spoil == "found":
            made.found(1, holds=False)
        made.retry()
        if spoil == "after":
            made.withdrew(1)
        for each in came:
            made.came(each)
        return made

    assert jury().verdict() is False
    assert jury().is_retrial
    assert jury(came=[1]).verdict() is None
    assert jury(spoil="before").verdict() is None
    assert jury(spoil="after").verdict() is None
    assert not jury(spoil="found").is_retrial
    settled = jury()
    settled.verdict()
    settled.withdrew(2)
    assert settled.is_retrial, "it was begun with"


def test_what_cannot_be_made_anew_is_no_rival() -> None:
    launched = Candidates(print, None, 0, is_backward=False)

    assert not launched.has_rivals(KERNELS, may_relocate=True, may_try_trees=True)


def test_what_was_not_in_doubt_stays_unless_enough_is_known() -> None:
    graph, doubted = Graph("a" * 64, Kind.INFERENCE, 0, 1, 1), Before(TREES, None)
    before = Before(TREES, None, may_stay=True)
    same = Decided(graph, Decision(TREES, "TREES is faster", POLICY_VERSION))
    launch = Decided(graph, Decision(KERNELS, NO_GAIN, POLICY_VERSION))
    provisional = Decided(graph, policy.not_measured("refused for now", 1), provisional=True)

    assert before.why_stay(same) is before.why_stay(launch) is doubted.why_stay(launch) is None
    assert before.why_stay(provisional) == policy.AS_BEFORE
    assert doubted.why_stay(provisional) is None
    assert Before(KERNELS, None, may_stay=True, is_partial=True).why_stay(launch) == policy.UNBEATEN
