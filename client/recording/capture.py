"""Records a compiled callable as a CUDA graph, on one device, and everything that was allocated meanwhile.

The capture allocates from a pool of its own that is let go as soon as all addresses are known: nothing of a recording stays
where it was captured, but for what somebody holds.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.headroom import MARGIN
from pygraphd.client.backend.workspaces import workspaces
from pygraphd.client.recording.builder import Capture
from pygraphd.client.recording.output_reserves import Room, Rooms
from pygraphd.client.replay.node_params import PassingError
from pygraphd.client.replay.relocation_table import BLOCK, Span, find, merge
from pygraphd.client.replay.rng import GeneratorTicket, generators_in
from pygraphd.client.replay.stream_affinity import OneStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.backend.torch_private import Runnable

HISTORY = "the history of the GPU's memory is being recorded, and must not be disturbed"
OTHER_ALLOCATOR = "PyTorch's own allocator is not in use"
REUSE = "graph_capture_record_stream_reuse"
BUSY = "something else is being captured"


SHIFTS = (BLOCK, (1 << 20) + BLOCK)
"""What a shifted capture allocates first, in bytes: of memory for small allocations, and of that for large ones."""

_one_at_a_time = threading.Lock()
"""The allocator's history is one for all devices and threads."""


class CudaRecorder:
    """Captures on one CUDA device; see `pipeline.Recorder`."""

    def __init__(self, driver: Driver, device_index: int) -> None:
        self.driver = driver
        self.device, self._device_index = torch.device("cuda", device_index), device_index
        self._shares_state = torch_private.graphs_share_random_state()
        self._random_numbers = OneStream(driver, torch_private.stream_watch(self.device))
        self._stream: torch.cuda.Stream | None = None
        self._threads = threading.local()
        self._current_device, self.in_capture = torch_private.current_device(), torch_private.in_capture()
        self._is_only_device = torch.cuda.device_count() == 1

    @property
    def generator(self) -> Any:
        """Another generator over the state that the default one has now, as captures and their replays use it.

        The default one's own offset is not to be set: that would have cuDNN's recurrent layers draw their dropout anew.
        """
        return torch.cuda.default_generators[self._device_index].graphsafe_get_state()

    def capture(
        self,
        launch: Runnable,
        inputs: list[Any],
        rooms: Sequence[Room] = (),
        *,
        ground: int = 0,
        is_shifted: bool = False,
    ) -> Capture:
        """Record one call; raises `OpaqueError`, `DriverError` or whatever the callable raises while it is captured.

        Two pools may begin a multiple of 4 GiB apart, by chance or, it may be, as expandable segments have their addresses reserved. If it
        `is_shifted`, what is allocated lies further from there than in another capture. Outputs with `rooms` lie in these.
        All is cut from a `ground` of so many bytes, if these can be had.
        """
        with _one_at_a_time, torch.cuda.device(self.device):
            if reason := self._why_not():
                raise PassingError(reason)
            self._prepare_thread()
            if ground and ground * MARGIN > self._unreserved():
                ground = 0  # an allocation that fails is told to whoever observes that
            return self._capture(launch, inputs, rooms, SHIFTS if is_shifted else (), ground)

    def why_not(self) -> str | None:
        """Return why nothing can be captured now, for a reason that does not lie in what is; waits for nobody."""
        if not _one_at_a_time.acquire(blocking=False):
            return BUSY  # and whoever captures records the history
        try:
            return self._why_not()
        finally:
            _one_at_a_time.release()

    def _capture(
        self, launch: Runnable, inputs: list[Any], rooms: Sequence[Room], shifts: Sequence[int], ground: int
    ) -> Capture:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        generators = [*generators_in(inputs).values()]
        pool = _Pool(self.device.index, generators)
        try:
            with torch_private.allocation_history(self.device.index, pool.handle) as history:
                apart = functools.partial(Rooms, rooms, self.device, shifts, ground)
                outputs, made, before = self._run(graph, pool, launch, inputs, apart)
                allocations, alive = lifetimes(history(), before)
            return Capture(
                self._take_over(graph),
                list(outputs),
                allocations,
                held(alive, outputs),
                as_tuple=isinstance(outputs, tuple),
                ticket=GeneratorTicket(
                    graph,
                    self.generator,
                    self.driver,
                    self._synchronize,
                    self._one_stream(),
                    generators,
                ),
                pool=pool,
                rooms=tuple(rooms),
                ground=ground,
                made=tuple(made),
            )
        except BaseException:
            outputs = ()  # what lies in the pool must go before it
            inputs.clear()
            graph.reset()
            pool.release()
            raise

    def _run(
        self,
        graph: torch.cuda.CUDAGraph,
        pool: _Pool,
        launch: Runnable,
        inputs: list[Any],
        rooms: Callable[[], Rooms],
    ) -> tuple[Sequence[Any], Sequence[int], int]:
        """Return the outputs, where what Inductor's code has allocated begins, and how many allocations were made before the call's."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        with self._random_numbers.lock if self._shares_state else contextlib.nullcontext():
            # Whatever the GPU still does must not be waited for within the capture.
            torch.cuda.synchronize()
            with _workspaces_in_capture(), torch.cuda.stream(self._stream):
                # Where graphs share the generator's state, beginning a capture may overwrite it, on this stream; see `torch_private/capture.py`.
                self._random_numbers.move(self._stream.cuda_stream)
                with pool.capturing(graph):
                    apart = rooms()
                    try:
                        with torch_private.allocations_by(apart.allocate):
                            outputs = apart.settle(launch(inputs))
                    finally:
                        inputs.clear()
                        apart.close()
            self._stream.synchronize()
        return outputs, apart.made, apart.before

    def _prepare_thread(self) -> None:
        # Each thread has a cuBLAS handle of its own, which cannot be made within a capture.
        if not hasattr(self._threads, "handle"):
            self._threads.handle = torch.cuda.current_blas_handle()

    def _one_stream(self) -> OneStream:
        """Return what has launches of what is captured next wait for those of others that read the same state of the generator."""
        if self._shares_state:
            return self._random_numbers
        return OneStream(self.driver, torch_private.stream_watch(self.device))

    def _synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def _take_over(self, graph: torch.cuda.CUDAGraph) -> int:
        """Return a copy of what was captured, and empty PyTorch's graph of it."""
        captured = graph.raw_cuda_graph()
        clone = self.driver.clone(captured)
        try:
            for node in self.driver.nodes(captured):
                self.driver.destroy_node(node)
        except BaseException:
            self.driver.destroy_graph(clone)
            raise
        return clone

    def _why_not(self) -> str | None:
        if torch.cuda.get_allocator_backend() != "native":
            return OTHER_ALLOCATOR
        if any(
            REUSE in os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        ):
            return f"the allocator is set to {REUSE}"
        return HISTORY if torch_private.history_is_recorded() else None

    def room(self) -> int:
        """Return how many bytes could be allocated now."""
        reserved = torch.cuda.memory_reserved(self.device)
        return int(self._unreserved() + reserved - torch.cuda.memory_allocated(self.device))

    def _unreserved(self) -> int:
        """Return how many bytes could be had of the device."""
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.device))
        return int(min(free, max(allowed - torch.cuda.memory_reserved(self.device), 0)))

    def trim(self) -> None:
        """Give memory that is free back to the device, and what libraries keep for calls that are replayed from now on."""
        workspaces.clear()
        workspaces.empty_cache()

    @property
    def conditions(self) -> tuple[tuple[Callable[[], object], object], ...]:
        """Functions in C, and the values that they return where a call can be replayed; see `pipeline.Recorder`."""
        outside = (self.in_capture, False)
        return (outside,) if self._is_only_device else ((self._current_device, self._device_index), outside)

    def on_device(self) -> contextlib.AbstractContextManager[object] | None:
        """Return what makes its device the current one; None if it is."""
        if self._is_only_device or self._current_device() == self._device_index:
            return None
        device: contextlib.AbstractContextManager[object] = torch.cuda.device(self.device)
        return device


class _Pool:
    """Memory for one capture."""

    def __init__(self, device_index: int, generators: Sequence[torch.Generator] = ()) -> None:
        self._device_index = device_index
        self._generators = generators
        self.handle: torch_private.Pool = torch.cuda.graph_pool_handle()
        self._used = False

    @contextlib.contextmanager
    def capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Capture into `graph` what runs on the current stream; this thread allocates from the pool."""
        with torch_private.capturing(graph, self._device_index, self.handle, self._generators):
            self._used = True
            yield

    def release(self) -> None:
        """Give back what is free."""
        used, self._used = self._used, False
        if used:
            torch_private.release_pool(self._device_index, self.handle)
            workspaces.empty_cache()


@contextlib.contextmanager
def _workspaces_in_capture() -> Iterator[None]:
    """Have libraries allocate their workspaces within, so that these are known, and none of them be used outside."""
    workspaces.clear()
    try:
        yield
    finally:
        workspaces.clear()


def lifetimes(
    events: Iterable[tuple[str, int, int]], skipped: int = 0
) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    """Return all allocations among an allocator's events (action, address, bytes), and those that are alive in the end.

    The first ones, so many as are `skipped`, are left out of both.
    """
    allocations: list[Span] = []
    alive: dict[int, Span] = {}
    for action, address, size in events:
        if action == "alloc":
            if skipped:
                skipped -= 1
                continue
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
