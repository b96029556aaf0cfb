"""Workspaces that others may be about to use are given back some time before memory is, and only where there are others."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._inductor.async_compile import AsyncCompile

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.workspaces import ABOUT_TO_LAUNCH_S, UNTIL_MEMORY_GOES_S, Workspaces
from pygraphd.client.recording import capture
from pygraphd.client.recording.capture import CudaRecorder
from tests.support.allocator_stats import nested
from tests.support.idle_device import IdleDevice
from tests.support.stepped_clock import SteppedClock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.emulator import Emulator

pytestmark = pytest.mark.torch

CLEARED, EMPTIED = "cleared", "emptied"
ROUNDING_S = 1e-9


class Events:
    """What was done when."""

    def __init__(self) -> None:
        self.all: list[tuple[str, float]] = []
        self.clock = SteppedClock()
        self.in_use = {0}
        """The devices on which PyTorch has memory."""
        self.workspace_bytes = 1
        """Bytes of workspaces that are there whenever they are freed."""
        self.freed_bytes = 0

    def note(self, what: str) -> Callable[[], None]:
        return lambda: self.all.append((what, self.clock.now()))

    def statistics(self, device: int) -> dict[str, Any]:
        """Return what is used of PyTorch's statistics of a device."""
        return nested(int(device in self.in_use), 0, freed=self.freed_bytes)

    def clear(self) -> None:
        self.freed_bytes += self.workspace_bytes
        self.note(CLEARED)()

    @property
    def names(self) -> list[str]:
        return [what for what, _ in self.all]

    def least_distance_s(self) -> float:
        """Return the least time from anything being cleared to anything being emptied after it."""
        return min(
            emptied - cleared
            for place, (what, cleared) in enumerate(self.all)
            for other, emptied in self.all[place:]
            if what == CLEARED and other == EMPTIED
        )


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    events = Events()
    monkeypatch.setattr(torch_private, "clear_workspaces", events.clear)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", events.statistics)
    monkeypatch.setattr(torch_private, "empty_cache", events.note(EMPTIED))
    monkeypatch.setattr(time, "monotonic", events.clock.now)
    monkeypatch.setattr(time, "sleep", events.clock.sleep)
    monkeypatch.setattr(capture, "workspaces", Workspaces())
    return events


@pytest.fixture
def recorder(events: Events, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> CudaRecorder:
    """Return a recorder of a device that there is not, as far as it gives memory back."""
    made = CudaRecorder.__new__(CudaRecorder)
    made.device, made.driver, made._most_reserved = torch.device("cpu"), emulator.driver, 0
    made._waits = IdleDevice()
    return made


@contextlib.contextmanager
def running(
    count: int, name: str | None = None, kind: type[threading.Thread] = threading.Thread
) -> Iterator[None]:
    """Have some threads beside this one."""
    ended = threading.Event()
    threads = [kind(target=ended.wait, name=name) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take no notice of what other tests or the test runner have begun."""
    there = set(threading.enumerate()) - {threading.current_thread()}
    enumerate_ = threading.enumerate
    monkeypatch.setattr(threading, "enumerate", lambda: [each for each in enumerate_() if each not in there])


@pytest.mark.parametrize(("others", "in_use"), [(1, {0}), (0, {0, 1})])
def test_beside_others_memory_is_given_back_some_time_later(
    events: Events, recorder: CudaRecorder, others: int, in_use: set[int]
) -> None:
    events.in_use = in_use

    with running(others):
        recorder.trim()

    assert events.names == [CLEARED, EMPTIED]
    assert events.least_distance_s() == pytest.approx(UNTIL_MEMORY_GOES_S)


def test_who_is_alone_waits_for_nobody(
    events: Events, recorder: CudaRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))

    recorder.trim()

    assert events.names == [CLEARED, EMPTIED]


def test_where_there_was_no_workspace_nobody_waits(
    events: Events, recorder: CudaRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    events.workspace_bytes = 0
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))

    with running(1):
        recorder.trim()

    assert events.names == [CLEARED, EMPTIED]


def test_a_workspace_freed_before_is_waited_for_although_none_is_freed_now(
    events: Events, recorder: CudaRecorder
) -> None:
    with running(1):
        recorder.trim()
        events.workspace_bytes, before = 0, events.all[0][1]
        recorder.trim()

    assert events.names == [CLEARED, EMPTIED] * 2
    assert events.all[1][1] - before == pytest.approx(UNTIL_MEMORY_GOES_S)


def test_before_cuda_is_initialized_nobody_waits(
    events: Events, recorder: CudaRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: {})
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))

    with running(1):
        recorder.trim()


def test_a_thread_of_the_users_is_waited_for_whatever_its_function_is_called(
    events: Events, recorder: CudaRecorder
) -> None:
    with running(1, "Thread-3 (_read_thread)"):
        recorder.trim()

    assert events.least_distance_s() == pytest.approx(UNTIL_MEMORY_GOES_S)


@pytest.mark.parametrize("name", ["InductorSubproc", "Thread-3 (_pin_memory_loop)", "QueueFeederThread"])
def test_threads_that_launch_nothing_are_not_waited_for(
    events: Events, recorder: CudaRecorder, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))

    with running(1, name):
        recorder.trim()

    assert events.names == [CLEARED, EMPTIED]


@pytest.mark.parametrize(("module", "is_waited_for"), [("tqdm._monitor", False), ("my_server", True)])
def test_a_thread_that_draws_progress_bars_is_not_waited_for(
    events: Events, recorder: CudaRecorder, module: str, is_waited_for: bool
) -> None:
    with running(1, kind=type("Monitor", (threading.Thread,), {"__module__": module})):
        recorder.trim()

    assert events.least_distance_s() == pytest.approx(UNTIL_MEMORY_GOES_S if is_waited_for else 0)


def test_threads_of_the_compiler_are_not_waited_for(
    events: Events, recorder: CudaRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
    with ThreadPoolExecutor(1) as executor:
        executor.submit(int).result()

        @functools.lru_cache(1)
        def pool() -> ThreadPoolExecutor:
            return executor

        monkeypatch.setattr(AsyncCompile, "pool", staticmethod(pool))
        assert torch_private.threads_that_compile() == frozenset()
        pool()

        recorder.trim()

    assert events.names == [CLEARED, EMPTIED]


def test_before_a_capture_and_after_it_others_have_launched(events: Events) -> None:
    with running(1):
        with contextlib.suppress(ZeroDivisionError), capture._workspaces_in_capture():
            assert events.clock.now() - events.all[0][1] == ABOUT_TO_LAUNCH_S
            raise ZeroDivisionError
        ended = events.clock.now()

    assert events.names == [CLEARED, CLEARED]
    assert ended - events.all[1][1] == pytest.approx(ABOUT_TO_LAUNCH_S)


def test_whoever_clears_whoever_empties_waits(events: Events) -> None:
    several = Workspaces()

    def work() -> None:
        for _ in range(5):
            several.clear()
            several.empty_cache()

    threads = [threading.Thread(target=work) for _ in range(3)]
    with running(1):  # the last of them is not alone either
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(events.all) == 3 * 2 * 5
    assert events.least_distance_s() >= UNTIL_MEMORY_GOES_S - ROUNDING_S


def test_long_after_nobody_waits(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Workspaces()
    with running(1):
        one.clear()
        events.clock.sleep(UNTIL_MEMORY_GOES_S + ROUNDING_S)
        monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("waited"))
        one.empty_cache()

    assert events.names == [CLEARED, EMPTIED]
