"""Memory that a forward's saved activations keep from step to step: handed out again only when nobody can see it any more.

An output that user code can see never lies in such memory: work on another stream may still read what Python has dropped, and
only the allocator knows of that. What autograd saves for the backward is seen by the backward alone. Which outputs these are is
observed in a real step (`Link`), and kept to the graph that was observed.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client import _torch
from pygraphd.client.outputs import Part
from pygraphd.client.relocation import BLOCK, blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pygraphd.client._torch import Allocator, Runnable
    from pygraphd.client.outputs import Outputs
    from pygraphd.client.replay import Memory, Replay

MAX_SETS = 4
"""Forwards of one recording that may wait for their backward with recycled memory; more take theirs from the allocator."""
IDLE_CALLS = 64
"""Calls after which a set that was not needed is given back."""
MAX_OBSERVATIONS = 32
"""Steps in which a forward and its backward may be observed together; then it is left as it is."""


class Saved:
    """One set of memory, and every tensor that is ever made of it."""

    def __init__(
        self, number: int, arena: torch.Tensor, memory: list[Any], made: list[Any], stream: int
    ) -> None:
        """Take over `memory` and `made`, with None for what is not of this set."""
        self.number = number
        self.memory = memory
        self.made = made
        self.stream = stream
        self.last_use = 0
        self._arena = arena
        self._storage = arena.untyped_storage()
        self._tensors = [each for each in (*memory, *made) if each is not None]

    def rest(self) -> None:
        """Note what nobody else holding any of it looks like; to be called when that is so."""
        self._storage_uses = _torch.storage_uses(self._storage)
        self._uses = list(map(_torch.tensor_uses, self._tensors))
        self._references = list(map(sys.getrefcount, self._tensors))

    def in_use(self) -> bool:
        """Whether anybody holds any of it: another tensor over the same memory, a C++ reference, a Python one."""
        return (
            _torch.storage_uses(self._storage) != self._storage_uses
            or list(map(_torch.tensor_uses, self._tensors)) != self._uses
            or list(map(sys.getrefcount, self._tensors)) != self._references
        )


class Recycler:
    """The sets of one recording. All calls are made under the recording's lock."""

    def __init__(
        self, memories: Sequence[Memory], outputs: Outputs, slots: Collection[int], allocate: Allocator
    ) -> None:
        """Recycle the given slots of `memories`; `outputs` are those of the recording."""
        self._memories = memories
        self._slots = sorted(slots)
        self._outputs = outputs
        self._allocate = allocate
        self.fresh = tuple(slot for slot in range(len(memories)) if slot not in slots)
        """The slots whose memory comes from the allocator at each call."""
        self.making = outputs.making(
            index for index, output in enumerate(outputs.made) if not self._is_recycled(output)
        )
        """Makes what is to be made at each call."""
        self._sets: list[Saved] = []
        self._made = 0
        self._calls = 0

    def __len__(self) -> int:
        """Return how many sets there are."""
        return len(self._sets)

    def take(self, stream: int) -> Saved | None:
        """Return a set that nobody holds, for a call on `stream`; None if all are held. May raise OutOfMemoryError."""
        self._calls += 1
        for saved in self._sets:
            # What is read on one stream must not be written on another: the order of work would not be known.
            if saved.stream == stream and not saved.in_use():
                saved.last_use = self._calls
                self._drop_idle()
                return saved
        return self._make(stream) if len(self._sets) < MAX_SETS else None

    def _drop_idle(self) -> None:
        if self._calls % IDLE_CALLS == 0:
            self._sets = [each for each in self._sets if each.last_use > self._calls - IDLE_CALLS]

    def _make(self, stream: int) -> Saved:
        offsets, size = [], 0
        for slot in self._slots:
            offsets.append(size)
            size += blocks(self._memories[slot].bytes) * BLOCK
        arena = self._allocate((size,), (1,), torch.uint8)
        memory: list[Any] = [None] * len(self._memories)
        for slot, offset in zip(self._slots, offsets, strict=True):
            shape = self._memories[slot]
            start = offset // shape.dtype.itemsize
            memory[slot] = _torch.reinterpret(arena, shape.dtype, shape.size, shape.stride, start)
        made = [each.make((), memory) if self._is_recycled(each) else None for each in self._outputs.made]
        self._made += 1
        saved = Saved(self._made, arena, memory, made, stream)
        del arena, memory, made
        saved.rest()
        saved.last_use = self._calls
        self._sets.append(saved)
        return saved

    def _is_recycled(self, output: object) -> bool:
        return isinstance(output, Part) and output.memory in self._slots


class Link:
    """What is observed of a forward and its backward, until it is known which of the forward's outputs only the latter sees."""

    def __init__(self) -> None:
        self.pending = False
        """Whether there is anything to be observed."""
        self._left = 0
        self._call = threading.local()
        # Slots that may be recycled, by where their memory begins in the latest call.
        self._candidates: dict[int, tuple[weakref.ref[Replay], int]] = {}

    def arm(self) -> None:
        """Begin to observe, or go on: there is a new recording."""
        self.pending = _torch.missing_for_recycling() is None
        self._left = MAX_OBSERVATIONS

    def replayed(self, replay: Replay, slots: dict[int, int]) -> None:
        """Note that the forward under way is this replay, and where the slots of its outputs begin."""
        self._call.replays = [*getattr(self._call, "replays", ()), (replay, slots)]

    def forward_returned(self, outputs: Sequence[Any]) -> None:
        """Note all outputs of a forward."""
        replays = getattr(self._call, "replays", ())
        self._call.replays = ()
        if not replays:
            return  # launched
        returned = _torch.forward_returns()
        if returned is None:
            self.pending = False
            return
        visible = _storages(outputs[:returned])
        saved = _storages(outputs[returned:])
        self._candidates = {
            base: (weakref.ref(replay), slot)
            for replay, slots in replays
            for base, slot in slots.items()
            if base in saved and base not in visible
        }

    def backward_returned(self, inputs: Collection[int], outputs: Sequence[Any]) -> None:
        """Note the storages of a backward's inputs, by where they begin, and all of its outputs."""
        given_away = _storages(outputs)
        found: dict[weakref.ref[Replay], set[int]] = {}
        for base, (replay, slot) in self._candidates.items():
            if base in inputs and base not in given_away:
                found.setdefault(replay, set()).add(slot)
        self._candidates = {}
        for reference, slots in found.items():
            if (replay_found := reference()) is not None:
                replay_found.recycle(slots)
        self._left -= 1
        self.pending = self.pending and self._left > 0 and not found


def _storages(values: Sequence[Any]) -> frozenset[int]:
    """Return where the storages of tensors begin."""
    return frozenset(
        value.untyped_storage().data_ptr() for value in values if isinstance(value, torch.Tensor)
    )


def watch(compiled: Any, link: Link, *, is_backward: bool) -> None:
    """Have a compiled forward or backward be observed as long as there is anything to be seen."""
    watched = _watched_backward if is_backward else _watched_forward
    compiled.current_callable = watched(compiled.current_callable, link)


def _watched_forward(run: Runnable, link: Link) -> Runnable:
    def run_watched(inputs: list[Any]) -> Any:
        outputs = run(inputs)
        if link.pending:
            link.forward_returned(outputs)
        return outputs

    return run_watched


def _watched_backward(run: Runnable, link: Link) -> Runnable:
    def run_watched(inputs: list[Any]) -> Any:
        if not link.pending:
            return run(inputs)
        before = _storages(inputs)
        outputs = run(inputs)
        link.backward_returned(before, outputs)
        return outputs

    return run_watched
