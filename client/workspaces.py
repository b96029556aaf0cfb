"""Giving back what the BLAS libraries and the allocator keep, beside threads that may be about to use it.

torch has one call that gives back the workspaces of all threads. A thread looks its own up and then launches a kernel with it, without
Python's lock: where that memory goes back to the device in between, the kernel's access is illegal, and ends the process.
"""

from __future__ import annotations

import math
import threading
import time

import torch

from pygraphd.client import _torch

ABOUT_TO_LAUNCH_S = 0.002
"""A thread that has looked up its workspace launches its kernel within microseconds, unless it is not run."""


class Workspaces:
    """Those of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cleared_at = -math.inf

    def clear(self) -> None:
        """Have the libraries give back the workspaces of all threads, and let those launch that were told of one."""
        with self._lock:
            _torch.clear_workspaces()
            self._cleared_at = time.monotonic()
            self._let_others_launch()

    def empty_cache(self) -> None:
        """Give memory that the allocator has free back to the device."""
        with self._lock:
            self._let_others_launch()
            _torch.empty_cache()

    def _let_others_launch(self) -> None:
        left = self._cleared_at + ABOUT_TO_LAUNCH_S - time.monotonic()
        # Each device has a thread of its own for backwards, of which Python does not know.
        if left > 0 and (threading.active_count() > 1 or torch.cuda.device_count() > 1):
            time.sleep(left)


workspaces = Workspaces()
