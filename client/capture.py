"""Records a compiled callable as a CUDA graph, on one device, and everything that was allocated meanwhile.

The capture allocates from a pool of its own that is let go as soon as all addresses are known: nothing of a recording stays
where it was captured, but for what somebody holds.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client import _torch
from pygraphd.client.parameters import OpaqueError
from pygraphd.client.recording import Capture
from pygraphd.client.relocation import Span, find, merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pygraphd.client._torch import Runnable
    from pygraphd.client.driver import Driver

HISTORY = "the history of the GPU's memory is being recorded, and must not be disturbed"
OTHER_ALLOCATOR = "PyTorch's own allocator is not in use"


class CudaRecorder:
    """Captures on one CUDA device; see `relocatable.Recorder`."""

    def __init__(self, driver: Driver, device_index: int) -> None:
        self.driver = driver
        self.generator: Any = torch.cuda.default_generators[device_index]
        self._device = torch.device("cuda", device_index)
        self._stream: torch.cuda.Stream | None = None

    def capture(self, launch: Runnable, inputs: list[Any]) -> Capture:
        """Record one call; raises `OpaqueError`, `DriverError` or whatever the callable raises while it is captured."""
        if reason := self._why_not():
            raise OpaqueError(reason)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        pool = torch.cuda.MemPool()
        with torch.cuda.device(self._device), _torch.allocation_history(self._device.index) as history:
            # Whatever the GPU still does must not be waited for within the capture.
            torch.cuda.synchronize()
            with _workspaces_in_capture():
                outputs = self._run(graph, pool, launch, inputs)
            events = history()
        allocations, alive = lifetimes(events)
        ticket = GeneratorTicket(self.driver, graph)
        try:
            clone = self.driver.clone(graph.raw_cuda_graph())
            ticket.empty()
        except BaseException:
            ticket.close()
            raise
        return Capture(
            clone,
            list(outputs),
            allocations,
            held(alive, outputs),
            as_tuple=isinstance(outputs, tuple),
            ticket=ticket,
            pool=pool,
        )

    def _run(
        self, graph: torch.cuda.CUDAGraph, pool: torch.cuda.MemPool, launch: Runnable, inputs: list[Any]
    ) -> Sequence[Any]:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        # The allocator takes the first pool that asks for a thread's or a stream's memory: ours, before the graph's own, which
        # would live as long as the graph.
        with torch.cuda.use_mem_pool(pool, self._device), torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                outputs: Sequence[Any] = launch(inputs)
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return outputs

    def _why_not(self) -> str | None:
        if torch.cuda.get_allocator_backend() != "native":
            return OTHER_ALLOCATOR
        return HISTORY if _torch.history_is_recorded() else None

    def room(self) -> int:
        """Return how many bytes could be allocated now."""
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(free + cached)

    def in_capture(self) -> bool:
        """Whether the current stream is being captured."""
        return bool(torch.cuda.is_current_stream_capturing())

    def on_device(self) -> contextlib.AbstractContextManager[object] | None:
        """Return what makes its device the current one; None if it is."""
        if torch.cuda.current_device() == self._device.index:
            return None
        device: contextlib.AbstractContextManager[object] = torch.cuda.device(self._device)
        return device


class GeneratorTicket:
    """A captured graph emptied of its nodes: replaying it does what PyTorch does for random numbers, and nothing else.

    PyTorch keeps the seed and the offset that kernels read in tensors that live as long as its graph; they are written, and the
    generator is advanced, by `replay`.
    """

    def __init__(self, driver: Driver, graph: torch.cuda.CUDAGraph) -> None:
        self._driver = driver
        self._graph = graph

    def empty(self) -> None:
        """Take all nodes out of the graph."""
        for node in self._driver.nodes(self._graph.raw_cuda_graph()):
            self._driver.destroy_node(node)

    def advance(self) -> None:
        """Write the generator's state for one launch on the current stream, and advance the generator."""
        self._graph.replay()

    def close(self) -> None:
        """Let go of PyTorch's graph."""
        self._graph.reset()


@contextlib.contextmanager
def _workspaces_in_capture() -> Iterator[None]:
    """Have libraries allocate their workspaces within, so that these are known, and none of them be used outside."""
    _torch.clear_workspaces()
    try:
        yield
    finally:
        _torch.clear_workspaces()


def lifetimes(events: Iterable[tuple[str, int, int]]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return all allocations among an allocator's events (action, address, bytes), and those that are alive in the end."""
    allocations: list[Span] = []
    alive: dict[int, Span] = {}
    for action, address, size in events:
        if action == "alloc":
            span = Span(address, address + size)
            allocations.append(span)
            alive[address] = span
        elif action in {"free_requested", "free_completed"}:
            alive.pop(address, None)
    return tuple(allocations), tuple(alive.values())


def held(alive: Iterable[Span], outputs: Sequence[Any]) -> tuple[Span, ...]:
    """Return the allocations that are alive and in which no output lies."""
    spans = merge(alive)
    returned = {
        find(spans, value.data_ptr())
        for value in outputs
        if isinstance(value, torch.Tensor) and value.numel()
    }
    return tuple(span for index, span in enumerate(spans) if index not in returned)
