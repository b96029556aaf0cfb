"""What runs is measured anew in its turn, and what is good is not given up for noise, nor decided by halves."""

# ruff: noqa: F811 - fixtures of another file
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraphd.client import aligning, checking, policy, region, retrials, workspaces
from pygraphd.client.plan import Plan
from pygraphd.client.retrials import FIRST
from pygraphd.client.session import Session
from pygraphd.client.timeline import Entry
from pygraphd.client.turns import MAX_ROUNDS
from pygraphd.schema.messages import Deployment, Graph, Kind
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
)

pytestmark = pytest.mark.torch

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH
MORE = 160
"""Calls that end measuring anew."""
Of = dict[Kind, dict[Deployment, float]]


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


@pytest.fixture
def of_each(monkeypatch: pytest.MonkeyPatch) -> Of:
    """Return the times of graphs that are measured, by kind; of kinds that are not there, they are the clock's."""
    times_us: Of = {}
    made = region.Region.__init__

    def init(self: Any, graph: Graph, *rest: Any, **more: Any) -> None:
        made(self, graph, *rest, **more)
        self._profiler.times_us = times_us.get(graph.kind, Clock.times_us)

    monkeypatch.setattr(region.Region, "__init__", init)
    return times_us


@pytest.fixture
def looks_find_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing be measured anew but in its turn."""
    monkeypatch.setattr(checking.Checked, "_judge", lambda self: self._found(holds=True))


@pytest.fixture
def for_its_backward(
    relocating: list[Relocating],
    monkeypatch: pytest.MonkeyPatch,
    of_each: Of,
    looks_find_nothing: None,
) -> Of:
    """Have a forward lose in trees less than its backward gains there."""
    of_each[Kind.FORWARD] = {KERNELS: 50.0, TREES: 60.0, GRAPH: 190.0}
    of_each[Kind.BACKWARD] = {KERNELS: 100.0, TREES: 70.0, GRAPH: 190.0}
    monkeypatch.setattr(Clock, "span_us", 20.0)
    return of_each


def test_a_capture_that_has_become_faster_is_found_though_launches_cost_what_they_did(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 60.0})

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
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0})
    pair, counts = decided(session, "launched"), session.report.counts
    rounds = []

    for number in range(1, 20):
        before = counts["retried"]
        assert look(session, pair)[-1] == (["launched"], ["launched"])
        if counts["retried"] > before:
            rounds.append(number)

    assert rounds == [FIRST, 3 * FIRST]
    expect(session, rechecked=2 * 19, drifted=0, retried=4, measured=6, recorded=0, spooled=6)
    assert session.report.summary()["deployed"] == {"KERNELS": 2, "TREES": 0, "GRAPH": 0}
    assert len(session.report.summary()["decisions"]) == 2


def test_what_has_changed_is_soon_measured_anew_once_more(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    """It may have been a mistake."""
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0, GRAPH: 120.0})
    pair, counts, rounds = decided(session, "launched"), session.report.counts, []

    for number in range(1, 5 * FIRST):
        if number == 2 * FIRST:
            monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0, GRAPH: 50.0})
        before = counts["retried"]
        look(session, pair)
        if counts["retried"] > before:
            rounds.append(number)

    assert run(*pair, 1) == [(["relocated"], ["relocated"])]
    assert rounds == [FIRST, 3 * FIRST, 4 * FIRST]
    expect(session, drifted=0)


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
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 60.0, TREES: 50.0, GRAPH: 90.0})
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
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None, for_its_backward: Of
) -> None:
    pair = decided(session)
    look(session, pair, FIRST - 1)
    made = region.Region.__init__

    def init(self: Any, graph: Graph, *rest: Any, **more: Any) -> None:
        made(self, graph, *rest, **more)
        if graph.kind is Kind.BACKWARD:
            self._profiler = Noisy(self._device, self._host.timeline)
            self._profiler.times_us = for_its_backward[Kind.BACKWARD]

    monkeypatch.setattr(region.Region, "__init__", init)

    assert look(session, pair)[-1] == (["captured"], ["captured"])

    expect(session, retried=2, drifted=0)


def test_what_has_drifted_is_launched_if_it_is_too_noisy_to_tell(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in doubt."""
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 60.0, TREES: 50.0})
    pair = decided(session)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 90.0, TREES: 80.0})
    monkeypatch.setattr(region, "Profiler", Noisy)

    assert look(session, pair)[-1] == (["launched"], ["launched"])

    expect(session, retried=0, drifted=2)


def test_a_half_that_is_not_where_it_is_called_is_waited_for(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    """As in validation, where nothing calls the backward."""
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0, GRAPH: 190.0})
    pair, alone = decided(session), torch.ones(1)
    look(session, pair, FIRST - 1)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0, GRAPH: 30.0})

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
    session: Session, affordable: None, for_its_backward: Of
) -> None:
    """In a program that never calls that: it may have been chosen for what the backward gains."""
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
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0, GRAPH: 190.0})
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
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0, GRAPH: 120.0})
    pair, x = decided(session, "launched"), torch.ones(1)
    look(session, pair, FIRST - 1)
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 60.0, GRAPH: 190.0})
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
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0, GRAPH: 190.0})
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
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 50.0, GRAPH: 190.0})
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


def test_what_cannot_be_asked_is_looked_at_all_the_same(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    look(session, pair, FIRST - 1)
    with monkeypatch.context() as broken:
        broken.setattr(Session, "may_try_trees", lambda self: 1 / 0)
        look(session, pair)
    assert session.report.failures["measuring anew: ZeroDivisionError"] == 1
    assert session.report.counts["rechecked"] == 2 * FIRST

    look(session, pair)

    assert session.report.counts["retried"] == 2


def test_what_there_is_no_memory_to_measure_anew_runs_and_is_looked_at_as_before(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 60.0})
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
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0})
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


def test_nothing_is_begun_when_the_session_has_ended(
    session: Session, monkeypatch: pytest.MonkeyPatch, affordable: None
) -> None:
    monkeypatch.setattr(Clock, "times_us", {KERNELS: 100.0, TREES: 120.0})
    pair = decided(session, "launched")
    look(session, pair, FIRST - 1)
    session.drift.look()

    session.close()

    assert run(*pair, MORE)[-1] == (["launched"], ["launched"])
    expect(session, retried=0, measured=2)
