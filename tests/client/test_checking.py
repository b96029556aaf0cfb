"""What may be timed of a graph that runs as somebody else has decided, and that the user's calls do not notice."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from pygraphd.client import checking, profiler
from pygraphd.client.checking import Checked, Claimed, Jury
from pygraphd.client.costs import Cost
from pygraphd.client.report import Report
from pygraphd.client.rota import MAX_ROUNDS, SAMPLES, UNCOUNTED
from pygraphd.client.timeline import Entry
from pygraphd.schema.messages import Deployment

pytestmark = pytest.mark.torch

TREES = Deployment.TREES
ENOUGH = UNCOUNTED[TREES] + SAMPLES


class Clock(profiler.Profiler):
    """A profiler that finds 100 us."""

    def start(self, deployment: Deployment, *, fair: bool = True) -> Any:
        return deployment, fair

    def stop(self, call: Any, *, steady: bool = True) -> None:
        deployment, fair = call
        time = 100.0
        entry = Entry(id(self), deployment, fair, idle=True, began_us=0.0, host_us=time, span_us=time)
        if fair:
            self._samples.setdefault(deployment, []).append(entry)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "Profiler", Clock)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


class Case:
    """One checked graph, and what was said of it."""

    def __init__(self, cost_us: float = 100.0) -> None:
        self.report = Report()
        self.said: list[bool] = []
        self.jury = Jury()
        self.checked = self.another(cost_us)

    def another(self, cost_us: float) -> Checked:
        return Checked(self.run, Claimed(TREES, Cost(cost_us)), 0, self.settle, self.report, self.jury)

    def run(self, inputs: list[Any]) -> str:
        return "as decided elsewhere"

    def settle(self, checked: Checked, holds: bool) -> Any:
        self.said.append(holds)
        return self.run if holds else lambda inputs: "measured anew"

    def calls(self, count: int, *inputs: Any) -> list[str]:
        return [self.checked(list(inputs)) for _ in range(count)]


@pytest.mark.parametrize(("cost_us", "after"), [(100.0, "as decided elsewhere"), (50.0, "measured anew")])
def test_it_is_settled_once(cost_us: float, after: str) -> None:
    case = Case(cost_us)

    assert case.calls(ENOUGH - 1) == ["as decided elsewhere"] * (ENOUGH - 1)
    assert case.said == []
    case.calls(2)
    assert case.calls(100) == [after] * 100
    assert case.said == [cost_us == 100.0]


def test_with_other_dynamic_sizes_there_is_nothing_to_compare() -> None:
    case = Case(cost_us=1.0)

    assert case.calls(100, torch.ones(1), 3) == ["as decided elsewhere"] * 100
    assert case.said == [True]


def test_only_one_thread_is_timed() -> None:
    case = Case(cost_us=1.0)
    case.calls(1)
    others = [threading.Thread(target=case.calls, args=(50,)) for _ in range(4)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()

    assert case.said == []
    case.calls(ENOUGH + 1)
    assert case.said == [False]


def test_what_can_never_be_timed_ends_all_the_same() -> None:
    case = Case(cost_us=1.0)
    first = threading.Thread(target=case.calls, args=(1,))
    first.start()
    first.join()

    case.calls(MAX_ROUNDS + 1)

    assert case.said == [True]


@pytest.mark.parametrize("costs", [(100.0, 1.0), (1.0, 100.0)], ids=["backward", "forward"])
def test_a_forward_and_its_backward_are_disputed_together(costs: tuple[float, float]) -> None:
    case = Case(costs[0])
    backward = case.another(costs[1])
    steps = [(case.checked([]), backward([])) for _ in range(ENOUGH + 3)]

    assert steps[-1] == ("measured anew", "measured anew")
    assert case.said == [False, False]


def test_a_forward_and_its_backward_hold_together() -> None:
    case = Case()
    backward = case.another(100.0)
    case.calls(ENOUGH + 10)
    assert case.said == []
    for _ in range(ENOUGH + 1):
        backward([])
    case.calls(1)

    assert case.said == [True, True]


def test_a_capture_of_the_users_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(cost_us=1.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    case.calls(100)

    assert case.said == []


def test_an_error_of_the_users_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(inputs: list[Any]) -> None:
        raise ZeroDivisionError

    checked = Checked(fail, Claimed(TREES, Cost(1.0)), 0, lambda *_: fail, Report(), Jury())
    for _ in range(ENOUGH + 1):
        with pytest.raises(ZeroDivisionError):
            checked([])


def test_an_error_of_ours_is_counted_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(cost_us=1.0)

    def fail(checked: Checked, holds: bool) -> Any:
        raise KeyError

    case.checked._settle = fail

    assert case.calls(100) == ["as decided elsewhere"] * 100
    assert case.report.failures == {"checking: KeyError": 1}
