"""What runs is measured anew in its turn, beside what it was chosen over: seldom, at a bounded cost, and what is good is not given up for noise."""

# ruff: noqa: F811 - fixtures of another file
from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client import aligning, checking, claims, options, policy, region, retrials, workspaces
from pygraphd.client.cache import Cache
from pygraphd.client.candidates import Candidates
from pygraphd.client.drift import Drift
from pygraphd.client.plan import Plan
from pygraphd.client.region import Before, Decided
from pygraphd.client.report import Report
from pygraphd.client.retrials import FIRST, SHARE, Retrials
from pygraphd.client.session import Session
from pygraphd.client.timeline import Entry
from pygraphd.client.turns import MAX_ROUNDS
from pygraphd.schema.messages import Decision, Deployment, Graph, Kind, LeaseAnswer
from pygraphd.schema.policy import NO_GAIN, POLICY_VERSION
from tests.client.test_looking import decided, expect
from tests.client.test_plan import (  # noqa: F401
    Clock,
    Compiled,
    Relocating,
    compile_once,
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
    from collections.abc import Callable, Sequence

    from pygraphd.client.region import Region
    from pygraphd.schema.keys import Environment

pytestmark = pytest.mark.torch

LAUNCH, TREES, RELOCATE = Deployment.LAUNCH, Deployment.TREES, Deployment.RELOCATE
MORE = 160
"""Calls that end measuring anew."""


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


@pytest.fixture
def affordable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take measuring to cost next to nothing: programs of tests have run for milliseconds."""
    monkeypatch.setattr(retrials, "SHARE", 1e9)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no process begin later than others."""
    monkeypatch.setattr(retrials, "stagger", lambda: 0)


def look(session: Session, models: tuple[Compiled, Compiled], times: int = 1) -> list[tuple[Any, Any]]:
    """Return what steps did after each of so many looks at one model."""
    steps = []
    for _ in range(times):
        session.drift.look()
        steps += run(*models, MORE)
    return steps


# --- when ---


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
    later, pair = beside_relocated(session, monkeypatch)
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 20.0, RELOCATE: 80.0})
    monkeypatch.setattr(Clock, "span_us", 20.0)  # not so clearly that trees would not be tried
    monkeypatch.setattr(checking.Checked, "_judge", lambda self: self._found(holds=True))

    steps = look(later, pair, FIRST)

    assert (["captured"], ["captured"]) not in steps
    assert steps[-1] == (["relocated"], ["relocated"])
    expect(later, retried=2, measured=2)
    told = compile_pair(Session(session.locations))
    assert run(*told, 1) == [(["relocated"], ["relocated"])]


def beside_relocated(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> tuple[Session, tuple[Compiled, Compiled]]:
    """Return a program that has looked a launched pair up, and has relocated graphs, and no trees."""
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0, RELOCATE: 120.0})
    decided(session, "launched")
    later = Session(session.locations)
    later.has_relocated = True
    pair = compile_pair(later)
    assert run(*pair, 1) == [(["launched"], ["launched"])]
    return later, pair


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
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    later, pair = beside_relocated(session, monkeypatch)
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 40.0, RELOCATE: 70.0})
    monkeypatch.setattr(Clock, "span_us", 20.0)
    monkeypatch.setattr(checking.Checked, "_judge", lambda self: self._found(holds=True))
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
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    look(session, pair, FIRST - 1)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(options.REFRESH, "1")
        elsewhere.setattr(Clock, "times_us", {LAUNCH: 200.0, TREES: 240.0})
        decided(Session(session.locations), "launched")
    session.cache._spooled.clear()  # a daemon would tell
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 60.0})

    assert look(session, pair)[-1] == (["captured"], ["captured"])

    expect(session, retried=2, measured=4, spooled=4)


def test_trees_are_not_tried_beside_the_relocated_half_of_the_family(
    session: Session,
    relocating: list[Relocating],
    monkeypatch: pytest.MonkeyPatch,
    affordable: None,
    of_each: dict[Kind, dict[Deployment, float]],
) -> None:
    of_each[Kind.FORWARD] = {LAUNCH: 100.0, TREES: 120.0, RELOCATE: 20.0}
    of_each[Kind.BACKWARD] = {LAUNCH: 100.0, TREES: 120.0, RELOCATE: 120.0}
    monkeypatch.setattr(checking.Checked, "_judge", lambda self: self._found(holds=True))
    assert run(*compile_pair(session), MORE)[-1] == (["relocated"], ["launched"])
    later = Session(session.locations)
    pair = compile_pair(later)

    steps = look(later, pair, FIRST)

    expect(later, retried=2, drifted=0)
    assert not any("captured" in ahead + behind for ahead, behind in steps)


@pytest.fixture
def of_each(monkeypatch: pytest.MonkeyPatch) -> dict[Kind, dict[Deployment, float]]:
    """Return the times of graphs that are measured, by kind; of kinds that are not there, they are the clock's."""
    times_us: dict[Kind, dict[Deployment, float]] = {}
    made = region.Region.__init__

    def init(self: Any, graph: Graph, *rest: Any, **more: Any) -> None:
        made(self, graph, *rest, **more)
        self._profiler.times_us = times_us.get(graph.kind, Clock.times_us)

    monkeypatch.setattr(region.Region, "__init__", init)
    return times_us


class Noisy(Clock):
    """A clock whose samples are so far apart that nothing can be told, though their medians are right."""

    FACTORS = (0.6, 1.4, 0.7, 1.3, 0.8, 1.2, 1.0, 1.0)

    def stop(self, call: Any, *, steady: bool = True) -> None:
        deployment, fair, part = call
        samples = self._samples.setdefault(deployment, [])
        time = self.times_us[deployment] * self.FACTORS[len(samples) % len(self.FACTORS)]
        span = self.span_us or time
        if fair:
            samples.append(
                Entry(
                    id(self), deployment, fair, idle=True, began_us=0.0, host_us=time, span_us=span, part=part
                )
            )


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
    assert {(each["source"], each["because"]) for each in summary["decisions"]} == {("measured", "")}
    assert session.report.counts["spooled"] == 4, "that it is over is told to who lends turns"
    told = compile_pair(Session(session.locations))
    assert run(*told, 1) == [(["captured"], ["captured"])]
    monkeypatch.setattr(region, "Profiler", Clock)
    look(session, pair)
    expect(session, rechecked=2 * FIRST + 2, drifted=0, retried=2)


def test_a_forward_that_is_in_trees_for_its_backward_is_not_given_up_for_noise(
    session: Session,
    relocating: list[Relocating],
    monkeypatch: pytest.MonkeyPatch,
    affordable: None,
    of_each: dict[Kind, dict[Deployment, float]],
) -> None:
    of_each[Kind.FORWARD] = {LAUNCH: 50.0, TREES: 60.0, RELOCATE: 190.0}
    of_each[Kind.BACKWARD] = {LAUNCH: 100.0, TREES: 70.0, RELOCATE: 190.0}
    monkeypatch.setattr(Clock, "span_us", 20.0)
    monkeypatch.setattr(checking.Checked, "_judge", lambda self: self._found(holds=True))
    pair = decided(session)
    look(session, pair, FIRST - 1)
    made = region.Region.__init__

    def init(self: Any, graph: Graph, *rest: Any, **more: Any) -> None:
        made(self, graph, *rest, **more)
        if graph.kind is Kind.BACKWARD:
            self._profiler = Noisy(self._device, self._host.timeline)
            self._profiler.times_us = of_each[Kind.BACKWARD]

    monkeypatch.setattr(region.Region, "__init__", init)

    assert look(session, pair)[-1] == (["captured"], ["captured"])

    expect(session, retried=2, drifted=0)


def test_what_has_drifted_is_launched_if_it_is_too_noisy_to_tell(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in doubt."""
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 60.0, TREES: 50.0})
    pair = decided(session)
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 90.0, TREES: 80.0})
    monkeypatch.setattr(region, "Profiler", Noisy)

    assert look(session, pair)[-1] == (["launched"], ["launched"])

    expect(session, retried=0, drifted=2)


def leasing_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the daemon say that another process measures whatever is asked for."""

    def lease(self: Cache, environment: Environment, graphs: Sequence[str]) -> LeaseAnswer:
        return LeaseAnswer(environment.digest(), "1", (), 60.0)

    monkeypatch.setattr(Cache, "lease", lease)


def test_what_runs_well_is_not_launched_while_another_process_measures_it(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 50.0, RELOCATE: 190.0})
    pair = decided(session)
    look(session, pair, FIRST - 1)
    leasing_to_others(monkeypatch)
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 50.0, RELOCATE: 30.0})

    assert look(session, pair)[-1] == (["relocated"], ["relocated"])

    expect(session, retried=2, measured=4, drifted=0)


def test_what_has_drifted_waits_for_another_process(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = decided(session)
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 300.0, TREES: 200.0})
    leasing_to_others(monkeypatch)

    assert look(session, pair)[-1] == (["launched"], ["launched"])

    expect(session, drifted=2, waited=2, measured=2)


def test_an_answer_that_another_process_has_found_is_taken_up_without_measuring(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    look(session, pair, FIRST - 1)
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 60.0})
    with monkeypatch.context() as refreshing:
        refreshing.setenv(options.REFRESH, "1")
        decided(Session(session.locations))
    session.cache._spooled.clear()  # a daemon would tell
    monkeypatch.setattr(Session, "turn", looking_up)

    assert look(session, pair)[-1] == (["captured"], ["captured"])

    expect(session, retried=2, adopted=2, measured=2)
    assert sources(session) == {("TREES", "cache")}
    assert len(session.drift._looks) == 2


def test_a_half_that_is_not_where_it_is_called_is_waited_for(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    """As in validation, where nothing calls the backward."""
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 50.0, RELOCATE: 190.0})
    pair, alone = decided(session), torch.ones(1)
    look(session, pair, FIRST - 1)
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 50.0, RELOCATE: 30.0})

    for _ in range(2):
        session.drift.look()
        results = [pair[0].current_callable([alone]) for _ in range(1000)]
        assert results[-1] == ["captured"]
        expect(session, retried=0, measured=2)

    assert run(*pair, MAX_ROUNDS + MORE)[-1] == (["captured"], ["captured"]), "the half of a look ends"
    assert look(session, pair, FIRST - 2)[-1] == (["captured"], ["captured"])
    assert look(session, pair)[-1] == (["relocated"], ["relocated"])
    expect(session, retried=2, drifted=0, measured=4)


def test_a_forward_in_trees_is_not_decided_without_its_backward(
    session: Session,
    relocating: list[Relocating],
    monkeypatch: pytest.MonkeyPatch,
    affordable: None,
    of_each: dict[Kind, dict[Deployment, float]],
) -> None:
    """In a program that never calls that: it may have been chosen for what the backward gains."""
    of_each[Kind.FORWARD] = {LAUNCH: 50.0, TREES: 60.0, RELOCATE: 190.0}
    of_each[Kind.BACKWARD] = {LAUNCH: 100.0, TREES: 70.0, RELOCATE: 190.0}
    monkeypatch.setattr(Clock, "span_us", 20.0)
    monkeypatch.setattr(checking.Checked, "_judge", lambda self: self._found(holds=True))
    decided(session)
    later, x = Session(session.locations), torch.ones(1)
    forward = compile_once(later, 1, backward=False, box=SimpleNamespace(value=0))

    for _ in range(FIRST):
        later.drift.look()
        results = [forward.current_callable([x]) for _ in range(MORE)]

    assert results[-1] == ["captured"]
    assert later.report.summary()["reasons"] == {policy.AS_BEFORE: 1}
    assert run(*compile_pair(Session(session.locations)), 1) == [(["captured"], ["captured"])]
    assert len(later.drift._looks) == 1


def test_if_a_half_cannot_be_looked_at_the_other_is_not_measured_alone(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 50.0, RELOCATE: 190.0})
    pair = decided(session)
    look(session, pair, FIRST - 1)
    looked = Plan._looked

    def fail(self: Plan, graph: Graph, *rest: Any) -> Any:
        if graph.kind is Kind.BACKWARD:
            raise MemoryError
        return looked(self, graph, *rest)

    monkeypatch.setattr(Plan, "_looked", fail)

    assert look(session, pair)[-1] == (["captured"], ["captured"])

    assert session.report.counts["retried"] == 0
    assert session.report.failures["looking again: MemoryError"] == 1


def test_a_half_that_settles_when_the_other_has_changed_is_looked_at_again(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0, RELOCATE: 120.0})
    pair, x = decided(session, "launched"), torch.ones(1)
    look(session, pair, FIRST - 1)
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 60.0, RELOCATE: 190.0})
    pair[0].current_callable([x])
    session.drift.look()  # between a forward and its backward
    pair[1].current_callable([x])
    for _ in range(2 * MORE):
        pair[0].current_callable([x])

    assert run(*pair, 2 * MORE)[-1] == (["captured"], ["captured"])

    expect(session, retried=2, measured=4)
    assert len(session.drift._looks) == 2


def test_what_cannot_be_made_anew_runs_and_is_looked_at_as_before(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 50.0, RELOCATE: 190.0})
    pair = decided(session)
    look(session, pair, FIRST - 1)
    with monkeypatch.context() as broken:
        broken.setattr(Session, "relocatable", lambda *_: 1 / 0)
        assert look(session, pair)[-1] == (["captured"], ["captured"])

    assert session.report.failures["checking: ZeroDivisionError"] == 2
    assert session.report.counts["retried"] == 0
    assert session.report.summary()["deployed"]["TREES"] == 2
    assert len(session.drift._looks) == 2


def test_inputs_are_copied_before_what_is_measured_anew_is_launched(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    """A call of the program's may come while the look is put in place by a thread of ours."""
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 50.0, RELOCATE: 190.0})
    compiled, x = compile_once(session, 1, backward=False, box=SimpleNamespace(value=0)), torch.ones(1)
    for _ in range(FIRST):
        for _ in range(MORE):
            compiled.current_callable([x])
        assert compiled.current_callable == compiled.call
        begin_look, results = aligning.Alignment.begin_look, []

        def meanwhile(self: Any, which: Any) -> None:
            results.append(compiled.current_callable([x]))  # noqa: B023
            begin_look(self, which)  # noqa: B023

        with monkeypatch.context() as racing:
            racing.setattr(aligning.Alignment, "begin_look", meanwhile)
            session.drift.look()
        assert results == [["captured"]]
    compiled.current_callable([x])
    expect(session, retried=1)


@pytest.fixture
def refused_for_now(relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have there be no room to relocate any graph."""
    made = Relocating.__init__

    def refuse(self: Relocating, refusal: str | None) -> None:
        made(self, "no room")
        self.for_good = False

    monkeypatch.setattr(Relocating, "__init__", refuse)


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


def test_what_cannot_be_asked_is_looked_at_all_the_same(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    look(session, pair, FIRST - 1)
    with monkeypatch.context() as broken:
        broken.setattr(Session, "may_try_trees", lambda self: 1 / 0)
        look(session, pair)
    assert session.report.failures["measuring anew: ZeroDivisionError"] == 1
    assert session.report.counts["rechecked"] == 2 * FIRST

    look(session, pair)

    assert session.report.counts["retried"] == 2


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
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 100.0, TREES: 50.0, RELOCATE: 190.0})
    decided(session)
    later = Session(session.locations)
    before = later.trees_have_run

    run(*compile_pair(later), 1)

    assert (before, later.trees_have_run, later.has_relocated) == (False, True, False)


def test_what_cannot_be_made_anew_is_no_rival() -> None:
    launched = Candidates(print, None, 0, is_backward=False)

    assert not launched.has_rivals(LAUNCH, may_relocate=True, may_try_trees=True)


def test_what_has_drifted_is_held_against_all_there_is(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    later, pair = beside_relocated(session, monkeypatch)
    monkeypatch.setattr(Clock, "times_us", {LAUNCH: 300.0, TREES: 20.0, RELOCATE: 250.0})
    monkeypatch.setattr(Clock, "span_us", 20.0)

    assert look(later, pair)[-1] == (["captured"], ["captured"])


def test_what_was_not_in_doubt_stays_unless_enough_is_known() -> None:
    graph, doubted = Graph("a" * 64, Kind.INFERENCE, 0, 1, 1), Before(TREES, None)
    before = Before(TREES, None, may_stay=True)
    same = Decided(graph, Decision(TREES, "TREES is faster", POLICY_VERSION))
    launch = Decided(graph, Decision(LAUNCH, NO_GAIN, POLICY_VERSION))
    provisional = Decided(graph, policy.not_measured("refused for now", 1), provisional=True)

    assert before.why_stay(same) is before.why_stay(launch) is doubted.why_stay(launch) is None
    assert before.why_stay(provisional) == policy.AS_BEFORE
    assert doubted.why_stay(provisional) is None
    assert Before(LAUNCH, None, may_stay=True, is_partial=True).why_stay(launch) == policy.UNBEATEN


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
    monkeypatch.setattr(Session, "turn", looking_up)
    look(leader, measured, FIRST)
    assert leader.report.counts["retried"] == 4
    assert len(leader.drift._looks) == 2, "it still is when what the cache says is not what all run"


def looking_up(self: Session, region: Region) -> Any:
    """Say whose turn it is as with a daemon, which is asked for the answer of others first."""
    return self._claims.look_up(self._watched[id(region.tally)].interest) or claims.Turn.OURS


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
