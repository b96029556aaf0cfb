"""The hot path: binds a recording to the inputs of a call and to fresh memory, launches it, and makes the outputs.

`builder` has prepared everything that is the same at each call. The compiled helper serves a call by itself (`native.ffi.Fused`). The
steps in Python serve recordings with unusual outputs, and verification; and they raise the reason if a call does not fit.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import Driver, DriverError
from pygraphd.client.backend.errors import (
    REENTERED,
    DisturbedError,
    FallbackError,
    LayoutMismatch,
    LayoutMismatchError,
    ProfiledError,
)
from pygraphd.client.common.signals import raised_by_handler
from pygraphd.client.replay.native.ffi import Fused, Launch, Parts, TensorOps
from pygraphd.client.replay.segments import mismatch

if TYPE_CHECKING:
    from pygraphd.client.replay.exec_cache import Executables
    from pygraphd.client.replay.layout import Layout
    from pygraphd.client.replay.rng import PhiloxRange, RngCursor
    from pygraphd.client.replay.single_kernel import SingleKernel

AFTER_LAUNCH = "is_after_launch"
"""The attribute of an exception that the compiled helper raises when it has launched; `fused_replay.h` sets it."""
RECORDING_CLOSED = "its recording was evicted meanwhile"

_KNOWN = (FallbackError, DriverError, torch.OutOfMemoryError)


class _KernelsOnError:
    def __enter__(self) -> None: ...

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, _KNOWN):
            return
        # After a launch the kernels must not run a second time. An exception of a signal handler may come right after it.
        if not getattr(error, AFTER_LAUNCH, False) and not raised_by_handler(error):
            raise FallbackError(f"a replay failed: {type(error).__name__}") from error


kernels_on_error = _KernelsOnError()
"""Context in which an unexpected error before a launch is raised as a `FallbackError`: the call then runs as KERNELS, on the same inputs."""


@dataclass(frozen=True, slots=True)
class Device:
    """The functions of torch that a replay needs: to allocate memory, to handle many tensors, and to tell the current stream."""

    allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
    ops: TensorOps
    stream: Callable[[], int]
    stream_function: tuple[int, int]
    """The same for C; see `torch_private.stream_function`."""


def drawing_launch(cursor: RngCursor, launch_executable: Launch) -> Launch:
    """Return the launch function of a graph that draws random numbers. It raises `FallbackError` or `DriverError`, with the generator as it was."""
    affinity = cursor.affinity

    def launch(executable: int, stream: int) -> PhiloxRange:
        # As `StreamAffinity.held`, without a generator of Python for each launch.
        if affinity.holder == threading.get_ident():
            raise DisturbedError(REENTERED)
        with affinity.lock:
            affinity.holder = threading.get_ident()
            try:
                affinity.enter(stream)
                drawn = cursor.advance(stream)
                try:
                    launch_executable(executable, stream)
                except DriverError:
                    cursor.take_back(drawn)
                    raise
                return drawn
            finally:
                affinity.holder = 0

    return launch


class Replay:
    """A recording that can be bound to any addresses. It serves calls of several threads one after the other."""

    def __init__(
        self,
        driver: Driver,
        graph: int,
        executables: Executables | SingleKernel,
        layout: Layout,
        device: Device,
        cursor: RngCursor | None = None,
    ) -> None:
        """Take over `graph`, its executables and `cursor`."""
        self._pid = os.getpid()
        self._driver = driver
        self._graph = graph
        self.layout = layout
        self._device = device
        self._cursor = cursor
        self._launch_executable, self._launch_address = executables.launch, executables.launch_address
        self._start: Launch = (
            self._launch_executable if cursor is None else drawing_launch(cursor, self._launch_executable)
        )
        self._executables: Executables | SingleKernel | None = executables
        memories, outputs = layout.memories, layout.outputs
        # The allocator takes the smallest gap that is large enough, and leaves fewer behind if large allocations come first.
        self._order = sorted(range(len(memories)), key=lambda index: -memories[index].bytes)
        self._allocations = [
            (memories[at].size, memories[at].stride, memories[at].dtype) for at in self._order
        ]
        self._fill = device.ops.filling(outputs.pieces)
        self.counts = self._fuse(executables)
        """The counts of the calls; as a context manager, it holds off calls of other threads."""
        self.fused = self.counts if outputs.are_plain else None
        """Serves calls without Python; None: the compiled helper cannot serve this layout."""

    def serve(self, inputs: list[Any]) -> tuple[Any, PhiloxRange | None]:
        """Serve a call, clear its list of inputs, and return the outputs and the range of random numbers that it was given, if it draws any.

        Raises `FallbackError`, `DriverError` or torch's out-of-memory error, with the inputs as they were. After a `DriverError` the
        replay is of no more use.
        """
        with kernels_on_error:
            done = self.fused(inputs) if self.fused is not None else None
        return done or self.serve_in_python(inputs)

    def memory(self) -> list[torch.Tensor]:
        """Allocate the memory of one call, and return it in the order of the layout."""
        memory: list[Any] = [None] * len(self._order)
        for index, arguments in zip(self._order, self._allocations, strict=True):
            memory[index] = self._device.allocate(*arguments)
        return memory

    def serve_on(self, inputs: list[Any], memory: list[torch.Tensor]) -> Any:
        """Serve a call on memory from `memory()`, and return the outputs; see `serve`."""
        return self.serve_in_python(inputs, memory)[0]

    def serve_in_python(
        self, inputs: list[Any], memory: list[Any] | None = None
    ) -> tuple[Any, PhiloxRange | None]:
        """Serve a call as `serve` does, but step by step in Python, which raises the reason if it does not fit; `memory` is from `memory()`."""
        if any(inputs[index] is not generator for index, generator in self.layout.generators):
            raise LayoutMismatchError(LayoutMismatch.GENERATOR)
        if self.counts.is_held_here():
            raise DisturbedError(REENTERED)
        with self.counts:
            with kernels_on_error:
                memory = self.memory() if memory is None else memory
            drawn = self._launch(inputs, memory, self._device.stream())
            # Not `kernels_on_error`: after a launch, KERNELS would write to the inputs a second time.
            outputs = self.layout.outputs.gather(self._fill, memory, inputs)
        # Only now: until a call is served, KERNELS may still need them.
        inputs.clear()
        return outputs, drawn

    def _launch(self, inputs: list[Any], memory: list[Any], stream: int) -> PhiloxRange | None:
        executables = self._executables
        # Another thread may have dropped the recording since this call found it.
        if executables is None:
            raise FallbackError(RECORDING_CLOSED)
        # First, since nothing need be written for a launch that may not be on this stream.
        if self._cursor is not None:
            self._cursor.affinity.expect(stream)
        with kernels_on_error:
            found = self._device.ops.bind(executables.table, inputs, memory, stream)
            if found is None:
                raise mismatch(executables.segments, inputs)
            executable, written = found
        # Asked again: a profile may have begun while this call waited for another one of the recording.
        if torch_private.is_profiled() and not executables.can_launch_profiled:
            raise ProfiledError
        drawn: PhiloxRange | None = self._start(executable, stream)
        counts = self.counts
        counts.replays += 1
        counts.relocated += written > 0
        counts.written += written
        counts.used = self._device.ops.tick()
        return drawn

    # --- the compiled helper ---

    def _fuse(self, executables: Executables | SingleKernel) -> Fused:
        outputs, cursor = self.layout.outputs, self._cursor
        return self._device.ops.fused(
            Parts(
                self._device.allocate,
                tuple(self._allocations),
                tuple(self._order),
                outputs.pieces,
                outputs.blank,
                *self._device.stream_function,
                self._driver.capture_address,
                self.layout.generators,
                executables.table,
                self._fused_launch(),
                executables.fail_launch,
                None if cursor is None else cursor.affinity.expect,
            )
        )

    def _fused_launch(self) -> Launch | int:
        # The address of the driver's function, or a Python function where each launch needs preparation.
        return self._start if self._cursor is not None else self._launch_address or self._start

    # --- what others ask, and the end ---

    def allocate_bytes(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes as a call does."""
        return self._device.allocate((size,), (1,), torch.uint8)

    @property
    def executables(self) -> int:
        """The number of executables of the graph."""
        executables = self._executables  # another thread may close it
        return len(executables) if executables is not None else 0

    @property
    def can_launch_profiled(self) -> bool:
        """Whether calls may be served while a profiler runs; see `Executables.can_launch_profiled`."""
        executables = self._executables
        return executables is None or executables.can_launch_profiled

    @property
    def scratch_bytes(self) -> int:
        """The bytes of scratch that the recording needs; 0 if there is none, or it is in pieces."""
        scratch = self.layout.scratch
        return 0 if scratch is None else self.layout.memories[scratch].bytes

    def allocate_scratch(self, size: int) -> None:
        """Allocate `size` bytes of scratch at each call from now on, at least as many as the recording needs. Its layout must say where."""
        assert self.layout.scratch is not None
        at = self._order.index(self.layout.scratch)
        # The helper reads `arguments` in each call: `counts` holds off those of other threads.
        with self.counts:
            self._allocations[at] = (size,), (1,), torch.uint8
            self.counts.arguments = tuple(self._allocations)

    @property
    def draws(self) -> bool:
        """Whether the graph draws random numbers."""
        return self._cursor is not None or bool(self.layout.generators)

    def forget_random_numbers(self) -> None:
        """Stop advancing the generator: the graph draws no random numbers."""
        with self.counts:
            cursor, self._cursor = self._cursor, None
            self._start = self._launch_executable
            self.counts.launch, self.counts.expect = self._fused_launch(), None
        if cursor is not None:
            cursor.close()

    def close(self) -> None:
        """Destroy the executables and the graph; launches under way go on, and calls from now on do not fit."""
        with self.counts:
            executables, self._executables = self._executables, None
            self.counts.table = None
        if executables is not None:
            with contextlib.suppress(DriverError), self._driver.relaxed():
                executables.close()
                self._driver.destroy_graph(self._graph)
        self.forget_random_numbers()

    def __del__(self) -> None:
        # A model that is dropped takes its recordings along, but not in a forked child: the driver does not work there, and a thread that
        # was in a call at the fork is gone with the lock held.
        with contextlib.suppress(Exception):
            if self._pid == os.getpid():
                self.close()
