"""Captures a call of a compiled callable as a CUDA graph on one device, with its allocations.

The capture allocates from a memory pool of its own. The pool is released once all addresses are known: only memory that is still referenced
stays where it was.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.allocator_counts import AllocatorCounts, allocator_counts
from pygraphd.client.backend.errors import TransientError
from pygraphd.client.backend.workspaces import workspaces
from pygraphd.client.common.signals import handlers_put_off
from pygraphd.client.decisions.ranks.write_once import RegisterError, within
from pygraphd.client.recording.aliased_memory import AliasedMemory, without_owner
from pygraphd.client.recording.capture_pool import CapturePool
from pygraphd.client.recording.device_waits import DeviceWaits
from pygraphd.client.recording.lifetimes import held, lifetimes
from pygraphd.client.recording.output_reserves import OutputReserve, OutputReserves
from pygraphd.client.recording.watch import Watch
from pygraphd.client.replay.relocation_table import BLOCK, Span, blocks, merge
from pygraphd.client.replay.rng import RngCursor, generators_in
from pygraphd.client.replay.stream_affinity import StreamAffinity

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.backend.torch_private import Runnable

HISTORY = "the history of the GPU's memory is being recorded, and must not be disturbed"
NOT_CACHED = "PyTorch's allocator keeps no freed memory, so that allocations fail in a capture"
SYNC_DEBUG = "waits for the GPU are reported (torch.cuda.set_sync_debug_mode)"
OTHER_ALLOCATOR = "PyTorch's own allocator is not in use"
REUSE = "graph_capture_record_stream_reuse"
"""A setting of PyTorch's allocator that has captures use memory again before its streams are done with it."""
EXPANDABLE = "expandable_segments:True"
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
BUSY = "something else is being captured"

MAX_CACHED_BYTES = 16 << 20
"""Bytes of free memory in PyTorch's cache from which on it is given back before a capture."""
MARGIN = 1.2
"""Factor by which memory that could be reserved has to exceed a backing allocation."""
SHIFTS = (BLOCK, (1 << 20) + BLOCK)
"""Bytes of the two allocations that begin a shifted capture: the pools of two captures may lie a multiple of 4 GiB apart."""

ADDRESSES_FROM = 64 << 20
"""Bytes that a program has allocated at a time from which on its captures get addresses without memory of their own."""
SPARE_ADDRESSES = 2
"""Addresses for a capture, as a multiple of these bytes: outputs get reserves, and segments of the pool are not full."""


class AddressesError(Exception):
    """The graph goes on to use memory that was allocated during its capture, which was given addresses only."""


_one_at_a_time = threading.RLock()
"""Held during a capture: the allocator keeps one history for all devices and threads. A thread may come again, in a signal handler."""


@dataclass(slots=True)
class Capture:
    """A captured call: its graph, its outputs where the graph writes them, and its memory."""

    graph: int
    """CUgraph."""
    outputs: list[Any]
    allocations: tuple[Span, ...]
    """All allocations that were made during the capture, dead or alive."""
    held: tuple[Span, ...] = ()
    """The allocations that are alive and in which no output lies: the graph may read them again."""
    as_tuple: bool = True
    """Whether the callable returned a tuple."""
    cursor: RngCursor | None = None
    pool: Any = None
    """The pool that holds the memory of all allocations."""
    reserves: tuple[OutputReserve, ...] = ()
    backing: int = 0
    """Bytes of the backing allocation; see `output_reserves`."""
    addresses: AliasedMemory | None = None
    """The aliased memory at the addresses of all allocations; None: they have memory of their own."""
    temporary_bytes: int = 0
    """The most bytes at a time of allocations that were freed during the capture."""
    allocated: tuple[int, ...] = ()
    """Addresses of the allocations of Inductor's code, in order."""

    @property
    def spans(self) -> list[Span]:
        """The allocations, joined where they overlap."""
        return merge(self.allocations)

    @property
    def bytes(self) -> int:
        """The memory of all allocations, counted once where it was used again."""
        return sum(span.size for span in self.spans)

    @property
    def own_bytes(self) -> int:
        """The memory that all allocations have of their own: none where they were given addresses only."""
        return self.bytes if self.addresses is None else 0

    def memory(self, device: torch.device) -> list[torch.Tensor]:
        """Return the memory of all allocations but the held ones, as 64-bit integers."""
        if self.addresses is not None:
            return [self.addresses.memory]
        spans = [span for span in self.spans if span not in self.held]
        pieces = [torch_private.memory_at(span.start, blocks(span.size) * BLOCK, device) for span in spans]
        return [each.view(torch.int64) for each in pieces]

    def let_go(self) -> None:
        """Release the memory of all allocations but the held ones."""
        self.outputs.clear()  # before the pool: a tensor in the pool would keep its memory
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.release()

    def release_addresses(self) -> None:
        """Release all but the addresses of allocations that have no memory of their own: these stay until the call is closed."""
        if self.addresses is not None:
            self.let_go()

    def discard(self, driver: Driver) -> None:
        """Release the memory, and destroy the graph."""
        try:
            driver.destroy_graph(self.graph)
        finally:
            if self.cursor is not None:
                self.cursor.close()
            self.let_go()


class CudaRecorder:
    """Captures calls on one CUDA device, and answers questions of a recording about that device."""

    def __init__(self, driver: Driver, device_index: int, memory_bytes: int = 0) -> None:
        """Record on a device with at most `memory_bytes` beside the program's own (0: all that is free)."""
        self.driver = driver
        self.memory_bytes = memory_bytes
        self.device, self._device_index = torch.device("cuda", device_index), device_index
        self._shares_state = torch_private.graphs_share_random_state()
        self._random_numbers = StreamAffinity(driver, torch_private.stream_watch(self.device))
        self._threads = threading.local()
        self._current_device, self.in_capture = torch_private.current_device(), torch_private.in_capture()
        self._is_only_device = torch.cuda.device_count() == 1
        self._most_reserved = 0
        """The most bytes that PyTorch had reserved when free memory was about to be given back."""
        self._waits = DeviceWaits(self, _one_at_a_time)
        self.next_check_at = 0.0
        """The time of `time.monotonic` before which no result check begins on this device; `result_check.py` sets it."""

    @property
    def generator(self) -> Any:
        """Another generator over the default one's present state: to set its own offset would have cuDNN's recurrent layers draw dropout anew."""
        return torch.cuda.default_generators[self._device_index].graphsafe_get_state()

    def capture(
        self,
        run_kernels: Runnable,
        inputs: list[Any],
        reserves: Sequence[OutputReserve] = (),
        *,
        backing: int = 0,
        addresses: AliasedMemory | None = None,
        is_shifted: bool = False,
        may_draw: bool = True,
    ) -> Capture:
        """Capture one call, with allocations at `addresses` if they are given. Raises `TransientError` if nothing can be captured now.

        Also raises `AddressesError`, `DriverError`, and the callable's own errors. If it raises, nothing has run and nothing is left. A
        capture that `is_shifted` has its allocations at other addresses modulo 4 GiB. Outputs with `reserves` lie in these. The backing
        allocation has `backing` bytes, if the device has them. A callable that draws random numbers raises unless it `may_draw`.
        """
        made = None
        try:
            with handlers_put_off(), _one_at_a_time, torch.cuda.device(self.device):
                if reason := self._why_not():
                    raise TransientError(reason)
                if not hasattr(self._threads, "handle"):
                    # Each thread has a cuBLAS handle of its own, which cannot be made within a capture.
                    self._threads.handle = torch.cuda.current_blas_handle()
                if addresses is None and backing and backing * MARGIN > self._unreserved(self._counts):
                    backing = 0  # PyTorch reports an allocation that fails to its observers
                shifts = SHIFTS if is_shifted else ()
                places = OutputReserves(reserves, self.device, shifts, backing, addresses)
                made = self._capture(run_kernels, inputs, places, may_draw=may_draw)
            return made  # noqa: RET504 - a handler may raise where the block ends
        except BaseException:
            if made is not None:
                made.discard(self.driver)
            raise

    def why_not(self) -> str | None:
        """Return why this process cannot capture anything now; None if it can. Does not wait for the lock."""
        if not _one_at_a_time.acquire(blocking=False):
            return BUSY  # the thread that captures records the history
        try:
            return self._why_not()
        finally:
            _one_at_a_time.release()

    def _capture(
        self, run_kernels: Runnable, inputs: list[Any], reserves: OutputReserves, *, may_draw: bool
    ) -> Capture:
        graph, addresses = torch.cuda.CUDAGraph(keep_graph=True), reserves.addresses
        generators = [*generators_in(inputs).values()]
        capturing = functools.partial(
            torch_private.capturing, generators=generators, may_draw=may_draw, spare=self._spare_stream
        )
        pool = CapturePool(self.driver, self._device_index, capturing, addresses)
        try:
            with torch_private.allocation_history(self.device.index, pool.handle) as history:
                outputs = self._run(graph, pool, run_kernels, inputs, reserves)
                allocations, alive, temporary = lifetimes(history(), reserves.before)
                allocations, alive = (*reserves.spans, *allocations), (*reserves.spans, *alive)
            in_place = held(alive, outputs)
            if addresses is not None and in_place:
                raise AddressesError
            as_tuple = isinstance(outputs, tuple)
            if addresses is not None:
                outputs = without_owner(outputs, allocations)
            captured = self._take_over(graph)
            return Capture(
                captured,
                list(outputs),
                allocations,
                in_place,
                as_tuple=as_tuple,
                cursor=self._cursor(graph, generators, may_draw=may_draw),
                pool=pool,
                reserves=tuple(reserves.wanted),
                backing=reserves.backing,
                addresses=addresses,
                temporary_bytes=temporary,
                allocated=tuple(reserves.allocated),
            )
        except BaseException as error:
            outputs = ()  # tensors in the pool must go before it, those in frames of the callable among them
            traceback.clear_frames(error.__traceback__)
            inputs.clear()
            graph.reset()
            pool.release()
            raise

    def _cursor(
        self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator], *, may_draw: bool
    ) -> RngCursor | None:
        if self._shares_state and not (may_draw or generators):
            graph.reset()  # it would have raised where it drew
            return None
        default = torch.cuda.default_generators[self._device_index]

        def synchronize() -> None:
            torch.cuda.current_stream(self.device).synchronize()

        return RngCursor(graph, default, self.driver, synchronize, self._affinity(), generators)

    def _run(
        self,
        graph: torch.cuda.CUDAGraph,
        pool: CapturePool,
        run_kernels: Runnable,
        inputs: list[Any],
        reserves: OutputReserves,
    ) -> Sequence[Any]:
        """Run the callable in a capture, and return the outputs in their reserves."""
        with self._random_numbers.held() if self._shares_state else contextlib.nullcontext():
            # Nothing may wait within the capture for work that the GPU still does.
            torch.cuda.synchronize()
            # Nothing reads a generator's state any more, and a capture launches nothing that writes it.
            self._random_numbers.leave()
            with (
                _workspaces_in_capture(),
                torch.cuda.stream(self._stream),
                torch_private.device_waits_put_off(),
                pool.capturing(graph),
            ):
                try:
                    reserves.begin()
                    with torch_private.allocations_by(reserves.allocate):
                        outputs = reserves.place(run_kernels(inputs))
                finally:
                    inputs.clear()
                    reserves.close()
            self._stream.synchronize()
        return outputs

    @functools.cached_property
    def _stream(self) -> torch.cuda.Stream:
        """The stream of captures. It is none of PyTorch's 32, on which other threads may work: that would be captured, and not run."""
        return torch.cuda.ExternalStream(self.driver.create_stream(), self.device)

    @functools.cached_property
    def _spare_stream(self) -> torch.cuda.Stream:
        """The stream that a failed capture is cleaned up on: that of captures may still be in the state of being captured."""
        return torch.cuda.ExternalStream(self.driver.create_stream(), self.device)

    def _affinity(self) -> StreamAffinity:
        """Return the stream affinity of the next capture: it is shared with recordings that read the same generator state."""
        if self._shares_state:
            return self._random_numbers
        return StreamAffinity(self.driver, torch_private.stream_watch(self.device))

    def _take_over(self, graph: torch.cuda.CUDAGraph) -> int:
        """Return a clone of the captured graph, and remove all nodes from PyTorch's own graph."""
        captured = graph.raw_cuda_graph()
        clone = self.driver.clone(captured)
        try:
            # Replayed without nodes, PyTorch's graph advances the generators and launches nothing; see `RngCursor`.
            for node in self.driver.nodes(captured):
                self.driver.destroy_node(node)
        except BaseException:
            self.driver.destroy_graph(clone)
            raise
        return clone

    def _why_not(self) -> str | None:
        if torch.cuda.get_allocator_backend() != "native":
            return OTHER_ALLOCATOR
        if any(REUSE in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES):
            return f"the allocator is set to {REUSE}"
        # A recording waits for the GPU, and the program would be told so, or get an exception.
        if torch.cuda.get_sync_debug_mode():
            return SYNC_DEBUG
        if torch_private.history_is_recorded():
            return HISTORY
        # Asked last, since it may allocate.
        return None if torch_private.keeps_freed_memory(self.device) else NOT_CACHED

    def addresses_for_capture(self) -> int:
        """Return how many bytes of addresses suffice for the allocations of a call that has run; 0: it should get memory instead."""
        if any(EXPANDABLE in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES):
            return 0  # PyTorch then has no pools with an allocator of their own
        # The program may have set the first one back.
        suffices = max(SPARE_ADDRESSES * self._counts.most_allocated, self._most_reserved)
        return suffices if suffices >= SPARE_ADDRESSES * ADDRESSES_FROM else 0

    def free_bytes(self) -> int:
        """Return how many bytes a recording may allocate now, from PyTorch's cache or the device."""
        counts = self._counts
        free = self._unreserved(counts) + counts.reserved - counts.allocated
        return min(free, self.memory_bytes or free)

    def bytes_of_a_call(self) -> int:
        """Return how many bytes the allocations of a call that has run take at most, as far as the process's peak shows that."""
        counts = self._counts
        return max(counts.most_allocated, self._most_reserved) - counts.allocated

    def below_peak(self) -> int:
        """Return how many bytes may be allocated now without PyTorch having to reserve more than it did at a time."""
        counts = self._counts
        return counts.most_reserved - counts.allocated

    @property
    def _counts(self) -> AllocatorCounts:
        return allocator_counts(self.device)

    def _unreserved(self, counts: AllocatorCounts) -> int:
        """Return how many bytes PyTorch could still reserve on the device."""
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = int(total * torch.cuda.get_per_process_memory_fraction(self.device))
        return int(min(free, max(allowed - counts.reserved, 0)))

    @functools.cached_property
    def watch(self) -> Watch:
        """Watches replays that may wait for other ranks."""
        return Watch(torch.cuda.Event(), self.beside_captures, self.in_capture)

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        """Use the device while other threads may be capturing."""
        # Another thread would make a context on the first GPU.
        with torch.cuda.device(self.device), self.driver.relaxed():
            yield

    def is_idle_within(self, limit_s: float) -> bool:
        """Return whether the device ends all of its work in time; else a thread goes on waiting for it."""
        try:
            within(limit_s, self._wait_for_device)
        except RegisterError:
            return False
        return True

    def _wait_for_device(self) -> None:
        with self.beside_captures():  # in a thread of its own
            torch.cuda.synchronize(self.device)

    def may_wait(self) -> bool:
        """Return whether this process may wait for all work of the device; see `DeviceWaits`."""
        return self._waits.may_wait()

    def make_ready(self) -> None:
        """Give workspaces and free memory back before a capture. Raises `TransientError` if nothing can be captured now."""
        with _one_at_a_time:
            if reason := self._why_not():
                raise TransientError(reason)
        self.empty_cache(with_workspaces=True)

    def empty_cache(self, *, with_workspaces: bool = False) -> None:
        """Give free memory back to the device if there is much of it. A capture cannot allocate from it, and would reserve as much beside it."""
        if with_workspaces and not self.why_not():
            workspaces.clear()
        counts = self._note_reserved()
        free = counts.reserved - counts.allocated
        if free > MAX_CACHED_BYTES and not self.why_not() and self.may_wait():
            self._empty_cache()

    def trim(self) -> None:
        """Give free memory back to the device, and the workspaces that libraries keep for calls that are replayed from now on."""
        self._note_reserved()
        if not self.may_wait():
            return
        workspaces.clear()
        self._empty_cache()

    def allocate_workspace(self) -> None:
        """Have the BLAS library allocate its workspace for the current stream, if it has none."""
        with torch.cuda.device(self.device):
            torch.cuda.current_blas_handle()

    def _note_reserved(self) -> AllocatorCounts:
        counts = self._counts
        self._most_reserved = max(self._most_reserved, counts.reserved)
        return counts

    def _empty_cache(self) -> None:
        with self.driver.relaxed():  # another thread may be capturing, on another GPU
            workspaces.empty_cache()

    def mark(self) -> torch.cuda.Event:
        """Return an event with a time, recorded on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def conditions(self) -> tuple[tuple[Callable[[], object], object], ...]:
        """Functions in C, and the values that they return where a call can be replayed: with its device current."""
        return () if self._is_only_device else ((self._current_device, self._device_index),)

    def on_device(self) -> contextlib.AbstractContextManager[object] | None:
        """Return a context in which this device is the current one; None if it is already."""
        if self._is_only_device or self._current_device() == self._device_index:
            return None
        device: contextlib.AbstractContextManager[object] = torch.cuda.device(self.device)
        return device


@contextlib.contextmanager
def _workspaces_in_capture() -> Iterator[None]:
    """Have libraries allocate workspaces within the capture, so that their addresses are known and nothing else uses them."""
    workspaces.clear()
    try:
        yield
    finally:
        workspaces.clear()
