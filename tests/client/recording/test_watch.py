"""A replay that waits for another rank for too long ends the process; nothing else does."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.recording.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    watch.note(60.0)
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
    watch.note(600.0)
    now = time.monotonic()

    watch.poll(now + 599)
    assert ended == []
    watch.poll(now + 601)

    assert ended == [600.0]


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

    watch.note(60.0)
    watch.poll(time.monotonic() + 1000)

    assert (event.recorded, event.asked, ended) == (0, 0, [])


def test_a_replay_that_is_noted_meanwhile_has_all_of_its_time(ended: list[float]) -> None:
    event = Event()
    watch = Watch(event, event.relaxed, lambda: False, ended.append)
    watch.begin(60.0)
    watch.note(60.0)
    later = time.monotonic() + 61
    event.query = lambda: watch.note(60.0)  # type: ignore[assignment, method-assign, return-value]

    watch.poll(later)

    assert ended == []
