"""A clock that stands still until somebody sleeps: what takes its time from it takes as long on every machine."""

from __future__ import annotations

import threading


class SteppedClock:
    """Its `now` stands for `time.monotonic` or `time.perf_counter`, its `sleep` for `time.sleep`. For several threads."""

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
