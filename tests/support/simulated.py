"""A machine with two clocks, a host's and that of a GPU with a queue, in the place of CUDA's events and streams."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import pytest

KERNELS = 8
"""Kernels of a graph that runs as KERNELS: the GPU gets them one by one."""


class Machine:
    """A host, and a GPU that works through its queue; also the one stream there is."""

    cuda_stream = 7

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.host_us = self.free_us = 0.0
        patch.setattr(time, "perf_counter_ns", lambda: self.host_us * 1e3)
        patch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self))
        patch.setattr(torch.cuda, "current_stream", lambda device: self)
        patch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def query(self) -> bool:
        """Whether the GPU has done all that was queued."""
        return self.free_us <= self.host_us

    def submit(self, host_us: float, gpu_us: float) -> None:
        """Queue work that the host takes `host_us` to hand over."""
        self.host_us += host_us
        self.free_us = max(self.free_us, self.host_us) + gpu_us

    def run_kernels(self, host_us: float, gpu_us: float) -> None:
        """Queue the kernels of a graph one by one, as so many calls of `submit` would."""
        begins_us = max(self.free_us, self.host_us + host_us / KERNELS)
        self.host_us += host_us
        # The GPU never waits once it has begun, or else for the last kernel, too, since all take the same time.
        self.free_us = max(begins_us + gpu_us, self.host_us + gpu_us / KERNELS)

    def synchronize(self) -> None:
        """Wait for the GPU."""
        self.host_us = max(self.host_us, self.free_us)


class Event:
    """A `torch.cuda.Event` of that machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._at_us = 0.0

    def record(self, stream: Any) -> None:
        """Note when the GPU gets here."""
        assert stream is self._machine
        self._at_us = max(self._machine.free_us, self._machine.host_us)

    def query(self) -> bool:
        """Whether it has got here."""
        return self._at_us <= self._machine.host_us

    def elapsed_time(self, end: Event) -> float:
        """Return the milliseconds from here to `end`."""
        return (end._at_us - self._at_us) / 1e3
