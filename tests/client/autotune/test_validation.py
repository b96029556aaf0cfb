"""What may be timed of a graph that runs as somebody else has decided, and that the user's calls do not notice."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from pygraphd.client.autotune import trial
from pygraphd.client.autotune.candidates import Candidates
from pygraphd.client.autotune.cost import Cost
from pygraphd.client.autotune.trial import RECORDING_CALLS, SAMPLES
from pygraphd.client.autotune.validation import MAX_CALLS, Validation
from pygraphd.client.common.report import Report
from pygraphd.client.decisions.decision_service import DecisionService
from pygraphd.client.decisions.leases import PendingGraph
from pygraphd.client.decisions.trust import TrustPolicy
from pygraphd.schema.messages import Deployment, Graph, Kind
from tests.support.clock import Clock
from tests.support.trial_host import ENVIRONMENT

pytestmark = pytest.mark.torch

GRAPH = Deployment.GRAPH
ENOUGH = RECORDING_CALLS + SAMPLES
TWICE = 2 * ENOUGH


def take(monkeypatch: pytest.MonkeyPatch, time_us: float) -> None:
    """Have calls take so long."""
    monkeypatch.setattr(Clock, "times_us", {GRAPH: time_us})


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "Sampler", Clock)
    take(monkeypatch, 100.0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Relocating:
    """Stands where relocatable graphs do; some of its calls, by their numbers, make an executable, which takes ten times as long."""

    refusal = why_refused = None
    recording_us = 0.0
    refused_for_good = is_awaited = False
    not_now: str | None = None
    run_kernels_or_record = None

    def __init__(self, makes_at: range = range(0), run: Any = None) -> None:
        self._makes_at = makes_at
        self._run = run
        self._calls = self.one_time_work = self.replayed = 0

    def why_not(self, inputs: list[Any]) -> str | None:
        return self.not_now

    @property
    def run(self) -> Relocating:
        return self

    def __call__(self, inputs: list[Any]) -> Any:
        makes = self._calls in self._makes_at
        if self._run is not None:
            return self._run(inputs)
        self.one_time_work += makes
        Clock.times_us = {GRAPH: 1000.0 if makes else 100.0}
        self._calls += 1
        return "relocated"

    def empty_cache(self, *, workspaces: bool = False) -> None:
        pass

    def trim(self) -> None:
        pass

    def close(self) -> None:
        pass


class Decisions(DecisionService):
    """Decisions of a process that asks no cache."""

    def __init__(self, report: Report) -> None:
        told: Any = None
        super().__init__(told, TrustPolicy(""), report)


def checked(run: Relocating, cost_us: float, finish: Any, report: Report) -> Validation:
    ways, pending = (
        Candidates(run, 0, run),
        PendingGraph(Graph("a" * 64, Kind.INFERENCE, 0, 1, 1), ENVIRONMENT),
    )
    return Validation(pending, GRAPH, Cost(cost_us, cost_us), (), ways, finish, Decisions(report))


class Case:
    """One checked graph, and what was said of it."""

    def __init__(self, cost_us: float = 100.0) -> None:
        self.report = Report()
        self.said: list[bool] = []
        self.relocating = Relocating(run=self.run)
        self.checked = checked(self.relocating, cost_us, self.finish, self.report)

    def run(self, inputs: list[Any]) -> str:
        return "as decided elsewhere"

    def finish(self, candidates: Candidates, holds: bool) -> Any:
        self.said.append(holds)
        return self.run if holds else lambda inputs: "measured anew"

    def calls(self, count: int, *inputs: Any) -> list[str]:
        return [self.checked(list(inputs)) for _ in range(count)]


@pytest.mark.parametrize(
    ("cost_us", "enough", "after"),
    [(100.0, ENOUGH, "as decided elsewhere"), (50.0, TWICE, "measured anew")],
)
def test_it_is_settled_once(cost_us: float, enough: int, after: str) -> None:
    case = Case(cost_us)

    assert case.calls(enough) == ["as decided elsewhere"] * enough
    assert case.said == []
    case.calls(1)
    assert case.calls(100) == [after] * 100
    assert case.said == [cost_us == 100.0]


def test_nothing_is_timed_while_ranks_may_still_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GRAPH runs as KERNELS meanwhile, which take other times."""
    case = Case(100.0)
    case.relocating.is_awaited = True
    take(monkeypatch, 500.0)
    case.calls(MAX_CALLS + 1)
    assert case.said == []

    case.relocating.is_awaited = False
    take(monkeypatch, 100.0)
    case.calls(ENOUGH + 1)
    assert case.said == [True]


@pytest.mark.parametrize("first_us", [200.0, 40.0])
@pytest.mark.parametrize(("then_us", "holds"), [(100.0, True), (200.0, False), (40.0, False)])
def test_what_does_not_hold_once_is_timed_once_more(
    monkeypatch: pytest.MonkeyPatch, first_us: float, then_us: float, holds: bool
) -> None:
    case = Case(100.0)
    take(monkeypatch, first_us)
    case.calls(ENOUGH)
    take(monkeypatch, then_us)

    case.calls(ENOUGH)
    assert case.said == ([True] if first_us == 100.0 else [])
    case.calls(1)

    assert case.said == [holds]


def test_a_second_look_that_comes_to_no_end_leaves_it_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(cost_us=1.0)
    case.calls(ENOUGH + 1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    case.calls(MAX_CALLS)

    assert case.said == [True]


@pytest.mark.parametrize(("step", "holds"), [(2, True), (1, False)], ids=["every other", "each"])
def test_calls_that_make_an_executable_do_not_count_unless_nearly_all_do(step: int, holds: bool) -> None:
    said: list[bool] = []
    run = Relocating(range(RECORDING_CALLS, 10 * TWICE, step))

    def finish(candidates: Candidates, holds: bool) -> Any:
        said.append(holds)
        return run

    one = checked(run, 100.0, finish, Report())
    for _ in range(4 * TWICE):
        one([])

    assert said == [holds]


def test_with_other_dynamic_sizes_there_is_nothing_to_compare() -> None:
    case = Case(cost_us=1.0)

    assert case.calls(100, torch.ones(1), 3) == ["as decided elsewhere"] * 100
    assert case.said == [True]


def test_a_call_within_a_timed_one_is_not_timed() -> None:
    case, inner = Case(cost_us=1.0), threading.Event()
    seen: list[str] = []

    def run(inputs: list[Any]) -> str:
        if not inner.is_set():
            inner.set()
            other = threading.Thread(target=lambda: seen.extend(case.calls(TWICE + 1)))
            other.start()
            other.join()
        return "as decided elsewhere"

    case.checked._candidates.recordings._run = run  # type: ignore[attr-defined]
    case.calls(1)

    assert seen == ["as decided elsewhere"] * (TWICE + 1)
    assert case.said == []


def test_calls_of_any_thread_are_timed() -> None:
    case = Case(cost_us=1.0)
    for _ in range(TWICE + 1):
        thread = threading.Thread(target=case.calls, args=(1,))
        thread.start()
        thread.join()

    assert case.said == [False]


def test_a_capture_of_the_users_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(cost_us=1.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    case.calls(100)

    assert case.said == []


def test_calls_that_a_profiler_watches_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may run as KERNELS, whose times would refute any GRAPH."""
    case = Case(cost_us=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        case.calls(MAX_CALLS + 1)
    assert case.said == []

    case.calls(TWICE + 1)
    assert case.said == [False]


def test_calls_that_can_be_no_graph_for_now_are_not_timed() -> None:
    case = Case(cost_us=1.0)
    case.relocating.not_now = "seen by a mode"
    case.calls(MAX_CALLS + 1)
    assert case.said == []

    case.relocating.not_now = None
    case.calls(TWICE + 1)
    assert case.said == [False]


def test_an_error_of_the_users_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(inputs: list[Any]) -> None:
        raise ZeroDivisionError

    one = checked(Relocating(run=fail), 1.0, lambda *_: fail, Report())
    for _ in range(TWICE + 1):
        with pytest.raises(ZeroDivisionError):
            one([])


def test_an_error_of_ours_is_counted_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(cost_us=1.0)

    def fail(candidates: Candidates, holds: bool) -> Any:
        raise KeyError

    case.checked._finish = fail

    assert case.calls(100) == ["as decided elsewhere"] * 100
    assert case.report.failures == {"checking: KeyError": 1}
