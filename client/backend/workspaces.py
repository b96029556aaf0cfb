"""Giving back what the BLAS libraries and the allocator keep, beside threads that may be about to use it.

torch has one call that gives back the workspaces of all threads. A thread looks its own up and then launches kernels with it, without
Python's lock. Where that memory goes to other tensors in between, results are wrong; where it goes back to the device, and is not taken
from there anew, the access is illegal and ends the process. How long a thread takes for that nobody can tell: it is given time.
"""

from __future__ import annotations

import math
import threading
import time

import torch

from pygraphd.client.backend import torch_private

ABOUT_TO_LAUNCH_S = 0.002
"""After workspaces were given back, until anything else is done: a thread that has looked its own up launches within microseconds."""
UNTIL_MEMORY_GOES_S = 0.02
"""And until memory leaves the device: the library may have to load a kernel in between, or the thread not be run."""
OURS = "pygraph-"
"""Begins the names of threads that launch nothing."""


class Workspaces:
    """Those of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cleared_at = -math.inf

    def clear(self) -> None:
        """Have the libraries give back the workspaces of all threads, and let those launch that were told of one."""
        with self._lock:
            torch_private.clear_workspaces()
            self._cleared_at = time.monotonic()
            self._let_others_launch(ABOUT_TO_LAUNCH_S)

    def empty_cache(self) -> None:
        """Give memory that the allocator has free back to the device."""
        with self._lock:
            self._let_others_launch(UNTIL_MEMORY_GOES_S)
            torch_private.empty_cache()

    def _let_others_launch(self, seconds: float) -> None:
        left = self._cleared_at + seconds - time.monotonic()
        if left > 0 and _are_others():
            time.sleep(left)


def _are_others() -> bool:
    # Each device has a thread of its own for backwards, of which Python does not know.
    if torch.cuda.device_count() > 1:
        return True
    return sum(not each.name.startswith(OURS) for each in threading.enumerate()) > 1


workspaces = Workspaces()
