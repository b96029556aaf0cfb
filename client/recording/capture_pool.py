"""The memory pool that a capture allocates from: one of PyTorch's, or addresses over aliased memory."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.workspaces import workspaces

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.recording.aliased_memory import AliasedMemory
    from pygraphd.client.replay.native.ffi import TensorOps


class CapturePool:
    """The memory pool of one capture, with memory of the device."""

    references = 1

    def __init__(
        self,
        driver: Driver,
        device_index: int,
        generators: Sequence[torch.Generator] = (),
        *,
        may_draw: bool = True,
        spare: torch.cuda.Stream | None = None,
    ) -> None:
        """Serve one capture; see `torch_private.capturing`."""
        self._driver = driver
        self._device_index = device_index
        self._generators = generators
        self._may_draw = may_draw
        self._spare = spare
        self.handle = self._made()
        self._used = False

    def _made(self) -> torch_private.Pool:
        handle: torch_private.Pool = torch.cuda.graph_pool_handle()
        return handle

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture work on the current stream into `graph`, with allocations of this thread from the pool."""
        with torch_private.capturing(
            graph,
            self._device_index,
            self.handle,
            self._generators,
            may_draw=self._may_draw,
            spare=self._spare,
        ):
            self._used = True
            yield

    def release(self) -> None:
        """Give free memory of the pool back to the device."""
        used, self._used = self._used, False
        if used:
            for _ in range(self.references):
                torch_private.release_pool(self._device_index, self.handle)
            with self._driver.relaxed():  # another thread may be capturing, on another GPU
                workspaces.empty_cache()


class AddressPool(CapturePool):
    """The memory pool of one capture, with addresses over aliased memory: a capture runs nothing, and needs no memory."""

    # One reference is added where allocating begins; the other is that of PyTorch's `MemPool`, which stays for good.
    references = 2

    def __init__(
        self,
        driver: Driver,
        device_index: int,
        generators: Sequence[torch.Generator],
        addresses: AliasedMemory,
        ops: TensorOps,
        *,
        may_draw: bool = True,
        spare: torch.cuda.Stream | None = None,
    ) -> None:
        """Serve one capture from `addresses`."""
        self._addresses = addresses
        self._ops = ops
        super().__init__(driver, device_index, generators, may_draw=may_draw, spare=spare)

    def _made(self) -> torch_private.Pool:
        return torch_private.pool_served_by(*self._ops.arena_functions())

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """See `CapturePool.capturing`. An allocation for which there are no addresses is one for which there is no memory."""
        free = self._addresses.free
        self._ops.arena_range(free.start, free.end)
        try:
            with super().capturing(graph):
                yield
        finally:
            # The arena is one for the process: without a range, no pool gets addresses that were unmapped meanwhile.
            self._addresses.take_up_to(self._ops.arena_range(0, 0))
