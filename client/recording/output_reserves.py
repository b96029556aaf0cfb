"""Memory that a capture sets aside for the storages of its outputs, so that nothing else ever lies there.

PyTorch's allocator gives the memory of dead temporaries to what comes next, outputs among them. What overlaps in a capture has to lie
together in each replay, and two outputs would share a storage. So where outputs overlap with anything, the call is captured again with
a *room* for each storage, allocated before the callable runs. Inductor's code is handed the room at the allocation that made that
storage before; what a library has allocated is copied into its room by a node of the graph.

All memory of such a capture is cut from one *ground*, allocated first and freed at once. The allocator joins what is free within a segment
only: temporaries that grow, as in a backward, would otherwise each lie in another one, and a replay needs room for all of that at once.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.recording.alias_sets import Clusters
from pygraphd.client.replay.node_params import OpaqueError
from pygraphd.client.replay.relocation_table import BLOCK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.backend.torch_private import Allocator
    from pygraphd.client.recording.builder import Capture

ROUNDS = 5
"""Captures of one call at most; in the last one, every output has a room."""
SPARE = 4
"""One part in so many of what a capture has used is added for the next one: its outputs lie where no temporary does."""
LARGE = (1 << 20) + BLOCK
"""Bytes from which on something is cut from the ground: PyTorch has smaller tensors in memory of their own."""


@dataclass(frozen=True, slots=True)
class Room:
    """A storage of so many bytes, of which these `outputs` are made, by index.

    `maker` is the allocation of Inductor's code that makes it, counted from 0; None: it is copied there.
    """

    size: int
    outputs: tuple[int, ...]
    maker: int | None


def rooms_for(capture: Capture, *, for_all: bool = False) -> tuple[Room, ...]:
    """Return the rooms to capture a call with, in view of a capture of it; the same ones if all its outputs lie apart.

    Raises `OpaqueError`.
    """
    clusters = Clusters(capture)
    tangled = clusters.tangled
    if not tangled:
        return capture.rooms
    makers = {address: number for number, address in enumerate(capture.made)}
    before = {room.outputs for room in capture.rooms}
    return tuple(
        Room(storage.size, outputs, makers.get(storage.start))
        for storage, outputs in clusters.storages.items()
        if for_all or storage in tangled or storage.start in makers or outputs in before
    )


def ground_for(capture: Capture) -> int:
    """Return how many bytes to cut the next capture of a call from, in view of this one; 0 if it is to allocate as it goes.

    What stays in place would keep all of the segment that it lies in.
    """
    if any(span.size >= LARGE for span in capture.held):
        return 0
    used = capture.bytes
    return capture.ground or used + used // SPARE


def bytes_of(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Return how many bytes a storage needs for a tensor."""
    if 0 in size:
        return 0
    itemsize: int = dtype.itemsize
    return (sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1) * itemsize


class Rooms:
    """The rooms of one capture, on its device."""

    def __init__(
        self, rooms: Sequence[Room], device: torch.device, shifts: Sequence[int] = (), ground: int = 0
    ) -> None:
        """Allocate them, on a ground of so many bytes if these can be had, behind so many bytes each that are in nobody's way."""
        self._rooms, self._device = rooms, device
        self.before = len(shifts)
        """How many allocations there are before those of the capture itself."""
        if ground >= LARGE:
            with contextlib.suppress(torch.OutOfMemoryError):
                self.storage(ground)  # gone at once: what comes next is cut from it
                self.before += 1
        self._in_the_way = [self.storage(size) for size in shifts]
        self._storages = [self.storage(room.size) for room in rooms]
        self._made_by = {
            room.maker: storage
            for room, storage in zip(rooms, self._storages, strict=True)
            if room.maker is not None
        }
        self.made: list[int] = []
        """Where what Inductor's code has allocated begins, in its order."""

    def close(self) -> None:
        """Let go of what nobody else holds, whatever still refers to this."""
        self._in_the_way.clear()
        self._storages.clear()
        self._made_by.clear()

    def storage(self, size: int) -> torch.UntypedStorage:
        """Allocate so many bytes: not a tensor, which deterministic mode fills, with a kernel of the graph."""
        return torch.UntypedStorage(size, device=self._device)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes, by a node of the graph."""
        to.copy_(source)

    def allocate(
        self, original: Allocator, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Allocate for Inductor's code, which would do so by `original`."""
        room = self._made_by.get(len(self.made))
        if room is not None and room.nbytes() == bytes_of(size, stride, dtype):
            tensor = self._over(room, dtype, size, stride)
        else:
            tensor = original(size, stride, dtype)
        self.made.append(tensor.data_ptr())
        return tensor

    def settle(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return what the callable has returned, with each output in its room; raises `OpaqueError`."""
        if not self._rooms:
            return outputs
        settled = list(outputs)
        for room, storage in zip(self._rooms, self._storages, strict=True):
            made = outputs[room.outputs[0]].untyped_storage()
            if made.nbytes() != room.size:
                raise OpaqueError("it returned other storages when it was captured again")
            if made.data_ptr() != storage.data_ptr():
                self.copy(*(self._over(each, torch.uint8, (room.size,), (1,)) for each in (storage, made)))
                for index in room.outputs:
                    settled[index] = self._moved(outputs[index], storage)
        return tuple(settled) if isinstance(outputs, tuple) else settled

    def _moved(self, like: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
        form = tuple(like.size()), tuple(like.stride())
        return self._over(storage, like.dtype, *form, int(like.storage_offset()))

    def _over(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int = 0,
    ) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage, offset, size, stride)
