"""An executable graph and the addresses it is bound to; several of one graph, where addresses alternate among a few sets."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.driver import DriverError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.driver import Driver
    from pygraphd.client.parameters import Parameters
    from pygraphd.client.relocation import Table

MAX_BINDINGS = 4
"""Executables of one recording: batches in rotation and kept outputs make addresses recur with short periods."""
REMEMBERED = 8
"""Sets of addresses that are remembered, so that one that comes back gets an executable of its own."""

Unchanged = Callable[[list[Any], list[Any], list[int]], bool]
"""Says whether the tensors of a list lie where a second list says, at the indices of a third."""


class UnfitError(Exception):
    """A recording does not fit the inputs of one call, which is to be launched; the text is the reason."""


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Inputs that overlap and so move together: `members` as (index, bytes from the group's base). Its number is its slot."""

    members: tuple[tuple[int, int], ...]
    alignment: int
    """The best alignment that any of them had."""
    recorded: int
    """The base when it was recorded."""

    def base(self, inputs: Sequence[Any]) -> int:
        """Return where the group lies in a call; raises `UnfitError`."""
        index, offset = self.members[0]
        base: int = inputs[index].data_ptr() - offset
        for other, other_offset in self.members[1:]:
            if inputs[other].data_ptr() - other_offset != base:
                raise UnfitError("inputs that shared memory when it was recorded lie otherwise")
        if (base - self.recorded) % self.alignment:
            raise UnfitError("an input is not aligned as it was when it was recorded")
        return base


class Binding:
    """One executable. Slots are numbered through `groups` and then through the memory that each call makes."""

    def __init__(
        self,
        driver: Driver,
        graph: int,
        parameters: Parameters,
        table: Table,
        groups: Sequence[InputGroup],
        bound: Sequence[int],
    ) -> None:
        """Instantiate a graph whose parameters are `parameters`, and in which each slot lies where `bound` says."""
        self._driver = driver
        self._parameters = parameters
        self._words = parameters.words
        self._table = table
        self._groups = groups
        self._bases = list(bound)
        self._slots = {index: slot for slot, group in enumerate(groups) for index, _ in group.members}
        self._indices = list(self._slots)
        self._pointers: list[int | None] = [None] * (max(self._indices, default=-1) + 1)
        for slot, group in enumerate(groups):
            for index, offset in group.members:
                self._pointers[index] = bound[slot] + offset
        self._memory = list(bound[len(groups) :])
        self.number = 0
        """Of the set of recycled memory that it is bound to; 0: of none."""
        self._dirty: set[int] = set()
        self.executable = driver.instantiate(graph)

    def fits(
        self, inputs: list[Any], memory: list[Any], number: int, fresh: list[int], unchanged: Unchanged
    ) -> bool:
        """Whether it is bound to these inputs and this memory already.

        Memory of a set lies where it always did: with the same `number`, only the `fresh` slots can have moved.
        """
        return (
            number == self.number
            and unchanged(memory, self._memory, fresh)
            and unchanged(inputs, self._pointers, self._indices)
        )

    def bind(self, inputs: Sequence[Any], memory: Sequence[Any], number: int) -> int:
        """Bind to other addresses; return how many nodes were written.

        Raises `UnfitError` with nothing changed, or `DriverError`, after which the executable is of no more use.
        """
        moved = self._moved(inputs)
        # All is checked before anything is changed.
        for slot, base in self._bases_of(moved, inputs).items():
            self._move(slot, base)
        for index in moved:
            self._pointers[index] = inputs[index].data_ptr()
        addresses = [each.data_ptr() for each in memory]
        for slot, address in enumerate(addresses, start=len(self._groups)):
            if address != self._bases[slot]:
                self._move(slot, address)
        self._memory = addresses
        self.number = number
        return self._write()

    def check(self, inputs: Sequence[Any]) -> None:
        """Raise `UnfitError` if it cannot be bound to these inputs."""
        self._bases_of(self._moved(inputs), inputs)

    def _moved(self, inputs: Sequence[Any]) -> list[int]:
        pointers = self._pointers
        return [index for index in self._indices if inputs[index].data_ptr() != pointers[index]]

    def _bases_of(self, moved: Sequence[int], inputs: Sequence[Any]) -> dict[int, int]:
        slots, groups = self._slots, self._groups
        return {slot: groups[slot].base(inputs) for slot in {slots[index] for index in moved}}

    def _move(self, slot: int, base: int) -> None:
        words = self._words
        for index, offset in self._table.places[slot]:
            words[index] = base + offset
        self._dirty.update(self._table.nodes[slot])
        self._bases[slot] = base

    def _write(self) -> int:
        count = len(self._dirty)
        self._parameters.write(self.executable, self._dirty)
        self._dirty.clear()
        return count

    def close(self) -> None:
        """Destroy the executable; a launch of it that still runs goes on."""
        executable, self.executable = self.executable, 0
        if executable:
            with contextlib.suppress(DriverError):
                self._driver.destroy_executable(executable)


class Bindings:
    """The executables of one graph, the one that was used last first."""

    def __init__(self, make: Callable[[], Binding], unchanged: Unchanged) -> None:
        self._make = make
        self._unchanged = unchanged
        self._all = [make()]
        self._most = MAX_BINDINGS
        self._recent: deque[int] = deque(maxlen=REMEMBERED)
        self.written = 0
        """Nodes written for the latest call."""

    def __len__(self) -> int:
        """Return how many executables there are."""
        return len(self._all)

    def bound(self, inputs: list[Any], memory: list[Any], number: int, fresh: list[int]) -> Binding:
        """Return an executable that is bound to a call's addresses; raises `UnfitError` or `DriverError`.

        For `number` and `fresh` see `Binding.fits`.
        """
        unchanged = self._unchanged
        self.written = 0
        for position, binding in enumerate(self._all):
            if binding.fits(inputs, memory, number, fresh, unchanged):
                return self._to_front(position)
        if len(self._all) < self._most and self._deserves_another(inputs, memory, number):
            self._all[-1].check(inputs)
            self._add()
        position = self._least_recent(number)
        chosen = self._all[position]
        self.written = chosen.bind(inputs, memory, number)
        return self._to_front(position)

    def _to_front(self, position: int) -> Binding:
        if position:
            self._all.insert(0, self._all.pop(position))
        return self._all[0]

    def _deserves_another(self, inputs: Sequence[Any], memory: Sequence[Any], number: int) -> bool:
        came_back = self._came_back(inputs, memory)
        return came_back or all(binding.number != number for binding in self._all)

    def _least_recent(self, number: int) -> int:
        """Return the executable that was not used for longest: a new one, one of the same set, or any."""
        last = len(self._all) - 1
        if self._all[last].number == 0:
            return last  # new, or bound to memory that comes from the allocator
        same = [index for index, binding in enumerate(self._all) if binding.number == number]
        return same[-1] if same else last

    def _came_back(self, inputs: Sequence[Any], memory: Sequence[Any]) -> bool:
        addresses = hash(tuple(each.data_ptr() for each in (*memory, *inputs) if hasattr(each, "data_ptr")))
        seen = addresses in self._recent
        self._recent.append(addresses)
        return seen

    def _add(self) -> None:
        try:
            self._all.append(self._make())
        except DriverError:
            self._most = len(self._all)  # those that there are go on

    def close(self) -> None:
        """Destroy all executables."""
        while self._all:
            self._all.pop().close()
