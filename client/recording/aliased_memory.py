"""Maps one small allocation again and again over a large range of device addresses, for stand-ins of inputs and allocations of captures.

A capture needs addresses and no memory. But if relocation misses an address, a kernel of the verification accesses memory at that address
of the capture. Where nothing is mapped, that would end the process. Here the kernel reads poison, and its writes change the allocation.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.replay.outputs import first_positions
from pygraphd.client.replay.relocation_table import BLOCK, PAGE, Span, blocks, find, merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pygraphd.client.backend.driver import Driver

TARGET_MAPPINGS = 64
"""Number of times that an allocation of fewer than `MAX_PAGES` pages is mapped: its memory is about 1/64 of the range."""
MAX_PAGES = 32
"""Largest number of pages of 2 MiB in an allocation, together 64 MiB. A range of 40 GiB then takes 640 mappings."""


class AliasedMemory:
    """A range of addresses over aliased memory. `take` hands it out from front to back, as tensors of bytes."""

    def __init__(self, driver: Driver, device: torch.device, size: int, pages: int = 0) -> None:
        """Map memory over `size` bytes of addresses, of `pages` of 2 MiB if given. Raises DriverError, as if the device is full."""
        self.device, self._taken = device, 0
        self.bytes = bytes_behind(size, pages)
        """Bytes of the memory behind the range."""
        # The driver maps the whole allocation each time, so the range is a multiple of it.
        self._range = -(-size // self.bytes) * self.bytes
        self._stack = contextlib.ExitStack()
        aliased = driver.aliased(self._range, self.bytes, self.device.index or 0)
        self._address = self._stack.enter_context(aliased)

    def close(self) -> None:
        """Give addresses and memory back. Waits for the current stream, whose kernels may access them."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._stack.close()

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes from the start of a block on, in a storage of their own. Raises `OutOfMemoryError` beyond the range."""
        start = self._address + self._taken
        # The error of the allocator: `Pipeline` takes it as too few addresses, and captures again in memory.
        if size > self.free.size:
            raise torch.OutOfMemoryError("there are too few addresses")
        self._taken += blocks(size) * BLOCK
        return torch_private.memory_at(start, size, self.device)

    @property
    def free(self) -> Span:
        """The addresses that are not taken."""
        return Span(self._address + self._taken, self._address + self._range)

    def take_up_to(self, address: int) -> None:
        """Take everything before an address."""
        self._taken = address - self._address

    def take_back(self) -> None:
        """Have everything free again: nobody uses these addresses any more."""
        self._taken = 0

    @property
    def memory(self) -> torch.Tensor:
        """The memory behind the range, as 64-bit integers."""
        return torch_private.memory_at(self._address, self.bytes, self.device).view(torch.int64)

    @property
    def whole(self) -> torch.Tensor:
        """The whole range, as bytes."""
        return torch_private.memory_at(self._address, self._range, self.device)


def bytes_behind(size: int, pages: int = 0) -> int:
    """Return the bytes of the memory behind a range of `size` bytes of addresses: `pages` of 2 MiB if that is given."""
    return PAGE * (pages or min(MAX_PAGES, -(-size // (TARGET_MAPPINGS * PAGE))))


def without_owner(values: Iterable[Any], spans: Iterable[Span]) -> Sequence[Any]:
    """Return the values, with tensors within `spans` replaced by equal ones that own nothing: PyTorch counts what is owned as allocated."""
    ranges, storages, replaced = merge(spans), dict[int, torch.UntypedStorage](), list(values)
    # Outputs that are one tensor go on to be one.
    for index, (first, value) in enumerate(zip(first_positions(replaced), replaced, strict=True)):
        if first < index:
            replaced[index] = replaced[first]
            continue
        if not isinstance(value, torch.Tensor) or not value.numel() or find(ranges, value.data_ptr()) is None:
            continue
        owner = value.untyped_storage()
        start = owner.data_ptr()
        # One for each owner: outputs that share a storage go on to share one.
        if start not in storages:
            storages[start] = torch_private.memory_at(start, owner.nbytes(), value.device).untyped_storage()
        form = value.storage_offset(), value.size(), value.stride()
        plain = torch.empty(0, dtype=value.dtype, device=value.device).set_(storages[start], *form)
        # `set_` takes over neither the conjugate bit nor the negative one.
        replaced[index] = torch_private.viewed_like(plain, value)
    return replaced
