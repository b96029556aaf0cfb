"""What becomes of decisions that are known already: of other sessions, processes and hosts, and of other times.

The clock stands in for the GPU's, as in `test_compiled_graph`.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.cudagraph_utils import BoxedDeviceIndex

from pygraphd.client.autotune import partition_trial
from pygraphd.client.decisions.decision_service import DISPUTED
from pygraphd.client.frontend import settings
from pygraphd.client.frontend.runtime import Runtime
from pygraphd.schema.messages import Decision, Deployment
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.clock import Clock
from tests.support.compiled import (
    ENOUGH,
    Compiled,
    Relocating,
    be_on,
    compile_once,
    compile_pair,
    daemon_asked_at_once,
    relocating,
    run,
    session,
    sources,
    trained,
)
from tests.support.daemon_home import Home

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["daemon_asked_at_once", "relocating", "session"]  # fixtures

pytestmark = pytest.mark.torch


def test_the_next_session_is_told_and_measures_nothing(session: Runtime) -> None:
    box = BoxedDeviceIndex(0)
    run(compile_once(session, 2, backward=False, box=box), compile_once(session, 1, backward=True, box=box))
    second = Runtime(session.locations)

    forward = compile_once(second, 2, backward=False, box=box)
    backward = compile_once(second, 1, backward=True, box=box)

    assert run(forward, backward, 3) == [(["relocated"] * 2, ["relocated"])] * 3
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (3, 0)
    assert sources(second) == {("GRAPH", "cache")}


def test_what_a_result_check_has_found_is_marked_for_the_programs_after_this_one(
    session: Runtime, relocating: list[Relocating]
) -> None:
    run(*compile_pair(session))
    wrong = Reason(ReasonCode.RESULTS_DIFFER, "output 0")

    relocating[0].note_failed_check((), wrong)

    second = Runtime(session.locations)
    assert run(*compile_pair(second), 3) == [(["kernels"], ["relocated"])] * 3
    reasons = [(each["deployment"], each["reason"]["code"]) for each in second.report.summary()["decisions"]]
    assert ("KERNELS", "results_differ") in reasons
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 0)


def test_the_daemon_counts_the_recordings_that_are_saved_where_kernels_are_faster(
    session: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 50.0, Deployment.GRAPH: 100.0})
    monkeypatch.setattr(Relocating, "recording_us", 2e6)
    home = Home(tmp_path)
    try:
        home.start()
        trained(session, ENOUGH)
        second, _ = trained(session, 3)
        assert home.pygraphd("stop").returncode == 0  # at which hits that wait are written
        counted = json.loads(home.pygraphd("stats", "--json").stdout)["since_ever"]
    finally:
        home.close()

    assert second.report.summary()["deployed"] == {"KERNELS": 3, "GRAPH": 0}
    assert (counted["hits"], counted["recording_saved_s"]) == (3, 6.0)


@pytest.mark.usefixtures("daemon_asked_at_once")
def test_of_two_processes_one_measures_and_the_other_takes_up_its_answer(session: Runtime) -> None:
    first, second = Runtime(session.locations), Runtime(session.locations)
    boxes = [BoxedDeviceIndex(0), BoxedDeviceIndex(0)]
    models = [
        (compile_once(each, 2, backward=False, box=box), compile_once(each, 1, backward=True, box=box))
        for each, box in zip((first, second), boxes, strict=True)
    ]
    run(*models[0], partition_trial.WARM_UP_CALLS + 1)  # the first begins to measure

    waiting = run(*models[1], ENOUGH)
    run(*models[0], ENOUGH)
    told = run(*models[1], 5)

    assert waiting == [(["kernels"] * 2, ["kernels"])] * ENOUGH
    assert told[-1] == (["relocated"] * 2, ["relocated"])
    counts = second.report.counts
    assert (first.report.counts["measured"], first.report.counts["waited"]) == (3, 0)
    assert (counts["measured"], counts["waited"], counts["adopted"], counts["recorded"]) == (0, 3, 3, 0)
    assert second.report.fallbacks.keys() == {partition_trial.WAITING}
    assert second.report.summary()["deployed"] == {"KERNELS": 0, "GRAPH": 3}
    assert first.report.failures == second.report.failures == {}


def test_what_is_refreshed_is_measured_anew_and_replaces_what_was_there(
    session: Runtime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def train(steps: int = ENOUGH) -> Runtime:
        each, box = Runtime(session.locations), BoxedDeviceIndex(0)
        run(
            compile_once(each, 1, backward=False, box=box),
            compile_once(each, 1, backward=True, box=box),
            steps,
        )
        return each

    home = Home(tmp_path)
    try:
        home.start()
        train()
        monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 50.0, Deployment.GRAPH: 100.0})
        with monkeypatch.context() as refreshing:
            refreshing.setenv(settings.REFRESH, "1")
            anew = train()
        told = train(3)
    finally:
        home.close()

    counts = anew.report.counts
    assert (counts["hits"], counts["measured"], counts["adopted"]) == (0, 2, 0)
    assert anew.report.summary()["deployed"]["KERNELS"] == 2
    assert (told.report.counts["hits"], told.report.summary()["deployed"]["KERNELS"]) == (2, 2)


def test_a_decision_from_elsewhere_is_used_at_once_and_stays_if_it_holds(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.GRAPH: 59.9})

    told, steps = trained(session, ENOUGH)

    assert steps == [(["relocated"] * 2, ["relocated"])] * ENOUGH
    counts = told.report.counts
    assert (counts["hits"], counts["validated"], counts["disputed"], counts["measured"]) == (3, 3, 0, 0)
    assert counts["spooled"] == 0
    summary = told.report.summary()
    assert summary["deployed"] == {"KERNELS": 0, "GRAPH": 3}
    assert {each["source"] for each in summary["decisions"]} == {"cache"}
    assert told.report.failures.keys() <= {"daemon: no daemon"}


@pytest.mark.parametrize("graph_us", [61.0, 39.0, 200.0])
def test_a_decision_from_elsewhere_that_does_not_hold_is_measured_anew(
    session: Runtime, monkeypatch: pytest.MonkeyPatch, graph_us: float
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.GRAPH: graph_us})

    told, steps = trained(session, 2 * ENOUGH)

    runs = "relocated" if graph_us < 100 else "kernels"
    assert (steps[0], steps[-1]) == ((["relocated"] * 2, ["relocated"]), ([runs] * 2, [runs]))
    counts = told.report.counts
    assert (counts["validated"], counts["disputed"], counts["measured"], counts["spooled"]) == (3, 3, 3, 3)
    assert told.report.fallbacks == {DISPUTED: 3}
    assert len(told.report.summary()["decisions"]) == 3
    again, _ = trained(session, ENOUGH)
    assert (again.report.counts["hits"], again.report.counts["validated"]) == (3, 0)


def test_what_was_checked_and_measured_anew_is_gone_from_a_graph_in_one_piece(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without partitions Inductor puts what runs the graph where its callers find it, and copies misaligned inputs around it."""

    def compile_in_one_piece(each: Runtime) -> tuple[Compiled, Any]:
        compiled = Compiled(1)
        kwargs = {"is_backward": False, "cudagraphs": True, "boxed_forward_device_index": None}
        plan = each.compiled_graph(compiled, kwargs)
        assert plan is not None
        ways = {"device_index": 0, "is_backward": False}
        slot = compiled.current_callable = plan.cudagraphify(lambda inputs: "kernels", ways)
        plan.complete(compiled)
        return compiled, slot

    elsewhere = Runtime(session.locations)
    be_on("elsewhere", elsewhere)
    first, _ = compile_in_one_piece(elsewhere)
    for _ in range(ENOUGH):
        first.current_callable([torch.ones(1)])
    monkeypatch.setattr(Clock, "times_us", {Deployment.KERNELS: 100.0, Deployment.GRAPH: 70.0})
    told = Runtime(session.locations)
    compiled, slot = compile_in_one_piece(told)

    results = [compiled.current_callable([torch.ones(1)]) for _ in range(2 * ENOUGH)]

    assert told.report.counts["disputed"] == told.report.counts["measured"] == 1
    assert results[-1] == "relocated"
    assert isinstance(slot.run, Relocating)


@pytest.mark.parametrize(("trust", "hits", "measured"), [("all", 3, 0), ("local", 0, 3)])
def test_what_is_trusted_can_be_set(
    session: Runtime, monkeypatch: pytest.MonkeyPatch, trust: str, hits: int, measured: int
) -> None:
    trained(session, ENOUGH, "elsewhere")
    monkeypatch.setenv(settings.TRUST, trust)

    told, steps = trained(session, ENOUGH)

    counts = told.report.counts
    assert (counts["hits"], counts["measured"], counts["validated"]) == (hits, measured, 0)
    assert steps[-1] == (["relocated"] * 2, ["relocated"])


def test_a_program_that_ends_before_the_check_does_has_run_as_it_was_told(session: Runtime) -> None:
    trained(session, ENOUGH, "elsewhere")

    told, _ = trained(session, 5)
    told.close()

    summary = told.report.summary()
    assert (summary["validated"], summary["deployed"]["GRAPH"], summary["spooled"]) == (3, 3, 0)


def test_who_waits_to_the_end_records_nothing(session: Runtime, tmp_path: Path) -> None:
    home = Home(tmp_path)
    try:
        home.start()
        first, second = Runtime(session.locations), Runtime(session.locations)
        for each in (first, second):
            run(
                compile_once(each, 1, backward=False, box=(box := BoxedDeviceIndex(0))),
                compile_once(each, 1, backward=True, box=box),
                10,
            )
        second.close()
        first.close()
    finally:
        home.close()

    assert second.report.summary()["reasons"] == {ReasonCode.LEFT_TO_ANOTHER_PROCESS.text: 2}
    assert (second.report.counts["recorded"], first.report.counts["recorded"]) == (0, 2)


def test_a_program_that_ends_early_says_how_often_it_called(session: Runtime) -> None:
    box = BoxedDeviceIndex(0)
    run(
        compile_once(session, 1, backward=False, box=box),
        compile_once(session, 1, backward=True, box=box),
        10,
    )
    session.close()
    second = Runtime(session.locations)
    run(compile_once(second, 1, backward=False, box=box), compile_once(second, 1, backward=True, box=box), 10)
    second.close()

    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 0)
    assert second.report.counts["spooled"] == 0
    assert second.report.summary()["deployed"]["KERNELS"] == 2
    assert sources(session) == sources(second) == {("KERNELS", "unfinished")}


def test_what_was_measured_too_long_ago_is_measured_anew(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(*compile_pair(session))
    now = time.time()
    monkeypatch.setattr("pygraphd.client.decisions.trust.time.time", lambda: now + 31 * 86_400)

    old = Runtime(session.locations)
    assert run(*compile_pair(old))[-1] == (["relocated"], ["relocated"])
    monkeypatch.setenv(settings.MAX_AGE, "40d")
    young = Runtime(session.locations)
    run(*compile_pair(young))

    assert (old.report.counts["hits"], old.report.counts["measured"]) == (0, 2)
    assert [each["because"] for each in old.report.summary()["decisions"]] == [
        {"code": "too_old", "detail": "31d"}
    ] * 2
    assert (young.report.counts["hits"], young.report.counts["measured"]) == (2, 0)


def test_what_was_measured_on_a_noisy_machine_runs_and_is_measured_by_the_next_process(
    session: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    decision = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), POLICY_VERSION, final=False)
    with monkeypatch.context() as noisy:
        noisy.setattr(partition_trial, "decide", lambda measurements: decision)
        assert run(*compile_pair(session))[-1] == (["relocated"], ["relocated"])
    short, second = Runtime(session.locations), Runtime(session.locations)

    run(*compile_pair(short), 2)
    short.close()
    pair = compile_pair(second)

    (known,) = {each["reason"]["code"] for each in session.report.summary()["decisions"]}
    assert known == decision.reason.code
    assert short.report.counts["spooled"] == 0, "what was measured is worth more than that nothing was"
    assert run(*pair)[-1] == (["relocated"], ["relocated"])
    assert (second.report.counts["hits"], second.report.counts["measured"]) == (2, 2)


def test_what_becomes_of_a_graph_is_logged(
    session: Runtime, relocating: list[Relocating], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "pygraph")
    box = BoxedDeviceIndex(0)
    forward = compile_once(session, 1, backward=False, box=box)
    backward = compile_once(session, 1, backward=True, box=box)

    run(forward, backward)

    lines = [each.getMessage() for each in caplog.records if each.getMessage().startswith("forward ")]
    states = [line.split(": ")[1:3] for line in lines]
    assert [each[0] for each in states] == ["looked up", "MEASURE", "DEPLOYED", "deployed as GRAPH"]
    assert states[0][1] == "unknown"
    assert len({line.partition(":")[0] for line in lines}) == 1
