"""Ends a process whose replay waits for another rank for longer than its process group would.

c10d has a watchdog that ends a process whose collective takes too long, as when another rank has died. It does not see replays.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from pygraphd.client.common import log

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable

SWITCHES = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
"""The variable of c10d's watchdog, and its former name, which c10d still reads."""
LONGEST_PAUSE_S = 10.0
"""Longest time in seconds between two polls; it is a tenth of the time-out where that is less."""
MESSAGE = "a CUDA graph with collectives has waited {:g} s for another rank: the process ends, as it does without PyGraph"


def end_process(timeout_s: float) -> None:
    """Write a message, and end the process by SIGABRT as c10d's watchdog does."""
    log.say(MESSAGE.format(timeout_s), is_logged=True)
    os.kill(os.getpid(), signal.SIGABRT)


class Watch:
    """Watches the latest replay on one device. `note` takes about a microsecond; the event is queried only after the time-out."""

    def __init__(
        self,
        event: Any,
        relaxed: Callable[[], contextlib.AbstractContextManager[None]],
        in_capture: Callable[[], bool],
        end: Callable[[float], object] = end_process,
    ) -> None:
        """Record `event`, a CUDA event, after each replay. It is queried in a context of `relaxed`, since another thread may be capturing."""
        self._event = event
        self._relaxed = relaxed
        self._in_capture = in_capture
        self._end = end
        self._timeout_s: float | None = None
        self._latest: tuple[float, Callable[[], float]] | None = None
        """The time at which the latest replay was launched, and what returns its time-out, in seconds."""

    def begin(self, timeout_s: float) -> None:
        """Watch the replays that are noted from now on. `timeout_s` is the time-out of one group, by which the pauses between polls are chosen."""
        if any(os.environ.get(each) == "0" for each in SWITCHES):
            return  # the user has switched c10d's watchdog off
        before, self._timeout_s = self._timeout_s, min(timeout_s, self._timeout_s or timeout_s)
        if before is None:
            target, mine = _poll_until_gone, weakref.ref(self)
            threading.Thread(target=target, args=(mine,), name="pygraph-watch", daemon=True).start()

    def note(self, timeout_s: Callable[[], float] | None) -> None:
        """Note a call on the current stream. Raises nothing.

        `timeout_s` returns the present time-out of the call's group in seconds, which the program may change at any time. It is called
        by `poll`, in a thread of its own. It is None until there is a recording; from then on, calls as KERNELS are noted as well.
        """
        if timeout_s is not None and self._timeout_s is not None and not self._in_capture():
            self._latest = time.monotonic(), timeout_s  # before the event, which may be queried at any time
            try:
                self._event.record()
            except Exception:  # noqa: BLE001 - an error of the user's, which their next CUDA call raises again
                self._latest = None

    def poll(self, now: float) -> float:
        """End the process if the latest replay has not ended in time; return the seconds until the next poll."""
        latest = self._latest
        if latest is not None and now - latest[0] >= (timeout_s := latest[1]()):
            with self._relaxed():
                is_done = self._event.query()
            # A replay that was noted meanwhile has recorded the event anew, and has all of its time.
            if latest is self._latest:
                self._latest = None
                if not is_done:
                    self._end(timeout_s)
        return min((self._timeout_s or LONGEST_PAUSE_S) / 10, LONGEST_PAUSE_S)


def _poll_until_gone(watch: weakref.ref[Watch]) -> None:
    while (it := watch()) is not None:
        try:
            pause_s = it.poll(time.monotonic())
        except Exception:  # noqa: BLE001 - the GPU has an error, which ends the replay
            return
        # The thread ends with what it watches, and must not keep that alive while it sleeps.
        del it
        time.sleep(pause_s)
