"""Captures CUDA graphs, records the allocator's events, and looks up current streams and devices."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pygraphd.client.backend.torch_private.other_threads import StateApart

_UNCACHED = "PYTORCH_NO_CUDA_MEMORY_CACHING"
"""A variable that PyTorch looks for once. Any value counts, also 0."""


def current_stream(device: torch.device) -> Callable[[], int]:
    """Return a function that returns the handle of a CUDA device's current stream; 0 for the CPU."""
    if device.type != "cuda":
        return int
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def stream_watch(device: torch.device) -> Callable[[], Callable[[], bool]]:
    """Return a factory: its result for the current stream is a function that returns whether that stream is known to be idle."""
    return functools.partial(_watch_stream, device) if device.type == "cuda" else lambda: bool


def _watch_stream(device: torch.device) -> Callable[[], bool]:
    stream = torch.cuda.current_stream(device)
    # A stream that was not made by torch has its address as id. It may be destroyed by the time it is asked.
    is_others = stream.cuda_stream == stream.stream_id != 0
    return bool if is_others else functools.partial(_has_ended, stream)


def _has_ended(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        # To query a stream that is being captured would end the capture.
        return not torch.cuda.is_current_stream_capturing() and bool(stream.query())


def graphs_share_random_state() -> bool:
    """Return whether all graphs read the seed and offset of a generator at one address; from torch 2.13 on each graph has its own."""
    version: Any = torch.torch_version.TorchVersion(torch.__version__)
    return bool(version < (2, 13))


def current_device() -> Callable[[], int]:
    """Return a function that returns the index of the current CUDA device, in a process that uses CUDA."""
    device: Callable[[], int] = torch._C._cuda_getDevice
    return device


def in_capture() -> Callable[[], bool]:
    """Return a function that returns whether the current stream is being captured."""
    capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
    return capturing


def history_is_recorded() -> bool:
    """Return whether the user records the history of the GPU's allocator, or (torch 2.14) of the pinned-memory allocator."""
    if torch._C._cuda_isHistoryEnabled():
        return True
    return any(torch._C._cuda_memorySnapshot(None).get("host_traces", ()))


def keeps_freed_memory(device: torch.device) -> bool:
    """Return whether PyTorch's allocator keeps memory that tensors free. Else each allocation asks the device, which fails within a capture."""
    if _UNCACHED in os.environ:
        return False
    if (is_enabled := getattr(torch._C, "_cuda_cudaCachingAllocator_is_enabled", None)) is not None:
        return bool(is_enabled())
    if torch.cuda.is_current_stream_capturing():
        return True
    # Torch 2.11 does not tell. Allocations that ask the device are not counted.
    before = _allocations(device)
    try:
        torch.empty(1, device=device)
    except torch.OutOfMemoryError:
        return True  # whoever records finds out
    return _allocations(device) > before


def _allocations(device: torch.device) -> int:
    count: int = torch._C._cuda_memoryStats(device.index)["allocation"]["all"]["allocated"]
    return count


Pool = tuple[int, int]
"""The id of a memory pool of the allocator."""


@contextlib.contextmanager
def capturing(
    graph: Any,
    device_index: int,
    pool: Pool,
    generators: Sequence[torch.Generator] = (),
    *,
    may_draw: bool = True,
    spare: Any = None,
) -> Iterator[None]:
    """Capture the work on the current stream into `graph`, while this thread allocates from `pool` alone.

    Captured kernels may draw random numbers from `generators` and, if they `may_draw`, from the device's own generator. Afterwards the
    caller has to call `release_pool`. A capture that fails leaves nothing in the allocator; it may use `spare`, a stream that nothing
    else does.
    """
    own_pool = torch.cuda.graph_pool_handle()  # the graph needs a pool; nothing is allocated from it
    ended = False
    default: Any = torch.cuda.default_generators[device_index] if generators else None
    begun_with = default.graphsafe_get_state() if default is not None else None
    is_apart = graphs_share_random_state() and not (may_draw or generators)
    apart = StateApart(device_index) if is_apart else None
    try:
        _begin_capture(graph, generators, apart, pool=own_pool)
        try:
            # If several pools match an allocation, the allocator takes the pool that began last.
            torch._C._cuda_beginAllocateCurrentThreadToPool(device_index, pool)
            try:
                yield
            finally:
                torch._C._cuda_endAllocateToPool(device_index, pool)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it would hide the first error
                graph.capture_end()
                ended = True
            raise
        graph.capture_end()
        ended = True
    finally:
        if begun_with is not None:
            # An operator that fails while it draws from another generator leaves that one as the device's default.
            default.graphsafe_set_state(begun_with)
        if not ended:
            _failed_captures.append(graph)
            # Up to torch 2.12 a failed `capture_end` leaves it open, which is fatal when the allocator next frees its cache.
            # Later versions close it themselves: then this raises at once.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(device_index, own_pool)
                torch._C._cuda_releasePool(device_index, own_pool)
            if apart is None:
                _heal_generators(device_index, generators, spare)


def _begin_capture(
    graph: Any, generators: Sequence[torch.Generator] = (), apart: StateApart | None = None, **options: Any
) -> None:
    """Begin to capture the current stream, without launching anything on it.

    Up to torch 2.12, `capture_begin` fills the generator's seed and offset by two kernels, although each replay writes them again. After
    seven kernels on streams other than the default one, all graphs of a process take the GPU 0.2 to 0.35 us a node longer, for good
    (H200, driver 580).
    """
    modes: Any = torch.utils._python_dispatch
    mode = _Beginning(apart)
    try:
        modes._push_mode(mode)  # entering the mode would affect other threads
        for each in generators:
            graph.register_generator_state(each)
        if apart is not None:
            apart.begin()
        graph.capture_begin(capture_error_mode="thread_local", **options)
    finally:
        mode.is_over = True  # first: an interrupt may keep it on the stack
        if modes._get_current_dispatch_mode() is mode:
            modes._pop_mode()
        if apart is not None:
            apart.end()


class _Beginning(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Skips operators that fill a tensor with a number, and puts the default generator's state back at the first that allocates a tensor.

    For a state that is new, `capture_begin` notes the state in the graph, allocates its tensors, and then marks it as captured.
    """

    def __init__(self, apart: StateApart | None) -> None:
        super().__init__()
        self._apart = apart
        self.is_over = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_over:
            return func(*args, **(kwargs or {}))
        if self._apart is not None and func is torch.ops.aten.empty.memory_format:
            self._apart.end()
        return args[0] if func is torch.ops.aten.fill_.Scalar else func(*args, **(kwargs or {}))


_failed_captures: list[Any] = []
"""Graphs of failed captures, never freed: up to torch 2.13 the pinned-memory allocator may still query them."""


def _heal_generators(device_index: int, generators: Sequence[torch.Generator], spare: Any) -> None:
    """Have generators draw again: up to torch 2.12 a failed capture leaves them captured. A capture that succeeds resets them."""
    with contextlib.suppress(RuntimeError), torch.cuda.stream(spare or torch.cuda.Stream(device_index)):
        something = torch.empty(1, device=torch.device("cuda", device_index))
        torch.cuda.synchronize(device_index)
        healing = torch.cuda.CUDAGraph()
        _begin_capture(healing, generators)
        something.fill_(1)
        healing.capture_end()
        healing.reset()


def release_pool(device_index: int, pool: Pool) -> None:
    """Drop one reference to a pool: its free memory returns to the driver when the allocator next empties its cache."""
    torch._C._cuda_releasePool(device_index, pool)


def pool_served_by(allocate: int, release: int) -> Pool:
    """Return a pool that gets its memory from two functions in C, given by their addresses. `release_pool` is called twice for it."""
    allocator = torch._C._cuda_customAllocator(allocate, release)
    pool = torch.cuda.MemPool(allocator)
    for each in (allocator, pool):
        # Never destroyed: that would empty the allocator's cache, which ends the process while another thread captures.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    first, second = pool.id
    return first, second


def empty_cache() -> None:
    """Give the allocator's cached memory back to the driver. Does nothing while another thread captures."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


AllocatorEvents = Callable[[], list[tuple[str, int, int]]]


@contextlib.contextmanager
def allocation_history(device_index: int, pool: Pool) -> Iterator[AllocatorEvents]:
    """Record the allocator's events; yields a function that returns those in `pool` so far, as (action, address, bytes)."""

    def events() -> list[tuple[str, int, int]]:
        snapshot = torch._C._cuda_memorySnapshot(None)
        ours = sorted(
            (segment["address"], segment["address"] + segment["total_size"])
            for segment in snapshot["segments"]
            if segment["device"] == device_index and tuple(segment["segment_pool_id"]) == tuple(pool)
        )
        starts, ends = [start for start, _ in ours], [0, *(end for _, end in ours)]
        return [
            (event["action"], event["addr"], event["size"])
            for event in snapshot["device_traces"][device_index]
            # Bisected, since a large model has thousands of events and a hundred segments.
            if event.get("addr", 0) < ends[bisect.bisect_right(starts, event.get("addr", 0))]
        ]

    record: Any = torch.cuda.memory._record_memory_history
    record(enabled="all", context=None, stacks="python", clear_history=True)
    try:
        yield events
    finally:
        record(enabled=None, clear_history=True)


def clear_workspaces() -> None:
    """Give the workspaces of the BLAS libraries back to the allocator, those of all threads."""
    torch._C._cuda_clearCublasWorkspaces()


def threads_that_compile() -> frozenset[threading.Thread]:
    """Return the threads of this process by which Inductor compiles. They launch nothing."""
    found = set[threading.Thread]()
    for each in threading.enumerate():
        # What reads the results of compile workers has a name, or else a function of Inductor's.
        function = getattr(getattr(each, "_target", None), "__module__", None) or ""
        if each.name == "InductorSubproc" or function.startswith("torch._inductor."):
            found.add(each)
    module: Any = sys.modules.get("torch._inductor.async_compile")
    # A torch that has renamed them has us wait for these threads, and is well otherwise.
    with contextlib.suppress(AttributeError, AssertionError):
        if module is not None and module.AsyncCompile.pool.cache_info().currsize:
            found |= module.AsyncCompile.pool()._threads
    return frozenset(found)
