"""Clocks that tests move: what takes its time from them takes as long on every machine."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

LONG_AFTER_S = 1e9


class SteppedClock:
    """A clock that stands still until somebody sleeps; may be used by several threads.

    Its `now` stands for `time.monotonic` or `time.perf_counter`, its `sleep` for `time.sleep`.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the seconds that have been slept."""
        return self._seconds

    def sleep(self, seconds: float) -> None:
        """Let time pass at once."""
        with self._lock:
            self._seconds += seconds


class LateOnce:
    """Stands for the module `time` where a limit is watched: all limits are over once something has come, and none before."""

    def __init__(self, has_come: Callable[[], bool]) -> None:
        self._has_come = has_come

    def monotonic(self) -> float:
        """Return the beginning of time, or its end."""
        return LONG_AFTER_S if self._has_come() else 0.0


class Ticking:
    """Stands for the module `time` where a limit is watched: time passes each time that somebody looks, and not otherwise."""

    def __init__(self, tick_s: float) -> None:
        self._now = time.monotonic()
        self._tick_s = tick_s

    def monotonic(self) -> float:
        """Return a time that is a tick later than the last."""
        self._now += self._tick_s
        return self._now
