"""The size of the scratch that a graph's recordings at several sizes allocate: the same for all.

PyTorch's allocator keeps the memory of a call for the next one. Scratch of a larger size would not fit into the memory that a smaller one
has left. So with a size for each recording, the allocator would end up with memory for each.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.replay.replay import Replay


IN_ONE_PIECE_FROM = 64 << 20
"""Bytes of scratch from which on it is worth while to keep free memory for it in one piece."""


class SharedScratch:
    """Has all recordings of one graph allocate as much scratch as the one that needs the most. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may call a graph while this thread holds it
        # Weak, as models that go say nothing. No `WeakSet`, of which a handler that adds a recording would end an iteration.
        self._replays: set[weakref.ref[Replay]] = set()
        self.bytes = 0
        """Bytes of scratch that a call allocates: what the largest of the recordings needs."""
        self._told: int | None = 0
        """What all recordings have been told; None: an interrupt, or a call under way, has kept some from that."""

    def add(self, replay: Replay) -> None:
        """Let a recording take part, unless its scratch is in pieces. It waits for calls of the others that are under way."""
        if replay.scratch_bytes:
            with self._lock:
                self._replays.add(weakref.ref(replay))
            self.settle(replay)

    def remove(self, replay: Replay) -> None:
        """Let a recording that was closed take part no more: the others then allocate what the largest of them needs."""
        with self._lock:
            self._replays.discard(weakref.ref(replay))
        self.settle()

    def settle(self, new: Replay | None = None) -> None:
        """Tell the recordings that are left if the largest one is another than before, and a `new` one in any case."""
        told, late = self._told, [] if new is None else [new]
        while True:
            with self._lock:
                live = self._live()
                self.bytes = size = max((each.scratch_bytes for each in live), default=0)
            # Another thread may have changed the size while this one told it, and may have been the first to do so.
            if size != told:
                late = live
            if not late:
                return
            # Not with the lock: a call that is waited for may be interrupted by a handler that adds a recording.
            self._told = None
            are_told = [_tell(each, size) for each in late]
            self._told = size if all(are_told) else None
            told, late = size, []

    @property
    def is_large(self) -> bool:
        """Whether free memory for it should be kept in one piece."""
        return self.bytes >= IN_ONE_PIECE_FROM

    def reserve(self, free_bytes: Callable[[], int], allocate_workspace: Callable[[], None]) -> None:
        """Have the allocator keep free memory for large scratch in one piece, if the device has as much.

        The next calls may run as KERNELS. The workspace that a BLAS library then allocates would lie amid memory that is large enough for
        the scratch, which the next replay would have to allocate beside it. So the workspace is allocated while the scratch is.
        """
        if not self.is_large or self.bytes > free_bytes():
            return
        with self._lock:
            live, size = self._live(), self.bytes
        if live:
            scratch = live[0].allocate_bytes(size)
            allocate_workspace()
            del scratch

    def _live(self) -> list[Replay]:
        found = [(each, each()) for each in list(self._replays)]
        self._replays.difference_update([each for each, replay in found if replay is None])
        return [replay for _, replay in found if replay is not None]


def _tell(replay: Replay, size: int) -> bool:
    # A handler or a finalizer may come within a call of the recording, which goes on with what it has allocated. It is told later.
    if replay.counts.is_held_here():
        return False
    replay.allocate_scratch(max(size, replay.scratch_bytes))
    return True
