"""The hot path of a relocatable graph: bind it to the inputs of a call and to fresh memory, launch it, hand out tensors.

Everything was worked out by `recording`; here indices are followed. Words are written only for what has moved since the last
call, and a call whose addresses are those of the call before writes nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client.driver import DriverError
from pygraphd.client.relocation import alignment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.driver import Driver
    from pygraphd.client.parameters import Parameters
    from pygraphd.client.relocation import Table


CLOSED = "its recording has gone for others"


class UnfitError(Exception):
    """A recording does not fit the inputs of one call, which is to be launched; the text is the reason."""


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Inputs that overlap and so move together: `members` as (index, bytes from the group's base). Its number is its slot."""

    members: tuple[tuple[int, int], ...]
    alignment: int


@dataclass(frozen=True, slots=True)
class Memory:
    """An allocation that each call makes anew for one slot; sizes in elements of `dtype`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class Output(Protocol):
    """How one output of a call is made."""

    def make(self, inputs: Sequence[Any], memory: Sequence[torch.Tensor]) -> Any:
        """Return the output; `memory` holds what the call has allocated."""


class Ticket(Protocol):
    """Advances a random number generator as the graph would, and hands the graph its state."""

    def advance(self) -> None:
        """Do so for one launch on the current stream."""

    def close(self) -> None:
        """Let go of the graph that it belongs to."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a recording binds to: slots are numbered through `groups` and then through `memories`."""

    groups: tuple[InputGroup, ...]
    memories: tuple[Memory, ...]
    outputs: tuple[Output, ...]
    staged: tuple[tuple[int, torch.Tensor], ...] = ()
    """Inputs that are copied into a buffer of fixed address, as (index, buffer)."""
    as_tuple: bool = True


@dataclass(slots=True)
class Counts:
    """What the calls of a recording came to."""

    replays: int = 0
    relocated: int = 0
    """Replays for which something had moved."""
    written: int = 0
    """Nodes written into the executable."""


@dataclass(frozen=True, slots=True)
class Device:
    """What replaying needs of torch, chosen once: how memory is made, compared, and which stream is current."""

    allocate: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]
    unchanged: Callable[[list[Any], list[Any], list[int]], bool]
    stream: Callable[[], int]


class Replay:
    """An executable graph that can be bound to any addresses. Calls from several threads take turns."""

    def __init__(
        self,
        driver: Driver,
        graph: int,
        parameters: Parameters,
        table: Table,
        layout: Layout,
        device: Device,
        bound: Sequence[int],
        ticket: Ticket | None = None,
    ) -> None:
        """Instantiate `graph`, which the replay then owns; `bound` is where each slot lay in the capture."""
        self.counts = Counts()
        self._driver = driver
        self._graph = graph
        self._parameters = parameters
        self._words = parameters.words
        self._table = table
        self._layout = layout
        self._device = device
        self._ticket = ticket
        self._lock = threading.Lock()
        self._dirty: set[int] = set()
        self._bases = list(bound)
        self._indices = [index for group in layout.groups for index, _ in group.members]
        self._pointers: list[int | None] = [None] * (max(self._indices, default=-1) + 1)
        self._slots: dict[int, int] = {}
        for slot, group in enumerate(layout.groups):
            for index, offset in group.members:
                self._pointers[index] = bound[slot] + offset
                self._slots[index] = slot
        self._memory_pointers = list(bound[len(layout.groups) :])
        self._executable = driver.instantiate(graph)

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the graph on a call's inputs, clear the list, and return the outputs.

        Raises `UnfitError`, `DriverError` or torch's out-of-memory error, with the inputs as they were; after a
        `DriverError` the replay is of no more use.
        """
        return self.run(inputs, self.memory())

    def memory(self) -> list[torch.Tensor]:
        """Allocate what one call needs beside its inputs."""
        allocate = self._device.allocate
        return [allocate(memory.size, memory.stride, memory.dtype) for memory in self._layout.memories]

    def run(self, inputs: list[Any], memory: list[torch.Tensor]) -> Any:
        """Run the graph on a call's inputs and on memory from `memory()`; see `__call__`."""
        pointers = [each.data_ptr() for each in memory]
        with self._lock:
            if not self._executable:
                raise UnfitError(CLOSED)
            if not self._device.unchanged(inputs, self._pointers, self._indices):
                self._move_inputs(inputs)
            if pointers != self._memory_pointers:
                self._move_memory(pointers)
            if self._dirty:
                self._write()
            for index, buffer in self._layout.staged:
                buffer.copy_(inputs[index].detach())
            if self._ticket is not None:
                self._ticket.advance()
            self._driver.launch(self._executable, self._device.stream())
            self.counts.replays += 1
        outputs = [output.make(inputs, memory) for output in self._layout.outputs]
        inputs.clear()
        return tuple(outputs) if self._layout.as_tuple else outputs

    def _move_inputs(self, inputs: Sequence[Any]) -> None:
        pointers, slots = self._pointers, self._slots
        moved = [index for index in self._indices if inputs[index].data_ptr() != pointers[index]]
        # All is checked before anything is changed: what does not fit must leave the recording as it is.
        bases = {slot: _base(self._layout.groups[slot], inputs) for slot in {slots[index] for index in moved}}
        for slot, base in bases.items():
            self._move(slot, base)
        for index in moved:
            pointers[index] = inputs[index].data_ptr()

    def _move_memory(self, pointers: list[int]) -> None:
        for slot, pointer in enumerate(pointers, start=len(self._layout.groups)):
            if pointer != self._bases[slot]:
                self._move(slot, pointer)
        self._memory_pointers = pointers

    def _move(self, slot: int, base: int) -> None:
        words = self._words
        for index, offset in self._table.places[slot]:
            words[index] = base + offset
        self._dirty.update(self._table.nodes[slot])
        self._bases[slot] = base

    def _write(self) -> None:
        self._parameters.write(self._executable, self._dirty)
        self.counts.relocated += 1
        self.counts.written += len(self._dirty)
        self._dirty.clear()

    def close(self) -> None:
        """Destroy the executable and the graph; launches under way go on, and calls from now on do not fit."""
        with self._lock:
            executable, self._executable = self._executable, 0
        if executable:
            for destroy, handle in (
                (self._driver.destroy_executable, executable),
                (self._driver.destroy_graph, self._graph),
            ):
                with contextlib.suppress(DriverError):
                    destroy(handle)
        self.forget_random_numbers()

    def forget_random_numbers(self) -> None:
        """Stop advancing the generator: the graph draws no random numbers."""
        with self._lock:
            ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.close()


def _base(group: InputGroup, inputs: Sequence[Any]) -> int:
    """Return where a group lies in a call; raises `UnfitError`."""
    index, offset = group.members[0]
    base: int = inputs[index].data_ptr() - offset
    for other, other_offset in group.members[1:]:
        if inputs[other].data_ptr() - other_offset != base:
            raise UnfitError("inputs that shared memory when it was recorded lie otherwise")
    if alignment(base + offset) < group.alignment:
        raise UnfitError("an input is aligned worse than when it was recorded")
    return base
