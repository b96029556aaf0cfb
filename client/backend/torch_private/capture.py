"""Captures CUDA graphs, records what the allocator does, and asks for streams and devices."""

from __future__ import annotations

import bisect
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def current_stream(device: torch.device) -> Callable[[], int]:
    """Return what gives the handle of a CUDA device's current stream; 0 for the CPU."""
    if device.type != "cuda":
        return int
    return functools.partial(torch._C._cuda_getCurrentRawStream, device.index)


def stream_watch(device: torch.device) -> Callable[[], Callable[[], bool]]:
    """Return what returns, of a device's current stream, what says whether it has nothing left to do; of some that is never known."""
    return functools.partial(_watch_stream, device) if device.type == "cuda" else lambda: bool


def _watch_stream(device: torch.device) -> Callable[[], bool]:
    stream = torch.cuda.current_stream(device)
    # One that others have made, whose id is its address, may be gone by the time it is asked.
    is_others = stream.cuda_stream == stream.stream_id != 0
    return bool if is_others else functools.partial(_has_ended, stream)


def _has_ended(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        # Asking would end the capture.
        return not torch.cuda.is_current_stream_capturing() and bool(stream.query())


def graphs_share_random_state() -> bool:
    """Whether all graphs of a generator read its seed and offset at one place, and not each at its own, as from 2.13 on."""
    version: Any = torch.torch_version.TorchVersion(torch.__version__)
    return bool(version < (2, 13))


def current_device() -> Callable[[], int]:
    """Return what tells the index of the current CUDA device, in a process that uses one."""
    device: Callable[[], int] = torch._C._cuda_getDevice
    return device


def in_capture() -> Callable[[], bool]:
    """Return what says whether the current stream is being captured."""
    capturing: Callable[[], bool] = torch._C._cuda_isCurrentStreamCapturing
    return capturing


def history_is_recorded() -> bool:
    """Whether the user has an allocator, the GPU's or (2.14) that of pinned memory, record what it does."""
    if torch._C._cuda_isHistoryEnabled():
        return True
    return any(torch._C._cuda_memorySnapshot(None).get("host_traces", ()))


Pool = tuple[int, int]
"""What names a pool of the allocator's."""


@contextlib.contextmanager
def capturing(
    graph: Any, device_index: int, pool: Pool, generators: Sequence[torch.Generator] = ()
) -> Iterator[None]:
    """Capture what runs on the current stream into `graph`, while this thread allocates from `pool` alone.

    What is captured may draw from `generators` beside the device's own. `pool` has a user more in the end, for the caller to take away by `release_pool`. If the capture fails, nothing of it is
    left with the allocator.
    """
    own_pool = torch.cuda.graph_pool_handle()  # the graph's own, which nothing is allocated from
    ended = False
    begun_with = _default_state(device_index) if generators else None
    try:
        _begin_capture(graph, generators, pool=own_pool)
        try:
            # Of several pools that ask for an allocation the last to begin gets it.
            torch._C._cuda_beginAllocateCurrentThreadToPool(device_index, pool)
            try:
                yield
            finally:
                torch._C._cuda_endAllocateToPool(device_index, pool)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it would hide what went wrong first
                graph.capture_end()
                ended = True
            raise
        graph.capture_end()
        ended = True
    finally:
        if begun_with is not None:
            # An operator that fails while it draws from another generator leaves that in the place of the device's own.
            torch.cuda.default_generators[device_index].graphsafe_set_state(begun_with)
        if not ended:
            _clean_up_after_capture(graph, device_index, own_pool, generators)


def _default_state(device_index: int) -> Any:
    return torch.cuda.default_generators[device_index].graphsafe_get_state()


def _begin_capture(graph: Any, generators: Sequence[torch.Generator] = (), **options: Any) -> None:
    """Begin to capture the current stream, and leave nothing to be done on it.

    Up to 2.12 that writes the generator's seed and offset there, by a kernel each, which nobody reads: a replay writes them again. From the seventh
    kernel on that a process has had on other streams than the default one, all of its graphs take the GPU 0.2 to 0.35 us a node longer,
    for good (H200, driver 580).
    """
    modes: Any = torch.utils._python_dispatch
    modes._push_mode(_NothingFilled())  # to enter it would tell other threads, too
    try:
        for each in generators:
            graph.register_generator_state(each)
        graph.capture_begin(capture_error_mode="thread_local", **options)
    finally:
        modes._pop_mode()


class _NothingFilled(TorchDispatchMode):  # type: ignore[misc]  # torch has no types for it
    """Leaves tensors that are to be filled with a number as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.fill_.Scalar else func(*args, **(kwargs or {}))


_failed_captures: list[Any] = []
"""Kept for good: up to 2.13 the allocator of pinned memory may still ask them whether a stream is being captured."""


def _clean_up_after_capture(
    graph: Any, device_index: int, pool: Pool, generators: Sequence[torch.Generator]
) -> None:
    """Undo what `capture_begin` has done and a failing `capture_end` has not."""
    _failed_captures.append(graph)
    # Up to 2.12 the pool stays open, which is fatal when the allocator next frees its cache, and nobody releases it. Later
    # versions close it themselves: then this raises RuntimeError at once.
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device_index, pool)
        torch._C._cuda_releasePool(device_index, pool)
    # Up to 2.12 generators go on to believe that they are being captured, and every random number raises. A capture that
    # succeeds puts that right.
    with contextlib.suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream(device_index)):
        something = torch.empty(1, device=torch.device("cuda", device_index))
        torch.cuda.synchronize(device_index)
        healing = torch.cuda.CUDAGraph()
        _begin_capture(healing, generators)
        something.fill_(1)
        healing.capture_end()
        healing.reset()


def release_pool(device_index: int, pool: Pool) -> None:
    """Have the memory of a pool be given back when the allocator next empties its cache, as far as it is free."""
    torch._C._cuda_releasePool(device_index, pool)


def empty_cache() -> None:
    """Give what the allocator keeps back to the driver; if another thread captures, it does so when it needs memory."""
    with contextlib.suppress(RuntimeError):
        torch.cuda.empty_cache()


AllocatorEvents = Callable[[], list[tuple[str, int, int]]]


@contextlib.contextmanager
def allocation_history(device_index: int, pool: Pool) -> Iterator[AllocatorEvents]:
    """Have the allocator record what it does; yields what returns its events in `pool` so far, as (action, address, bytes)."""

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
            # Thousands of events, and a hundred segments in a large model.
            if event.get("addr", 0) < ends[bisect.bisect_right(starts, event.get("addr", 0))]
        ]

    record: Any = torch.cuda.memory._record_memory_history
    record(enabled="all", context=None, stacks="python", clear_history=True)
    try:
        yield events
    finally:
        record(enabled=None, clear_history=True)


def clear_workspaces() -> None:
    """Have the BLAS libraries give back their workspaces."""
    torch._C._cuda_clearCublasWorkspaces()
