"""A profiler counts from when it is made ready, which with a schedule is before it runs: CUPTI is at work then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private import profiling

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.torch

CPU = [ProfilerActivity.CPU]


@pytest.fixture(autouse=True)
def _no_profile_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling._profiles, "were", False)


@pytest.fixture
def watched() -> Iterator[None]:
    undo = torch_private.watch_profiler()
    yield
    undo()


def test_this_torch_has_the_functions_that_are_watched() -> None:
    assert callable(getattr(torch.autograd.profiler, profiling._PREPARE))
    assert callable(getattr(torch.autograd.profiler, profiling._DISABLE))


@pytest.mark.usefixtures("watched")
def test_the_warm_up_of_a_schedule_counts_and_the_wait_and_what_comes_after_do_not() -> None:
    seen = [torch_private.is_profiled()]
    with profile(
        activities=CPU, schedule=schedule(wait=1, warmup=1, active=1, repeat=1), acc_events=True
    ) as each:
        for _ in range(4):
            seen.append(torch_private.is_profiled())
            each.step()
    seen.append(torch_private.is_profiled())

    assert seen == [False, False, True, True, False, False]


@pytest.mark.usefixtures("watched")
def test_a_profile_that_ends_in_its_warm_up_is_over() -> None:
    with profile(activities=CPU, schedule=schedule(wait=0, warmup=2, active=1), acc_events=True):
        during = torch_private.is_profiled()

    assert (during, torch_private.is_profiled()) == (True, False)


def test_that_there_was_a_profile_is_known_from_the_first_preparation_on() -> None:
    with profile(activities=CPU, acc_events=True):
        pass
    before = torch_private.was_profiled()
    undo = torch_private.watch_profiler()
    steps = schedule(wait=1, warmup=1, active=1, repeat=1)
    with profile(activities=CPU, schedule=steps, acc_events=True) as each:
        waiting = torch_private.was_profiled()
        each.step()
        ready = torch_private.was_profiled()
    undo()

    assert (before, waiting, ready, torch_private.was_profiled()) == (False, False, True, True)


def test_a_profiler_that_cannot_be_made_ready_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(torch.autograd.profiler, profiling._PREPARE, fail)
    undo = torch_private.watch_profiler()
    with pytest.raises(RuntimeError, match="no CUPTI"), profile(activities=CPU, acc_events=True):
        pass
    found = torch_private.is_profiled()
    undo()

    assert not found


def test_what_was_changed_in_torch_is_changed_back() -> None:
    names = (profiling._PREPARE, profiling._DISABLE)
    before = [getattr(torch.autograd.profiler, name) for name in names]
    undo = torch_private.watch_profiler()
    within = [getattr(torch.autograd.profiler, name) for name in names]
    undo()

    assert all(one is not other for one, other in zip(before, within, strict=True))
    assert [getattr(torch.autograd.profiler, name) for name in names] == before


def test_what_others_have_put_around_ours_notices_nothing_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    undo = torch_private.watch_profiler()
    ours = getattr(torch.autograd.profiler, profiling._PREPARE)
    monkeypatch.setattr(torch.autograd.profiler, profiling._PREPARE, lambda *a, **k: ours(*a, **k))
    undo()

    with profile(activities=CPU, acc_events=True):
        pass

    assert not torch_private.is_profiled()


def test_a_torch_without_these_functions_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd.profiler, profiling._PREPARE)

    torch_private.watch_profiler()()

    assert not hasattr(torch.autograd.profiler, profiling._PREPARE)
    assert (torch_private.is_profiled(), torch_private.was_profiled()) == (False, True)
