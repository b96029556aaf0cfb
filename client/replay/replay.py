"""The hot path of a relocatable graph: bind it to the inputs of a call and to fresh memory, launch it, hand out tensors.

Everything was worked out by `builder`; here indices are followed. Nodes are written only for what lies elsewhere than an executable
is bound to (`exec_cache`). The compiled helper does a whole call in one go, where it is there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import UnfitError
from pygraphd.client.replay.graph_exec import InputGroup
from pygraphd.client.replay.native.ffi import Bulk
from pygraphd.client.replay.outputs import Outputs
from pygraphd.client.replay.stream_affinity import OneStream

if TYPE_CHECKING:
    from collections.abc import Collection

    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.replay.exec_cache import Executables
    from pygraphd.client.replay.native.ffi import Call, Launch
    from pygraphd.client.replay.rng import Draw


CLOSED = "its recording has gone for others"


@dataclass(frozen=True, slots=True)
class Memory:
    """An allocation that each call makes anew for one slot; sizes in elements of `dtype`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size in bytes."""
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        itemsize: int = self.dtype.itemsize
        return (last + 1) * itemsize


OTHER_GENERATOR = "it draws random numbers from another generator than when it was recorded"


class Ticket(Protocol):
    """Advances a random number generator as the graph would, and hands the graph its state."""

    one_stream: OneStream
    """Of what it writes for a launch."""

    def advance(self, stream: int) -> Draw:
        """Do so for one launch on the current stream, of which this is the handle."""

    def take_back(self, drawn: Draw) -> None:
        """Put the generator back there, as nothing was launched."""

    def learn(self, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        """Find a shorter way to do so, told what addresses kernels are given that are nothing that is known.

        Return whether there is anything to do.
        """

    def close(self) -> None:
        """Let go of the graph that it belongs to."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a recording binds to: slots are numbered through `groups` and then through `memories`."""

    groups: tuple[InputGroup, ...]
    memories: tuple[Memory, ...]
    outputs: Outputs
    staged: tuple[tuple[int, torch.Tensor], ...] = ()
    """Inputs that are copied into a buffer of fixed address, as (index, buffer)."""
    generators: tuple[tuple[int, torch.Generator], ...] = ()
    """Inputs whose random numbers it draws, as (index, generator)."""
    saves_together: bool = False
    """Several outputs that are saved for a backward share a storage."""


@dataclass(slots=True)
class Counts:
    """What the calls of a recording came to."""

    replays: int = 0
    relocated: int = 0
    """Replays for which something had moved."""
    written: int = 0
    """Nodes written into an executable."""
    at_once: int = 0
    """Replays that the compiled helper did in one go."""

    def add(self, written: int) -> None:
        """Count a replay for which so many nodes were written."""
        self.replays += 1
        self.relocated += written > 0
        self.written += written


@dataclass(frozen=True, slots=True)
class Device:
    """What replaying needs of torch, chosen once: how memory is made, looked at, given back, and which stream is current."""

    allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
    bulk: Bulk
    stream: Callable[[], int]
    watch_stream: Callable[[], Callable[[], bool]]


class _Allocating:
    """Allocates what one call needs, and makes its outputs of that."""

    def __init__(self, layout: Layout, device: Device) -> None:
        memories, outputs = layout.memories, layout.outputs
        # The allocator takes the smallest gap that is large enough, and leaves fewer behind if what is large comes first.
        self._slots = sorted(range(len(memories)), key=lambda slot: -memories[slot].bytes)
        self._columns = (
            [memories[slot].size for slot in self._slots],
            [memories[slot].stride for slot in self._slots],
            [memories[slot].dtype for slot in self._slots],
        )
        self._allocate = device.allocate
        self._making = outputs.making(device.bulk)
        self._gather = outputs.gathering(device.bulk)
        self.blank = outputs.blank()
        """What is made, with what is the same at every call in its place."""
        self.no_memory: list[Any] = [None] * len(memories)
        self.at_once: Call | None = None
        """Does a whole call; None: it is to be done step by step."""
        pieces, picks = self._making.pieces, outputs.picks
        if not layout.staged and pieces is not None and picks is not None:
            arguments = [*zip(*self._columns, strict=True)]
            self.at_once = device.bulk.calling(device.allocate, arguments, self._slots, pieces, picks)

    def memory(self) -> list[torch.Tensor]:
        """Return new memory, in the order of the slots."""
        memory = self.no_memory.copy()
        for slot, made in zip(self._slots, map(self._allocate, *self._columns), strict=True):
            memory[slot] = made
        return memory

    def outputs(self, memory: list[Any], inputs: list[Any]) -> Any:
        """Return the outputs of a call on some memory."""
        return self._gather(memory, self._making.fill(self.blank.copy(), inputs, memory), inputs)


class _Drawing:
    """Launches a graph that draws random numbers."""

    def __init__(self, ticket: Ticket, driver: Driver) -> None:
        self._ticket = ticket
        self._driver = driver

    def launch(self, executable: int, stream: int) -> Draw:
        """Do so on a stream, which is the current one; raises `UnfitError` or `DriverError`, with the generator as it was."""
        ticket = self._ticket
        with ticket.one_stream.lock:
            ticket.one_stream.enter(stream)
            drawn = ticket.advance(stream)
            try:
                self._driver.launch(executable, stream)
            except DriverError:
                ticket.take_back(drawn)
                raise
            return drawn


class Replay:
    """A recorded graph that can be bound to any addresses. Calls from several threads take turns."""

    def __init__(
        self,
        driver: Driver,
        graph: int,
        executables: Executables,
        layout: Layout,
        device: Device,
        ticket: Ticket | None = None,
    ) -> None:
        """Take over `graph`, its executables and `ticket`."""
        self.counts = Counts()
        self.look_at = sys.maxsize
        """From which of its calls on somebody is to look at it."""
        self._driver = driver
        self._graph = graph
        self._layout = layout
        self._device = device
        self._ticket = ticket
        self._start: Callable[[int, int], Draw | None] = (
            driver.launch if ticket is None else _Drawing(ticket, driver).launch
        )
        self._start_at_once = self._launching()
        self._lock = threading.Lock()
        self._staging = OneStream(driver, device.watch_stream) if layout.staged else None
        self._executables: Executables | None = executables
        self._allocating = _Allocating(layout, device)

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the graph on a call's inputs, clear the list, and return the outputs.

        Raises `UnfitError`, `DriverError` or torch's out-of-memory error, with the inputs as they were; after a
        `DriverError` the replay is of no more use.
        """
        return self.drawing(inputs)[0]

    def drawing(self, inputs: list[Any]) -> tuple[Any, Draw | None]:
        """Do the same, and return also what random numbers it was given, if it draws any."""
        if (drawn_from := self._layout.generators) and any(inputs[at] is not each for at, each in drawn_from):
            raise UnfitError(OTHER_GENERATOR)
        with self._lock:
            done = self._run(inputs, self._device.stream())
        inputs.clear()
        return done

    def _run(self, inputs: list[Any], stream: int) -> tuple[Any, Draw | None]:
        executables, allocating = self._executables, self._allocating
        if allocating.at_once is not None and executables is not None:
            if self._ticket is not None:
                self._ticket.one_stream.expect(stream)
            memory, blank = allocating.no_memory.copy(), allocating.blank
            done = allocating.at_once(executables.native, inputs, memory, blank, self._start_at_once, stream)
            if done is not None:
                outputs, drawn, written = done
                self.counts.add(written)
                self.counts.at_once += 1
                return outputs, drawn
        # What does not fit is told by this.
        memory = allocating.memory()
        drawn = self._launch(inputs, memory, stream)
        return allocating.outputs(memory, inputs), drawn

    def _launching(self) -> Launch:
        """Return what launches in a `Call`: the driver, if nothing has to be done before."""
        driver = self._driver
        if self._ticket is not None or driver.launch_address is None:
            return self._start
        return self._device.bulk.launching(driver.launch_address, driver.fail_launch) or self._start

    def memory(self) -> list[torch.Tensor]:
        """Allocate what one call needs beside its inputs."""
        return self._allocating.memory()

    def run(self, inputs: list[Any], memory: list[torch.Tensor]) -> Any:
        """Run the graph on a call's inputs and on memory from `memory()`; see `__call__`."""
        with self._lock:
            self._launch(inputs, memory, self._device.stream())
            result = self._allocating.outputs(memory, inputs)
        inputs.clear()
        return result

    def _launch(self, inputs: list[Any], memory: list[Any], stream: int) -> Draw | None:
        executables = self._executables
        if executables is None:
            raise UnfitError(CLOSED)
        # First: on another stream, nothing need be written for a launch that will not be.
        if self._staging is not None:
            self._staging.enter(stream)
        if self._ticket is not None:
            self._ticket.one_stream.expect(stream)
        try:
            executable, written = executables.bind(inputs, memory, stream)
            if self._staging is not None:
                self._stage(inputs)
        except (UnfitError, DriverError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # Nothing has run yet, so whatever it is that these inputs have, they can be launched.
            raise UnfitError(f"a replay failed: {type(error).__name__}") from error
        drawn = self._start(executable, stream)
        self.counts.add(written)
        return drawn

    def _stage(self, inputs: list[Any]) -> None:
        for index, buffer in self._layout.staged:
            buffer.copy_(inputs[index].detach())

    @property
    def layout(self) -> Layout:
        """What it binds to."""
        return self._layout

    @property
    def memories(self) -> tuple[Memory, ...]:
        """The allocations that a call makes."""
        return self._layout.memories

    def allocate_bytes(self, size: int) -> torch.Tensor:
        """Allocate as a call does."""
        return self._device.allocate((size,), (1,), torch.uint8)

    @property
    def executables(self) -> int:
        """How many executables there are of the graph."""
        executables = self._executables  # another thread may close it
        return len(executables) if executables is not None else 0

    def close(self) -> None:
        """Destroy the executables and the graph; launches under way go on, and calls from now on do not fit."""
        with self._lock:
            executables, self._executables = self._executables, None
        if executables is not None:
            with contextlib.suppress(DriverError), self._driver.relaxed():
                executables.close()
                self._driver.destroy_graph(self._graph)
        self.forget_random_numbers()

    def __del__(self) -> None:
        # A model that is dropped takes its recordings along.
        with contextlib.suppress(Exception):
            self.close()

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return self._ticket is not None or bool(self._layout.generators)

    def forget_random_numbers(self) -> None:
        """Stop advancing the generator: the graph draws no random numbers."""
        with self._lock:
            ticket, self._ticket = self._ticket, None
            self._start = self._driver.launch
            self._start_at_once = self._launching()
        if ticket is not None:
            ticket.close()
