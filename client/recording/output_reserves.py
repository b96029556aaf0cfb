"""Reserves memory for outputs before the callable is captured, so that each output storage is an alias set of its own.

PyTorch's allocator gives the memory of dead temporaries to later allocations, outputs among them. Allocations that overlap in a capture
have to lie together in each replay, and two outputs would share a storage. So where an output overlaps with anything, the call is
captured again, with an *output reserve* for each storage. Inductor's code is given the reserve at the allocation that made the storage
in the last capture. An output that a library has allocated is copied into its reserve by a node of the graph.

All memory that a capture with reserves allocates is cut from one *backing allocation*, which is made first and freed at once. The allocator
joins free memory only within one of its segments. Without a backing allocation, growing temporaries would each lie in another segment, and a
replay needs memory for all of them at once. A capture on addresses has its reserves beside its pool, whose bytes PyTorch counts as reserved.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend.errors import NotRelocatableError
from pygraphd.client.recording.alias_sets import AliasSets
from pygraphd.client.replay.outputs import first_positions
from pygraphd.client.replay.relocation_table import BLOCK, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.backend.torch_private import Allocator
    from pygraphd.client.recording.aliased_memory import AliasedMemory
    from pygraphd.client.recording.capture import Capture

MAX_CAPTURES = 5
"""Captures of one call until no output overlaps. In the last one every output has a reserve."""
SPARE_SHARE = 4
"""The backing allocation has 1/4 more bytes than the last capture used, since reserves share no memory with temporaries."""
BACKED_FROM = (1 << 20) + BLOCK
"""Bytes of the smallest allocation that the backing allocation serves: PyTorch keeps those up to 1 MiB in segments of their own."""


@dataclass(frozen=True, slots=True)
class OutputReserve:
    """The reserve for one storage."""

    size: int
    """Bytes of the storage."""
    outputs: tuple[int, ...]
    """Indices of the outputs that lie in the storage."""
    allocation: int | None
    """The position among the allocations of Inductor's code of the one that makes the storage; None: the storage is copied."""


def reserves_for(capture: Capture, *, for_all: bool = False) -> tuple[OutputReserve, ...]:
    """Return the reserves for the next capture of the call; those of this one if none of its outputs overlap. Raises `NotRelocatableError`."""
    sets = AliasSets(capture)
    overlapping = sets.overlapping
    if not overlapping:
        return capture.reserves
    # The last allocation at an address counts: earlier ones there were temporaries that have died.
    makers = {address: position for position, address in enumerate(capture.allocated)}
    # A storage keeps the reserve that it has: without one it could overlap again.
    before = {reserve.outputs for reserve in capture.reserves}
    return tuple(
        OutputReserve(storage.size, outputs, makers.get(storage.start))
        for storage, outputs in sets.storages.items()
        if for_all or storage in overlapping or storage.start in makers or outputs in before
    )


def backing_for(capture: Capture) -> int:
    """Return the bytes of the backing allocation for the next capture; 0: none, as memory that stays in place would keep it all."""
    if any(span.size >= BACKED_FROM for span in capture.held):
        return 0
    used = capture.bytes if capture.addresses is None else capture.temporary_bytes
    return capture.backing or used + used // SPARE_SHARE


class OutputReserves:
    """The reserves of one capture: in memory of its pool, or at addresses beside it."""

    def __init__(
        self,
        reserves: Sequence[OutputReserve],
        device: torch.device,
        shifts: Sequence[int] = (),
        backing: int = 0,
        addresses: AliasedMemory | None = None,
    ) -> None:
        """Take them from `addresses`. If there are none, `begin` allocates them, after `backing` bytes and `shifts`."""
        self.wanted, self.backing, self.addresses = reserves, backing, addresses
        self._device, self._shifts = device, shifts
        self.before = 0
        """Allocations that precede those of the capture itself."""
        self._storages: list[torch.UntypedStorage] = []
        self._taken: list[torch.UntypedStorage] = []
        self._by_allocation: dict[int, torch.UntypedStorage] = {}
        self.spans: tuple[Span, ...] = ()
        """The reserves beside the pool."""
        self.allocated: list[int] = []
        """Addresses of the allocations of Inductor's code, in order."""
        if addresses is not None:
            # One shift: this is one range, while PyTorch keeps small and large allocations in segments apart.
            for size in shifts[:1]:
                addresses.take(size)
            self._storages = [addresses.take(reserve.size).untyped_storage() for reserve in reserves]
            starts = [each.data_ptr() for each in self._storages]
            sizes = [reserve.size for reserve in reserves]
            self.spans = tuple(Span(start, start + size) for start, size in zip(starts, sizes, strict=True))

    def begin(self) -> None:
        """Make the backing allocation, allocations that only take up addresses, and reserves that have no place yet. To be called in the capture."""
        if self.backing >= BACKED_FROM:
            # Without it scratch may take more memory. Results are the same.
            with contextlib.suppress(torch.OutOfMemoryError):
                self.storage(self.backing)  # freed at once: what is allocated next is cut from it
                self.before += 1
        self.before += len(self._shifts)
        self._taken = [self.storage(size) for size in self._shifts]
        if not self.spans:
            self._storages = [self.storage(reserve.size) for reserve in self.wanted]
        self._by_allocation = {
            reserve.allocation: storage
            for reserve, storage in zip(self.wanted, self._storages, strict=True)
            if reserve.allocation is not None
        }

    def close(self) -> None:
        """Release the memory, even if something still refers to this object."""
        self._taken.clear()
        self._storages.clear()
        self._by_allocation.clear()

    def storage(self, size: int) -> torch.UntypedStorage:
        """Allocate bytes. A tensor would be filled in deterministic mode, by a kernel of the graph."""
        return torch.UntypedStorage(size, device=self._device)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy bytes by a node of the graph."""
        to.copy_(source)

    def allocate(
        self, original: Allocator, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a tensor for Inductor's code: in its reserve if it has one of that size, else from `original`."""
        reserve = self._by_allocation.get(len(self.allocated))
        # The allocation may be a temporary, of another size, that lay where an output of a library lies afterwards.
        if reserve is not None and reserve.nbytes() == bytes_of(size, stride, dtype):
            tensor = self._over(reserve, dtype, size, stride)
        else:
            tensor = original(size, stride, dtype)
        self.allocated.append(tensor.data_ptr())
        return tensor

    def place(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Return the outputs of the callable with each in its reserve. Raises `NotRelocatableError`."""
        if not self.wanted:
            return outputs
        placed = list(outputs)
        first = first_positions(outputs)
        for reserve, storage in zip(self.wanted, self._storages, strict=True):
            made = outputs[reserve.outputs[0]].untyped_storage()
            if made.nbytes() != reserve.size:
                raise NotRelocatableError("it returned other storages when it was captured again")
            if made.data_ptr() != storage.data_ptr():
                self.copy(*(self._over(each, torch.uint8, (reserve.size,), (1,)) for each in (storage, made)))
                for index in reserve.outputs:
                    if first[index] < index:  # outputs that are one tensor go on to be one
                        placed[index] = placed[first[index]]
                        continue
                    like = outputs[index]
                    form = tuple(like.size()), tuple(like.stride()), int(like.storage_offset())
                    placed[index] = self._over(storage, like.dtype, *form)
        return tuple(placed) if isinstance(outputs, tuple) else placed

    def _over(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        size: tuple[int, ...],
        stride: tuple[int, ...],
        offset: int = 0,
    ) -> torch.Tensor:
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage, offset, size, stride)


def bytes_of(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Return the bytes of a storage that just fits a tensor."""
    if 0 in size:
        return 0
    itemsize: int = dtype.itemsize
    return (sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1) * itemsize
