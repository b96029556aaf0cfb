"""Backs a large range of device addresses with little memory, for stand-ins of large inputs: one allocation is mapped again and again.

A capture needs addresses and no memory. But in verification a kernel may reach an address of the capture that relocation has missed, and
where nothing is mapped that would end the process. In this range it reads poison, and what it writes shows in the one allocation.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.replay.relocation_table import BLOCK, PAGE, blocks

if TYPE_CHECKING:
    from pygraphd.client.backend.driver import Driver

MAPPINGS = 64
"""An allocation is mapped at most about 64 times, so that its memory is about 1/64 of the range, while it has fewer pages than `MOST_PAGES`."""
MOST_PAGES = 32
"""An allocation has 64 MiB at most: a range of 40 GiB then takes 640 mappings."""


class AliasedMemory:
    """A range of addresses, handed out from front to back as tensors of bytes that share memory with one another."""

    def __init__(self, driver: Driver, device: torch.device, size: int, pages: int = 0) -> None:
        """Map memory over `size` bytes of addresses: `pages` of 2 MiB if that is given.

        Raises `DriverError`, as where the device is full or cannot map memory.
        """
        self.device, self._taken = device, 0
        self._bytes = PAGE * (pages or min(MOST_PAGES, -(-size // (MAPPINGS * PAGE))))
        self._range = -(-size // self._bytes) * self._bytes
        self._stack = contextlib.ExitStack()
        self._address = self._stack.enter_context(
            driver.aliased(self._range, self._bytes, self.device.index or 0)
        )

    def close(self) -> None:
        """Give addresses and memory back. Waits for the current stream, whose kernels may access them."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self._stack.close()

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes from the start of a block on, in a storage of their own."""
        start = self._address + self._taken
        self._taken += blocks(size) * BLOCK
        return torch_private.memory_at(start, size, self.device)

    @property
    def memory(self) -> torch.Tensor:
        """The memory behind the range, as 64-bit integers."""
        return torch_private.memory_at(self._address, self._bytes, self.device).view(torch.int64)

    @property
    def whole(self) -> torch.Tensor:
        """The whole range, as bytes."""
        return torch_private.memory_at(self._address, self._range, self.device)
