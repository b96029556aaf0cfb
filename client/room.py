"""Memory to run graphs launched beside captures of them, which keep their own: whether there is enough, and giving it back."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import torch

from pygraphd.client import policy
from pygraphd.client.workspaces import workspaces

MARGIN = 1.2
"""Free memory must exceed by this factor what is going to be needed."""
LIBRARIES = 64 << 20
"""Bytes that libraries take for their workspaces, which captures need not keep."""
HOLDS_S = 1.0
"""So long what was free is taken to be so."""
PROMISED_S = 60.0
"""So long a promise is kept: a look takes some two dozen steps, and those of large models take seconds."""


def why_not_beside(device: int) -> str | None:
    """Return why no step should be launched beside what is captured; what it takes beyond what is allocated now has been seen just before."""
    needed = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    free, _ = torch.cuda.mem_get_info(device)
    return policy.NO_MEMORY if needed * MARGIN > free else None


class Reserved:
    """What the allocator of one device has reserved before it is tried to run graphs otherwise than they do."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._bytes: int = torch.cuda.memory_reserved(device)

    def give_back(self) -> None:
        """Give back to the device what is free, if much more has been reserved meanwhile; not within a capture, which that would break."""
        with torch.cuda.device(self._device):
            is_captured = torch.cuda.is_current_stream_capturing()
        if not is_captured and torch.cuda.memory_reserved(self._device) - self._bytes > LIBRARIES:
            workspaces.empty_cache()


class Budget:
    """What launches of graphs that are looked at may take of one device, all at a time, in bytes."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._free = 0.0
        self._since = -math.inf
        self._promised: list[tuple[float, float]] = []
        """Until when, and how many bytes."""
        self._asking = threading.Lock()

    def why_not(self, needed: int) -> str | None:
        """Return why a graph should not be launched whose calls take as much as is `needed`; None: that is promised."""
        with self._asking:
            now = time.monotonic()
            if now - self._since > HOLDS_S:
                self._free, self._since = self._find_free(), now
            self._promised = [each for each in self._promised if each[0] > now]
            if needed * MARGIN > self._free - sum(size for _, size in self._promised):
                return policy.NO_MEMORY
            self._promised.append((now + PROMISED_S, needed * MARGIN))
            return None

    def _find_free(self) -> float:
        """Return what is free for all, without what PyTorch's trees have: their graphs take no more than that if they are launched."""
        free: int = torch.cuda.mem_get_info(self._device)[0]
        segments = [each for each in torch.cuda.memory_snapshot() if each["device"] == self._device]
        unused: int = sum(
            each["total_size"] - each["allocated_size"] for each in segments if _is_for_all(each)
        )
        private: int = sum(each["total_size"] for each in segments if not _is_for_all(each))
        return free + unused - MARGIN * (private + LIBRARIES)


def _is_for_all(segment: dict[str, Any]) -> bool:
    return tuple(segment["segment_pool_id"]) == (0, 0)
