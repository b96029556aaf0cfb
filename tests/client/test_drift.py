"""Deployed graphs that are looked at again: what has changed is measured anew, all else goes on as it was."""

# ruff: noqa: F811 - fixtures of another file
from __future__ import annotations

import gc
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pygraphd.client import checking, options, region
from pygraphd.client import policy as client_policy
from pygraphd.client.costs import Cost
from pygraphd.client.session import Session
from pygraphd.schema import policy
from pygraphd.schema.messages import Deployment
from tests.client.test_plan import (  # noqa: F401
    ENOUGH,
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

MORE = 160
"""Calls that end a look that is in doubt, and measuring anew."""


def compiled_and_decided(session: Session) -> tuple[Compiled, Compiled]:
    forward, backward = compile_pair(session)
    assert run(forward, backward, MORE)[-1] == (["captured"], ["captured"])
    return forward, backward


def slots(*all_compiled: Compiled) -> list[Any]:
    return [slot for compiled in all_compiled for slot in compiled.compiled_fn_runner.partitions]


def test_what_costs_what_it_did_is_timed_on_a_few_calls_and_stays(session: Session) -> None:
    forward, backward = compiled_and_decided(session)
    before = slots(forward, backward)

    session.drift.look()

    assert all(isinstance(slot, checking.Checked) for slot in slots(forward, backward))
    session.drift.look()  # what is being timed is not looked at once more
    assert run(forward, backward)[-1] == (["captured"], ["captured"])
    assert slots(forward, backward) == before
    counts = session.report.counts
    assert (counts["rechecked"], counts["drifted"], counts["measured"]) == (2, 0, 2)


def test_a_half_that_is_still_being_timed_holds_up_nobody(session: Session) -> None:
    forward, backward = compiled_and_decided(session)
    session.drift.look()
    for _ in range(ENOUGH):
        forward.current_callable([torch.ones(1)])  # without a backward

    session.drift.look()

    assert session.report.counts["rechecked"] == 2
    assert run(forward, backward)[-1] == (["captured"], ["captured"])
    assert not any(isinstance(slot, checking.Checked) for slot in slots(forward, backward))


def test_what_was_looked_up_is_looked_at_again_too(session: Session) -> None:
    compiled_and_decided(session)
    second = Session(session.locations)
    pair = compile_pair(second)

    second.drift.look()

    assert second.report.counts["rechecked"] == 2
    assert run(*pair)[-1] == (["captured"], ["captured"])


def test_a_pair_that_has_become_slower_is_measured_anew_and_others_are_told(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = compiled_and_decided(session)
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.TREES: 140.0})

    session.drift.look()

    assert run(forward, backward, MORE)[-1] == (["launched"], ["launched"])
    summary = session.report.summary()
    assert (summary["rechecked"], summary["drifted"], summary["measured"]) == (2, 2, 4)
    assert summary["deployed"] == {"KERNELS": 2, "TREES": 0, "GRAPH": 0}
    assert summary["reasons"] == {policy.NO_GAIN: 2}
    assert len(summary["decisions"]) == 2
    assert not any(isinstance(slot, region.Region | checking.Checked) for slot in slots(forward, backward))
    later = compile_pair(Session(session.locations))
    assert run(*later, 1) == [(["launched"], ["launched"])]

    for _ in range(2):
        session.drift.look()  # in the second round from now, at what has been found

    assert run(forward, backward, MORE)[-1] == (["launched"], ["launched"])
    assert (session.report.counts["rechecked"], session.report.counts["drifted"]) == (4, 2)


QUICK_ON_THE_HOST = {Deployment.KERNELS: 500.0, Deployment.TREES: 17.0}
BUSY_ON_THE_GPU = {Deployment.KERNELS: 500.0, Deployment.TREES: 411.0}


@pytest.mark.parametrize(
    ("host_us", "span_us", "drifts"),
    [
        (17.0, 4000.0, True),
        (17.0, 200.0, True),
        (600.0, 600.0, True),
        (17.0, 425.0, False),
        (60.0, 411.0, False),
    ],
)
def test_a_gpu_that_has_become_slower_is_seen_behind_a_host_that_has_not(
    session: Session, monkeypatch: pytest.MonkeyPatch, host_us: float, span_us: float, drifts: bool
) -> None:
    monkeypatch.setattr(Clock, "times_us", QUICK_ON_THE_HOST)
    monkeypatch.setattr(Clock, "spans_us", BUSY_ON_THE_GPU)
    pair = compiled_and_decided(session)
    later = Session(session.locations)
    told = compile_pair(later)
    monkeypatch.setattr(Clock, "times_us", {**QUICK_ON_THE_HOST, Deployment.TREES: host_us})
    monkeypatch.setattr(Clock, "spans_us", {**BUSY_ON_THE_GPU, Deployment.TREES: span_us})

    for each, both in ((session, pair), (later, told)):
        each.drift.look()
        run(*both, MORE)

        assert (each.report.counts["rechecked"], each.report.counts["drifted"]) == (2, 2 * drifts)


def test_costs_that_go_up_and_down_are_measured_anew_less_and_less_often(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = compiled_and_decided(session)
    rounds: list[int] = []

    for number in range(1, 32):
        drifted = session.report.counts["drifted"]
        factor = 1.5 if len(rounds) % 2 == 0 else 1.0
        times = {Deployment.KERNELS: 100.0 * factor, Deployment.TREES: 50.0 * factor}
        monkeypatch.setattr(Clock, "times_us", times)
        session.drift.look()
        run(*pair, MORE)
        if session.report.counts["drifted"] > drifted:
            rounds.append(number)

    assert rounds == [1, 3, 7, 15, 31]
    assert session.report.counts["drifted"] == 2 * len(rounds)


def test_what_the_trees_had_taken_over_is_put_in_place_and_taken_away_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a part may be launched, misaligned inputs are copied."""
    compiled = compile_once(session, 2, backward=False, box=SimpleNamespace(value=0))
    for _ in range(MORE):
        compiled.current_callable([torch.ones(1)])
    assert compiled.current_callable == compiled.call
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.TREES: 70.0})
    session.drift.look()
    wrapped = []

    for _ in range(MORE):
        compiled.current_callable([torch.ones(1)])
        wrapped.append(compiled.current_callable != compiled.call)

    assert session.report.counts["drifted"] == 2
    assert True in wrapped
    assert compiled.current_callable == compiled.call
    assert session.report.summary()["deployed"]["TREES"] == 2


def test_what_was_given_back_is_made_anew_to_be_measured(
    session: Session, relocating: list[Relocating], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Clock, "times_us", {**Clock.times_us, Deployment.GRAPH: 500.0})
    forward, backward = compiled_and_decided(session)
    assert [each.closed for each in relocating] == [True, True]
    monkeypatch.setattr(
        Clock, "times_us", {**Clock.times_us, Deployment.TREES: 600.0, Deployment.GRAPH: 40.0}
    )

    session.drift.look()

    assert run(forward, backward, 2 * MORE)[-1] == (["relocated"], ["relocated"])
    assert [each.closed for each in relocating] == [True, True, False, False]


def test_a_model_that_is_gone_is_not_looked_at(session: Session) -> None:
    pair = compiled_and_decided(session)
    gone = [weakref.ref(each) for each in pair]
    assert len(session.drift._looks) == 2

    del pair
    gc.collect()

    assert [each() for each in gone] == [None, None]
    assert session.drift._looks == {}


def test_nothing_is_looked_at_where_that_is_not_wanted(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(options.RECHECK, "0")
    without = Session(session.locations)
    pair = compiled_and_decided(without)

    without.drift.look()

    assert not any(isinstance(slot, checking.Checked) for slot in slots(*pair))
    assert without.drift._thread is None


def test_the_thread_looks_by_itself_and_ends_with_the_session(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(options.RECHECK, "0.01")
    looking = Session(session.locations)
    pair = compiled_and_decided(looking)
    thread = looking.drift._thread
    assert thread is not None
    deadline = time.monotonic() + 10
    while not looking.report.counts["rechecked"] and time.monotonic() < deadline:
        run(*pair, 1)
        time.sleep(0.01)

    looking.close()
    thread.join(10)

    assert looking.report.counts["rechecked"] > 0
    assert not thread.is_alive()


def test_an_error_in_looking_is_counted_and_not_repeated(session: Session) -> None:
    def broken(number: int, jury: checking.Jury) -> None:
        raise ValueError(number)

    session.drift.add(0, broken)

    session.drift.look()
    session.drift.look()

    assert session.report.failures["looking again: ValueError"] == 1
    session.drift.close()


def test_what_cannot_be_measured_anew_runs_on_as_before(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = compiled_and_decided(session)
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 1000.0, Deployment.TREES: 65.0})
    monkeypatch.setattr(region.Region, "_why_not_measure", lambda self: client_policy.NO_MEMORY)

    session.drift.look()

    assert run(forward, backward, MORE)[-1] == (["captured"], ["captured"])
    summary = session.report.summary()
    assert (summary["drifted"], summary["measured"], summary["deployed"]["TREES"]) == (2, 2, 2)
    assert summary["reasons"] == {client_policy.AS_BEFORE: 2}
    later = compile_pair(Session(session.locations))
    assert run(*later, 1) == [(["captured"], ["captured"])]


def test_what_is_being_timed_when_the_session_ends_stays(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, backward = compiled_and_decided(session)
    before = slots(forward, backward)
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.TREES: 140.0})
    session.drift.look()

    session.close()

    assert run(forward, backward, MORE)[-1] == (["captured"], ["captured"])
    assert slots(forward, backward) == before
    assert session.report.counts["drifted"] == 0
    assert not any("checking" in failure for failure in session.report.failures)
    assert session.drift.add(0, lambda number, jury: None) >= 0  # and nothing is looked at any more
    assert session.drift._looks == {}


def test_a_graph_may_go_while_others_are_looked_at(session: Session) -> None:
    seen: list[int] = []

    def look(number: int, jury: checking.Jury) -> None:
        seen.append(number)
        for each in range(3):
            session.drift.forget(each)

    for _ in range(3):
        session.drift.add(0, look)

    session.drift.look()
    session.drift.look()

    assert seen == [0, 1, 2]
    assert session.report.failures["looking again: RuntimeError"] == 0
    session.drift.close()


def test_without_a_thread_nothing_is_looked_at_and_that_is_said(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)

    pair = compiled_and_decided(session)

    assert session.drift._looks == {}
    assert session.report.failures["looking again: there is no thread to be had"] == 2
    assert run(*pair)[-1] == (["captured"], ["captured"])


@pytest.mark.parametrize(
    ("cost_us", "deployment", "same"),
    [(50.0, Deployment.TREES, True), (51.0, Deployment.TREES, False), (50.0, Deployment.KERNELS, False)],
)
def test_only_what_was_outdated_is_not_believed(cost_us: float, deployment: Deployment, same: bool) -> None:
    """Another process may have measured anew meanwhile, and its answer is taken up."""
    entry = SimpleNamespace(cost_us=cost_us, decision=SimpleNamespace(deployment=deployment))

    assert checking.Claimed(Deployment.TREES, Cost(50.0)).is_of(entry) is same  # type: ignore[arg-type]
