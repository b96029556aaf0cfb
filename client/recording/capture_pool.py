"""The memory pool that a capture allocates from: one of PyTorch's, or addresses over aliased memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.workspaces import workspaces
from pygraphd.client.replay.native.ffi import helper

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.recording.aliased_memory import AliasedMemory


class CapturePool:
    """The memory pool of one capture: memory of the device, or addresses alone, since a capture runs nothing."""

    def __init__(
        self,
        driver: Driver,
        device_index: int,
        capturing: Callable[..., contextlib.AbstractContextManager[None]],
        addresses: AliasedMemory | None = None,
    ) -> None:
        """Serve one capture by `capturing`, which is `torch_private.capturing` with its options; from `addresses` if they are given."""
        self._driver = driver
        self._device_index = device_index
        self._capturing = capturing
        self._addresses = addresses
        self._ops = None if addresses is None else helper.ops
        self._used = False
        if self._ops is None:
            self.handle: torch_private.Pool = torch.cuda.graph_pool_handle()
        else:
            self.handle = torch_private.pool_served_by(*self._ops.arena_functions())

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture work on the current stream into `graph`, with allocations of this thread from the pool."""
        with self._addresses_open(), self._capturing(graph, self._device_index, self.handle):
            self._used = True
            yield

    @contextlib.contextmanager
    def _addresses_open(self) -> Iterator[None]:
        """Have the pool hand out the addresses. An allocation for which there are none is one for which there is no memory."""
        if self._ops is None or self._addresses is None:
            yield
            return
        free = self._addresses.free
        self._ops.arena_range(free.start, free.end)
        try:
            yield
        finally:
            # The arena is one for the process: without a range, no pool gets addresses that were unmapped meanwhile.
            self._addresses.take_up_to(self._ops.arena_range(0, 0))

    def release(self) -> None:
        """Give free memory of the pool back to the device."""
        used, self._used = self._used, False
        if used:
            # One reference is added where allocating begins; with addresses there is that of PyTorch's `MemPool`, too, which stays for good.
            for _ in range(1 if self._ops is None else 2):
                torch_private.release_pool(self._device_index, self.handle)
            with self._driver.relaxed():  # another thread may be capturing, on another GPU
                workspaces.empty_cache()
