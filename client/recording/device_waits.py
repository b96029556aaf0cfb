"""Finds out whether a process may wait for all work of its GPU, as recording and giving memory back do.

Work of the device may wait for what this thread does after the call: a receive that the program has posted, for a rank that needs work of
this one first; a stream, for a flag that the program sets. So a process waits only for a device that ends its work soon.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pygraphd.client.decisions.ranks.process_group import has_other_ranks

if TYPE_CHECKING:
    import threading

    from pygraphd.client.recording.capture import CudaRecorder

GPU_WAITS = "the GPU does not end its work, and may wait for another rank or the host"
BACKLOG_S = 5.0
"""Seconds in which the current stream has to end its work."""
POLL_S = 0.0005
OTHER_STREAMS_S = 0.25
"""Seconds in which the other streams have to end theirs after that. Work that takes longer probably waits for another rank."""
ALONE_S = 1.0
"""The same without other ranks, where it may also be the work of other threads."""
WAITS_S = 5.0
"""Seconds for which the device is not asked again after that: twice as many each time, up to `MAX_DOUBLINGS`."""
MAX_DOUBLINGS = 6


class DeviceWaits:
    """Asks whether the work of one device ends soon."""

    def __init__(self, recorder: CudaRecorder, capturing: threading.RLock) -> None:
        """Ask about the device of `recorder`; `capturing` is held by whoever captures in this process."""
        self._recorder = recorder
        self._capturing = capturing
        self._failures = 0
        self._waits_until = 0.0
        """The time of `time.monotonic` before which the device is taken to wait still."""

    def may_wait(self) -> bool:
        """Return whether all work of the device ends soon. Takes up to 6 s, and without other ranks the time of another thread's capture."""
        if time.monotonic() < self._waits_until:
            return False
        # To wait for the device would end another thread's capture.
        if not has_other_ranks():
            with self._capturing:
                return self._ask(ALONE_S)
        # Other ranks may need this thread before such a capture ends.
        if not self._capturing.acquire(blocking=False):
            return False
        try:
            return self._ask(OTHER_STREAMS_S)
        finally:
            self._capturing.release()

    def _ask(self, other_streams_s: float) -> bool:
        # Each of many graphs, and each thread that has waited for the lock, would hold the program up again.
        if time.monotonic() < self._waits_until or self._recorder.in_capture():
            return False
        with self._recorder.beside_captures():
            is_idle = self._ends_soon(other_streams_s)
        pause_s = WAITS_S * 2 ** min(self._failures, MAX_DOUBLINGS)
        self._waits_until = 0.0 if is_idle else time.monotonic() + pause_s
        self._failures = 0 if is_idle else self._failures + 1
        return is_idle

    def _ends_soon(self, other_streams_s: float) -> bool:
        ends, event = time.monotonic() + BACKLOG_S, self._recorder.mark()
        while not event.query():
            if time.monotonic() > ends:
                return False
            time.sleep(POLL_S)
        return self._recorder.is_idle_within(other_streams_s)
