"""A profiler counts from when it is made ready, which with a schedule is before it runs: CUPTI is at work then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private import profiling

pytestmark = pytest.mark.torch

CPU = [ProfilerActivity.CPU]


@pytest.fixture(autouse=True)
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin each test in a process that has not seen a profile, and watches none."""
    monkeypatch.setattr(profiling, "_profiles", profiling._Profiles())
    for name in (profiling._PREPARE, profiling._DISABLE):
        monkeypatch.setattr(torch.autograd.profiler, name, getattr(torch._C._autograd, name))


@pytest.fixture
def watched() -> None:
    torch_private.watch_profiler(sees_all=True)


def test_this_torch_has_the_functions_that_are_watched() -> None:
    assert callable(getattr(torch.autograd.profiler, profiling._PREPARE))
    assert callable(getattr(torch.autograd.profiler, profiling._DISABLE))
    assert profiling._type_of_profiler() == "NONE"


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


@pytest.mark.usefixtures("watched")
def test_that_there_was_a_profile_is_known_from_the_first_preparation_on() -> None:
    steps = schedule(wait=1, warmup=1, active=1, repeat=1)
    with profile(activities=CPU, schedule=steps, acc_events=True) as each:
        waiting = torch_private.was_profiled()
        each.step()
        ready = torch_private.was_profiled()

    assert (waiting, ready, torch_private.was_profiled()) == (False, True, True)


@pytest.mark.usefixtures("watched")
def test_ranges_within_a_warm_up_do_not_end_it() -> None:
    steps = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=CPU, schedule=steps, acc_events=True) as each:
        with torch.autograd.profiler.emit_itt():
            within = torch_private.is_profiled()
        after = torch_private.is_profiled()
        each.step()

    assert (within, after, torch_private.is_profiled()) == (True, True, False)


@pytest.mark.usefixtures("watched")
def test_ranges_alone_are_no_profile_that_leaves_anything_behind() -> None:
    with torch.autograd.profiler.emit_itt():
        within = torch_private.is_profiled()

    assert (within, torch_private.is_profiled(), torch_private.was_profiled()) == (True, False, False)


@pytest.mark.parametrize("was_ready", [False, True])
def test_a_profiler_that_cannot_be_made_ready_does_not_count(
    monkeypatch: pytest.MonkeyPatch, was_ready: bool
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(torch.autograd.profiler, profiling._PREPARE, fail)
    torch_private.watch_profiler(sees_all=True)
    profiling._profiles.flags[profiling._READY] = was_ready
    with pytest.raises(RuntimeError, match="no CUPTI"), profile(activities=CPU, acc_events=True):
        pass

    assert torch_private.is_profiled() is was_ready


@pytest.mark.parametrize("sees_all", [False, True])
def test_who_begins_to_watch_late_may_have_missed_a_profile(sees_all: bool) -> None:
    assert torch_private.was_profiled() is False

    torch_private.watch_profiler(sees_all=sees_all)

    assert torch_private.was_profiled() is not sees_all


def test_a_process_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_private.watch_profiler(sees_all=True)
    ours = [getattr(torch.autograd.profiler, name) for name in (profiling._PREPARE, profiling._DISABLE)]
    torch_private.watch_profiler(sees_all=False)

    assert [
        getattr(torch.autograd.profiler, name) for name in (profiling._PREPARE, profiling._DISABLE)
    ] == ours
    assert not torch_private.was_profiled()


def test_a_torch_without_these_functions_is_left_alone_and_may_have_been_profiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(torch.autograd.profiler, profiling._PREPARE)

    torch_private.watch_profiler(sees_all=True)

    assert not hasattr(torch.autograd.profiler, profiling._PREPARE)
    assert (torch_private.is_profiled(), torch_private.was_profiled()) == (False, True)
