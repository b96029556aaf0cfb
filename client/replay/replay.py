"""The hot path: binds a recording to the inputs of a call and to fresh memory, launches it, and makes the outputs.

`builder` has prepared everything that is the same at each call. Where the compiled helper is loaded it serves a call by itself
(`native.ffi.Fused`). Where the helper cannot serve a call, the same steps in Python serve it, or raise the reason.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import FallbackError
from pygraphd.client.replay.native.ffi import Parts, TensorOps
from pygraphd.client.replay.stream_affinity import StreamAffinity

if TYPE_CHECKING:
    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.replay.exec_cache import Executables
    from pygraphd.client.replay.layout import Layout, Memory
    from pygraphd.client.replay.native.ffi import Fused, Launch
    from pygraphd.client.replay.rng import PhiloxRange, RngCursor

CLOSED = "its recording has gone for others"
OTHER_GENERATOR = "it draws random numbers from another generator than when it was recorded"


@dataclass(slots=True)
class Counts:
    """Counts the calls of a recording. A `Fused` recording counts its own calls."""

    replays: int = 0
    relocated: int = 0
    """Replays for which a node was written."""
    written: int = 0
    """Nodes written into an executable."""
    fused: int = 0
    """Replays that the compiled helper served by itself."""
    next_check: int = sys.maxsize
    """The value of `replays` from which on `Recordings` serves the call itself, to check results (`result_check.py`)."""
    used: int = 0
    """The number of the latest call, counted over all recordings; see `TensorOps.tick`."""


@dataclass(frozen=True, slots=True)
class Device:
    """The functions of torch that a replay needs: to allocate memory, to handle many tensors, and to tell the current stream."""

    allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
    ops: TensorOps
    stream: Callable[[], int]
    watch_stream: Callable[[], Callable[[], bool]]


class _Steps:
    """Allocates the memory of a call and makes its outputs, step by step."""

    def __init__(self, layout: Layout, device: Device) -> None:
        memories, outputs = layout.memories, layout.outputs
        # The allocator takes the smallest gap that is large enough, and leaves fewer behind if large allocations come first.
        self.targets = sorted(range(len(memories)), key=lambda index: -memories[index].bytes)
        self.arguments = [(memories[at].size, memories[at].stride, memories[at].dtype) for at in self.targets]
        self.making = outputs.making(device.ops)
        self.blank = outputs.blank()
        self._allocate = device.allocate
        self._outputs = outputs

    def memory(self) -> list[torch.Tensor]:
        """Return new memory, in the order of the layout."""
        memory: list[Any] = [None] * len(self.targets)
        for index, arguments in zip(self.targets, self.arguments, strict=True):
            memory[index] = self._allocate(*arguments)
        return memory

    def outputs(self, memory: list[Any], inputs: list[Any]) -> Any:
        """Return the outputs of a call on its memory."""
        return self._outputs.gather(memory, self.making.fill(self.blank.copy(), inputs, memory), inputs)


class _Drawing:
    """Launches a graph that draws random numbers."""

    def __init__(self, cursor: RngCursor, driver: Driver) -> None:
        self._cursor = cursor
        self._driver = driver

    def launch(self, executable: int, stream: int) -> PhiloxRange:
        """Launch on the current stream, whose handle is given; raises `FallbackError` or `DriverError`, with the generator as it was."""
        cursor = self._cursor
        with cursor.affinity.lock:
            cursor.affinity.enter(stream)
            drawn = cursor.advance(stream)
            try:
                self._driver.launch(executable, stream)
            except DriverError:
                cursor.take_back(drawn)
                raise
            return drawn


class Replay:
    """A recording that can be bound to any addresses. It serves calls of several threads one after the other."""

    def __init__(
        self,
        driver: Driver,
        graph: int,
        executables: Executables,
        layout: Layout,
        device: Device,
        cursor: RngCursor | None = None,
    ) -> None:
        """Take over `graph`, its executables and `cursor`."""
        self._driver = driver
        self._graph = graph
        self.layout = layout
        self._device = device
        self._cursor = cursor
        self._start: Launch = driver.launch if cursor is None else _Drawing(cursor, driver).launch
        self._staging = StreamAffinity(driver, device.watch_stream) if layout.staged else None
        self._executables: Executables | None = executables
        self._steps = _Steps(layout, device)
        self.fused = self._fuse(executables)
        """Serves calls without Python; None: there is no compiled helper, or it cannot serve this layout."""
        self.counts: Counts | Fused = self.fused or Counts()
        self._lock: Any = self.fused or threading.Lock()

    def __call__(self, inputs: list[Any]) -> Any:
        """Serve a call, clear its list of inputs, and return the outputs.

        Raises `FallbackError`, `DriverError` or torch's out-of-memory error, with the inputs as they were. After a `DriverError` the
        replay is of no more use.
        """
        return self.drawing(inputs)[0]

    def drawing(self, inputs: list[Any]) -> tuple[Any, PhiloxRange | None]:
        """Serve a call as `__call__` does, and return also the range of random numbers that it was given, if it draws any."""
        done = self.fused(inputs) if self.fused is not None else None
        return done or self.by_steps(inputs)

    def by_steps(self, inputs: list[Any]) -> tuple[Any, PhiloxRange | None]:
        """Serve a call as `drawing` does, but step by step in Python, which raises the reason if the call does not fit."""
        if any(inputs[index] is not generator for index, generator in self.layout.generators):
            raise FallbackError(OTHER_GENERATOR)
        with self._lock:
            memory = self._steps.memory()
            drawn = self._launch(inputs, memory, self._device.stream())
            outputs = self._steps.outputs(memory, inputs)
        inputs.clear()
        return outputs, drawn

    def memory(self) -> list[torch.Tensor]:
        """Allocate the memory of one call."""
        return self._steps.memory()

    def run(self, inputs: list[Any], memory: list[torch.Tensor]) -> Any:
        """Serve a call on memory from `memory()`; see `__call__`."""
        with self._lock:
            self._launch(inputs, memory, self._device.stream())
            result = self._steps.outputs(memory, inputs)
        inputs.clear()
        return result

    def _launch(self, inputs: list[Any], memory: list[Any], stream: int) -> PhiloxRange | None:
        executables = self._executables
        if executables is None:
            raise FallbackError(CLOSED)
        # First, since nothing need be written for a launch that may not be on this stream.
        if self._staging is not None:
            self._staging.enter(stream)
        if self._cursor is not None:
            self._cursor.affinity.expect(stream)
        try:
            executable, written = executables.bind(inputs, memory, stream)
            if self._staging is not None:
                for index, buffer in self.layout.staged:
                    buffer.copy_(inputs[index].detach())
        except (FallbackError, DriverError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # Nothing has run yet, so these inputs, whatever they are, can be given to the kernels.
            raise FallbackError(f"a replay failed: {type(error).__name__}") from error
        drawn: PhiloxRange | None = self._start(executable, stream)
        counts = self.counts
        counts.replays += 1
        counts.relocated += written > 0
        counts.written += written
        counts.used = self._device.ops.tick()
        return drawn

    # --- the compiled helper ---

    def _fuse(self, executables: Executables) -> Fused | None:
        steps, layout = self._steps, self.layout
        pieces, picks = steps.making.pieces, layout.outputs.picks
        if executables.native is None or layout.staged or pieces is None or picks is None:
            return None
        return self._device.ops.fused(
            Parts(
                self._device.allocate,
                tuple(steps.arguments),
                tuple(steps.targets),
                pieces,
                picks,
                steps.blank,
                self._device.stream,
                layout.generators,
                executables.native,
                self._fused_launch(),
                self._cursor.affinity.expect if self._cursor is not None else None,
            )
        )

    def _fused_launch(self) -> Launch:
        """Return the launch function of `fused`: that of the driver, or a Python function where each launch needs preparation."""
        driver = self._driver
        if self._cursor is not None or driver.launch_address is None:
            return self._start
        return self._device.ops.launching(driver.launch_address, driver.fail_launch) or self._start

    # --- what others ask, and the end ---

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The allocations that a call makes."""
        return self.layout.memories

    def allocate_bytes(self, size: int) -> torch.Tensor:
        """Allocate `size` bytes as a call does."""
        return self._device.allocate((size,), (1,), torch.uint8)

    @property
    def executables(self) -> int:
        """The number of executables of the graph."""
        executables = self._executables  # another thread may close it
        return len(executables) if executables is not None else 0

    @property
    def draws(self) -> bool:
        """Whether the graph draws random numbers."""
        return self._cursor is not None or bool(self.layout.generators)

    def forget_random_numbers(self) -> None:
        """Stop advancing the generator: the graph draws no random numbers."""
        with self._lock:
            cursor, self._cursor = self._cursor, None
            self._start = self._driver.launch
            if self.fused is not None:
                self.fused.launch, self.fused.expect = self._fused_launch(), None
        if cursor is not None:
            cursor.close()

    def close(self) -> None:
        """Destroy the executables and the graph; launches under way go on, and calls from now on do not fit."""
        with self._lock:
            executables, self._executables = self._executables, None
            if self.fused is not None:
                self.fused.table = None
        if executables is not None:
            with contextlib.suppress(DriverError), self._driver.relaxed():
                executables.close()
                self._driver.destroy_graph(self._graph)
        self.forget_random_numbers()

    def __del__(self) -> None:
        # A model that is dropped takes its recordings along.
        with contextlib.suppress(Exception):
            self.close()
