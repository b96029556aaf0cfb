"""The size of the scratch that a graph's recordings at several sizes allocate: the same for all.

PyTorch's allocator keeps the memory of a call for the next one. Scratch of a larger size would not fit into the memory that a smaller one
has left. So with a size for each recording, the allocator would end up with memory for each.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from pygraphd.client.replay.replay import Replay


IN_ONE_PIECE_FROM = 64 << 20
"""Bytes of scratch from which on it is worth while to keep free memory for it in one piece."""


class SharedScratch:
    """Has all recordings of one graph allocate as much scratch as the one that needs the most. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call a graph while this thread holds it
        # Weak: a recording that is dropped is not asked to allocate any more.
        self._replays: weakref.WeakSet[Replay] = weakref.WeakSet()
        self.bytes = 0
        """Bytes of the largest scratch so far."""

    def add(self, replay: Replay) -> None:
        """Let a recording take part, unless its scratch is in pieces. It waits for calls of the others that are under way."""
        with self._lock:
            needed = replay.scratch_bytes
            if not needed:
                return
            self._replays.add(replay)
            grown = [*self._replays] if needed > self.bytes else [replay]
            self.bytes = max(self.bytes, needed)
            for each in grown:
                each.allocate_scratch(self.bytes)

    @property
    def is_large(self) -> bool:
        """Whether free memory for it should be kept in one piece."""
        return self.bytes >= IN_ONE_PIECE_FROM

    def allocate(self) -> torch.Tensor | None:
        """Allocate the scratch of one call; return None if no recording is left."""
        with self._lock:
            replay, size = next(iter(self._replays), None), self.bytes
        return replay.allocate_bytes(size) if replay is not None else None
