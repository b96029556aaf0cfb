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
from pygraphd.client.arena import lay_out
from pygraphd.client.outputs import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pygraphd.client._torch import Allocator, Runnable
    from pygraphd.client.bulk import Bulk
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
        self,
        arena: torch.Tensor,
        memory: list[Any],
        made: list[Any],
        tensors: list[torch.Tensor],
        stream: int,
        bulk: Bulk,
    ) -> None:
        """Take over `memory` and `made`, of which `tensors` are of this set; the rest is made at each call."""
        self.memory = memory
        self.made = made
        self.stream = stream
        self.last_use = 0
        self._count_references, self._same_references = bulk.references, bulk.same_references
        self._arena = arena
        self._storage = arena.untyped_storage()
        self._uses = _torch.storage_uses(self._storage)
        self._tensors = tensors

    @property
    def place(self) -> tuple[int, int]:
        """Where its memory begins, and how many bytes it has."""
        return self._arena.data_ptr(), self._arena.nbytes

    def rest(self) -> None:
        """Note what nobody else holding any of it looks like; to be called when that is so."""
        self._storage_uses = self._uses()
        self._storage_references = sys.getrefcount(self._storage)
        self._references = self._count_references(self._tensors)

    def in_use(self) -> bool:
        """Whether anybody holds any of it: another tensor over the same memory, a reference from Python or (one is seen) C++."""
        # Whoever asks a tensor for its storage gets the very object that is kept here.
        return (
            self._uses() != self._storage_uses
            or sys.getrefcount(self._storage) != self._storage_references
            or not self._same_references(self._tensors, self._references)
        )


class Recycler:
    """The sets of one recording."""

    def __init__(
        self,
        memories: Sequence[Memory],
        outputs: Outputs,
        slots: Collection[int],
        allocate: Allocator,
        trim: Callable[[], None],
        bulk: Bulk,
    ) -> None:
        """Recycle the given slots of `memories`; `outputs` are those of the recording; `trim` gives free memory back."""
        self._bulk = bulk
        self._memories = memories
        self._slots = sorted(slots)
        self._outputs = outputs
        self._allocate = allocate
        self._trim = trim
        self.fresh = tuple(slot for slot in range(len(memories)) if slot not in slots)
        """The slots whose memory comes from the allocator at each call."""
        anew = [index for index, output in enumerate(outputs.made) if not self._is_recycled(output)]
        self.making = outputs.making(anew, bulk)
        """Makes what is to be made at each call."""
        self._sets: list[Saved] = []
        self._calls = 0
        self._lock = threading.Lock()
        _all.add(self)

    def __len__(self) -> int:
        """Return how many sets there are."""
        return len(self._sets)

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots whose memory is kept."""
        return tuple(self._slots)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Where the memory of each set begins, and how many bytes it has."""
        return tuple(each.place for each in list(self._sets))

    def take(self, stream: int) -> Saved | None:
        """Return a set that nobody holds, for a call on `stream`; None if all are held. May raise OutOfMemoryError."""
        with self._lock:
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

    def release(self) -> None:
        """Give back every set that nobody holds."""
        with self._lock:
            self._sets = [each for each in self._sets if each.in_use()]

    def _make(self, stream: int) -> Saved:
        # What the saved activations had before is in pieces, and would be kept beside the arena.
        self._trim()
        arena, tensors = lay_out(
            [self._memories[slot] for slot in self._slots],
            lambda size: self._allocate((size,), (1,), torch.uint8),
        )
        memory: list[Any] = [None] * len(self._memories)
        for slot, tensor in zip(self._slots, tensors, strict=True):
            memory[slot] = tensor
        del tensors, tensor
        made = self._outputs.blank()
        recycled = [index for index, each in enumerate(self._outputs.made) if self._is_recycled(each)]
        for index in recycled:
            made[index] = self._outputs.made[index].make((), memory)
        tensors = [*(memory[slot] for slot in self._slots), *(made[index] for index in recycled)]
        saved = Saved(arena, memory, made, tensors, stream, self._bulk)
        del arena, memory, made, tensors
        saved.rest()
        saved.last_use = self._calls
        self._sets.append(saved)
        return saved

    def _is_recycled(self, output: object) -> bool:
        return isinstance(output, Part) and output.memory in self._slots


_all: weakref.WeakSet[Recycler] = weakref.WeakSet()


def release_all() -> None:
    """Give back all sets of the process that nobody holds; to be called when memory is short."""
    for each in list(_all):
        each.release()


class Link:
    """What is observed of a forward and its backward, until it is known which of the forward's outputs only the latter sees."""

    def __init__(self) -> None:
        self.pending = False
        """Whether there is anything to be observed."""
        self.wanted = True
        """Whether the forward is relocated, or may be: otherwise there is no memory to be kept."""
        self._left = 0
        self._unobserved: weakref.WeakSet[Replay] = weakref.WeakSet()
        self._latest: list[weakref.ref[Replay]] = []
        self._call = threading.local()
        # Slots that may be recycled, by where their memory begins in the latest call.
        self._candidates: dict[int, tuple[weakref.ref[Replay], int]] = {}

    def arm(self, replay: Replay | None = None) -> None:
        """Begin to observe, or go on: there is a new recording."""
        if replay is not None:
            self._unobserved.add(replay)
        self.pending = self.wanted and _torch.missing_for_recycling() is None
        self._left = MAX_OBSERVATIONS

    def forward_begins(self) -> None:
        """Forget what an earlier forward of this thread has left, which may not have come to its end."""
        self._call.replays = []

    def replayed(self, replay: Replay, outputs: Sequence[Any]) -> None:
        """Note that a part of the forward under way is this replay, and what it has returned."""
        if self.pending and getattr(self._call, "replays", None) is not None:
            self._call.replays.append((weakref.ref(replay), replay.slots_of(outputs)))

    def forward_returned(self, outputs: Sequence[Any]) -> None:
        """Note all outputs of a forward."""
        replays, self._call.replays = self._call.replays, None
        self._candidates = {}
        self._latest = [replay for replay, _ in replays or ()]
        self._observe()
        # With hooks, the backward gets other tensors than the forward saved, and they may lie where those lay.
        if not replays or _torch.saved_tensors_are_seen():
            return
        returned = _torch.forward_returns()
        if returned is None:
            self.pending = False
            return
        visible = _storages(outputs[:returned])
        saved = _storages(outputs[returned:])
        self._candidates = {
            base: (replay, slot)
            for replay, slots in replays
            for base, slot in slots.items()
            if base in saved and base not in visible
        }

    def _observe(self) -> None:
        self._left -= 1
        self.pending = self.pending and self._left > 0

    def backward_returned(self, inputs: Collection[int], outputs: Sequence[Any]) -> None:
        """Note where the storages of a backward's inputs began, and all of its outputs."""
        given_away = _storages(outputs)
        found: dict[weakref.ref[Replay], set[int]] = {}
        for base in inputs:
            if base in self._candidates and base not in given_away:
                replay, slot = self._candidates[base]
                found.setdefault(replay, set()).add(slot)
        self._candidates = {}
        for reference, slots in found.items():
            if (replay_found := reference()) is not None:
                replay_found.recycle(slots)
        if found:
            self._end_with(self._latest)

    def _end_with(self, replays: Sequence[weakref.ref[Replay]]) -> None:
        """Observe no more if these were the last: a forward has one of each dynamic size."""
        for reference in replays:
            if (replay := reference()) is not None:
                self._unobserved.discard(replay)
        self.pending = self.pending and len(self._unobserved) > 0


def _storages(values: Sequence[Any]) -> frozenset[int]:
    """Return where the storages of tensors begin."""
    return frozenset(
        value.untyped_storage().data_ptr() for value in values if isinstance(value, torch.Tensor)
    )


class Watched:
    """A compiled forward or backward, `wrapped`, that is observed as long as there is anything to be seen."""

    def __init__(self, wrapped: Runnable, link: Link, *, is_backward: bool) -> None:
        self.wrapped = wrapped
        self._link = link
        # To keep a bound method would keep this object, and the model, until garbage is collected.
        self._is_backward = is_backward

    def __call__(self, inputs: list[Any]) -> Any:  # noqa: D102 - see the class
        if not self._link.pending:
            return self.wrapped(inputs)
        return self._backward(inputs) if self._is_backward else self._forward(inputs)

    def _forward(self, inputs: list[Any]) -> Any:
        self._link.forward_begins()
        outputs = self.wrapped(inputs)
        self._guarded(lambda: self._link.forward_returned(outputs))
        return outputs

    def _backward(self, inputs: list[Any]) -> Any:
        before: Any = self._guarded(lambda: _storages(inputs)) or frozenset()
        outputs = self.wrapped(inputs)
        self._guarded(lambda: self._link.backward_returned(before, outputs))
        return outputs

    def _guarded(self, action: Callable[[], Any]) -> Any:
        # It looks at what is on the stack, which may be of any kind; the user's call has its result already.
        try:
            return action()
        except Exception:  # noqa: BLE001
            self._link.pending = False
            return None


def watch(compiled: Any, link: Link, *, is_backward: bool) -> None:
    """Have a compiled forward or backward be observed."""
    compiled.current_callable = Watched(compiled.current_callable, link, is_backward=is_backward)


def unwatch(compiled: Any) -> bool:
    """Stop observing a compiled forward or backward; return whether nothing of ours is in the way of its calls any more."""
    if not isinstance(compiled.current_callable, Watched):
        return False
    compiled.current_callable = compiled.current_callable.wrapped
    return True
