"""A replay that waits for another rank for too long ends the process; nothing else does."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from pygraphd.client.backend import torch_private
from pygraphd.client.common.report import Report
from pygraphd.client.decisions.ranks.process_group import GRAPH_REGISTER, Groups
from pygraphd.client.recording.watch import Watch
from tests.support.process_groups import init

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["init"]  # a fixture

pytestmark = pytest.mark.torch


class Event:
    """An event on a GPU."""

    done = False
    recorded = asked = 0
    is_relaxed = False

    def record(self) -> None:
        self.recorded += 1

    def query(self) -> bool:
        assert self.is_relaxed
        self.asked += 1
        return self.done

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        self.is_relaxed = True
        yield
        self.is_relaxed = False


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    return []


@pytest.mark.parametrize("done", [True, False])
def test_a_replay_that_has_not_ended_in_time_ends_the_process(ended: list[float], done: bool) -> None:
    event = Event()
    watch = Watch(event, event.relaxed, lambda: False, ended.append)
    watch.begin(60.0)
    watch.note(lambda: 60.0)
    now = time.monotonic()

    watch.poll(now + 59)
    assert (event.recorded, event.asked) == (1, 0)
    event.done = done
    watch.poll(now + 61)
    watch.poll(now + 90)

    assert ended == ([] if done else [60.0])


def test_a_replay_waits_as_long_as_its_own_group(ended: list[float]) -> None:
    event = Event()
    watch = Watch(event, event.relaxed, lambda: False, ended.append)
    watch.begin(600.0)
    watch.begin(60.0)
    watch.note(lambda: 600.0)
    now = time.monotonic()

    watch.poll(now + 599)
    assert ended == []
    watch.poll(now + 601)

    assert ended == [600.0]


def test_a_replay_waits_as_long_as_its_group_does_now(
    init: Callable[..., None], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A program may prolong the time-out of its group at any time."""
    init(dist.HashStore())
    world = dist.group.WORLD
    assert world is not None
    of_gpus = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    world._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.GLOO, of_gpus)
    found = torch_private.group_on_gpus
    monkeypatch.setattr(torch_private, "group_on_gpus", lambda name: (*found(name)[:3], "ProcessGroupNCCL"))
    monkeypatch.setenv(GRAPH_REGISTER, "0")
    collectives = frozenset({("_c10d_functional::all_reduce_", world.group_name)})
    lockstep = Groups(Report()).lockstep(collectives, "a" * 64)
    ended: list[float] = request.getfixturevalue("ended")  # from now on no thread starts
    event, before_s = Event(), lockstep.timeout_s
    watch = Watch(event, event.relaxed, lambda: False, ended.append)
    watch.begin(before_s)
    watch.note(lockstep.present_timeout_s)
    now = time.monotonic()

    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=10 * before_s), world)
    watch.poll(now + 5 * before_s)
    assert (event.asked, ended) == (0, [])
    watch.poll(now + 10 * before_s + 1)

    assert (event.asked, ended) == (1, [10 * before_s])
    dist.destroy_process_group()
    assert lockstep.present_timeout_s() == before_s


@pytest.mark.parametrize("why", ["not begun", "in a capture", "switched off"])
def test_what_is_not_watched_is_not_recorded(
    ended: list[float], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    event = Event()
    watch = Watch(event, event.relaxed, lambda: why == "in a capture", ended.append)
    if why == "switched off":
        monkeypatch.setenv("NCCL_ASYNC_ERROR_HANDLING", "0")
    if why != "not begun":
        watch.begin(60.0)

    watch.note(lambda: 60.0)
    watch.poll(time.monotonic() + 1000)

    assert (event.recorded, event.asked, ended) == (0, 0, [])


def test_a_replay_that_is_noted_meanwhile_has_all_of_its_time(ended: list[float]) -> None:
    event = Event()
    watch = Watch(event, event.relaxed, lambda: False, ended.append)
    watch.begin(60.0)
    watch.note(lambda: 60.0)
    later = time.monotonic() + 61
    event.query = lambda: watch.note(lambda: 60.0)  # type: ignore[assignment, method-assign, return-value]

    watch.poll(later)

    assert ended == []
