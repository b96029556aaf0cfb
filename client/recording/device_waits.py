"""Finds out whether a process may wait for all work of its GPU, as recording and giving memory back do.

A receive that the program has posted ends when another rank sends. That rank may need work that this one has yet to launch. So a process
with other ranks waits only for a device that ends its work soon.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pygraphd.client.decisions.ranks.process_group import has_other_ranks

if TYPE_CHECKING:
    import threading

    from pygraphd.client.recording.capture import CudaRecorder

GPU_WAITS = "the GPU does not end its work, and may wait for another rank"
BACKLOG_S = 5.0
"""Seconds in which the current stream has to end its work, so that a process with other ranks may wait for the whole device."""
POLL_S = 0.0005
OTHER_STREAMS_S = 0.25
"""Seconds in which the other streams have to end theirs after that. Work that takes longer probably waits for another rank."""
WAITS_S = 5.0
"""Seconds for which the device is not asked again after that."""


class DeviceWaits:
    """Asks whether the work of one device ends soon."""

    def __init__(self, recorder: CudaRecorder, capturing: threading.RLock) -> None:
        """Ask about the device of `recorder`; `capturing` is held by whoever captures in this process."""
        self._recorder = recorder
        self._capturing = capturing
        self._waits_until = 0.0
        """The time of `time.monotonic` before which the device is taken to wait for another rank still."""

    def may_wait(self) -> bool:
        """Return whether all work of the device ends soon; True without other ranks. Takes up to 5.25 s."""
        if not has_other_ranks():
            return True
        # Each of many graphs would hold this rank up again. And to wait for the device would end another thread's capture.
        if time.monotonic() < self._waits_until or not self._capturing.acquire(blocking=False):
            return False
        try:
            with self._recorder.beside_captures():
                is_idle = not self._recorder.in_capture() and self._ends_soon()
        finally:
            self._capturing.release()
        self._waits_until = 0.0 if is_idle else time.monotonic() + WAITS_S
        return is_idle

    def _ends_soon(self) -> bool:
        ends, event = time.monotonic() + BACKLOG_S, self._recorder.mark()
        while not event.query():
            if time.monotonic() > ends:
                return False
            time.sleep(POLL_S)
        return self._recorder.is_idle_within(OTHER_STREAMS_S)
