"""Frees the workspaces of BLAS libraries and the allocator's cache, while other threads may be about to use a workspace.

torch frees the workspaces of all threads in one call. A thread looks up its workspace and then launches kernels with it, without
Python's lock. If that memory goes to another tensor in between, results are wrong. If it goes back to the device, the access is illegal
and ends the process. torch does not say when a thread has launched, so other threads are given time.
"""

from __future__ import annotations

import math
import threading
import time

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.allocator_counts import allocator_counts

ABOUT_TO_LAUNCH_S = 0.002
"""Seconds to wait after freeing workspaces: a thread that has looked up its workspace launches within microseconds."""
UNTIL_MEMORY_GOES_S = 0.02
"""Seconds from freeing workspaces until memory may go back to the device: a library may load a kernel first, or the thread not run."""
OURS = "pygraph-"
"""Prefix of the names of PyGraph's threads, which launch nothing."""
FEEDERS = ("(_pin_memory_loop)", "QueueFeederThread")
"""Ends of the names of threads that launch nothing either: a DataLoader's that pins memory, and those that fill a queue of `multiprocessing`."""
MONITOR = "tqdm._monitor"
"""The module of the class of a thread that draws progress bars. A program that has shown one, as many loaders do, has the thread for good."""


class Workspaces:
    """The workspaces of this process. Thread-safe; both methods may sleep for some milliseconds."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call a graph while this thread sleeps
        self._cleared_at = -math.inf

    def clear(self) -> None:
        """Free the workspaces of all threads, and give threads that have looked up a workspace time to launch."""
        with self._lock:
            before = _freed_bytes()
            torch_private.clear_workspaces()
            if _freed_bytes() == before:
                return  # there was no workspace that a thread could have looked up
            self._cleared_at = time.monotonic()
            self._let_others_launch(ABOUT_TO_LAUNCH_S)

    def empty_cache(self) -> None:
        """Give the allocator's cached memory back to the device."""
        with self._lock:
            self._let_others_launch(UNTIL_MEMORY_GOES_S)
            torch_private.empty_cache()

    def _let_others_launch(self, seconds: float) -> None:
        left = self._cleared_at + seconds - time.monotonic()
        if left > 0 and _are_others():
            time.sleep(left)


def _freed_bytes() -> dict[int, int]:
    """Return how many bytes PyTorch's allocator has freed so far, by device. Where it has no memory, there is no workspace to be freed."""
    every = {each: allocator_counts(each) for each in range(torch.cuda.device_count())}
    return {device: counts.freed_so_far for device, counts in every.items() if counts.reserved}


def _are_others() -> bool:
    # With several devices in use, autograd has a thread for each that Python does not list.
    if len(_freed_bytes()) > 1:
        return True
    # One may be this thread, or in a backward, whose thread Python does not list, the one that waits for it.
    harmless = torch_private.threads_that_compile()
    return sum(each not in harmless and _may_launch(each) for each in threading.enumerate()) > 1


def _may_launch(thread: threading.Thread) -> bool:
    is_ours_or_feeds = thread.name.startswith(OURS) or thread.name.endswith(FEEDERS)
    return not is_ours_or_feeds and type(thread).__module__ != MONITOR


workspaces = Workspaces()
