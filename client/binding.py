"""An executable graph and the addresses it is bound to; several of one graph, where addresses alternate among a few sets."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.driver import DriverError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pygraphd.client.driver import Driver
    from pygraphd.client.parameters import Parameters
    from pygraphd.client.relocation import Table

MAX_BINDINGS = 4
"""Executables of one recording: batches in rotation and kept outputs make addresses recur with short periods."""
REMEMBERED = 8
"""Sets of addresses that are remembered, so that what nearly comes back gets an executable of its own."""

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
        places = [bound[slot] + offset for slot, group in enumerate(groups) for _, offset in group.members]
        self._pointers: list[int | None] = [None] * (max(self._indices, default=-1) + 1)
        for index, place in zip(self._indices, places, strict=True):
            self._pointers[index] = place
        self.addresses = [*places, *bound[len(groups) :]]
        """Where each input lies that can move, and then each memory."""
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

    def addresses_of(self, inputs: Sequence[Any], memory: Sequence[Any]) -> list[int]:
        """Return what `addresses` would be if it were bound to these."""
        moving = map(inputs.__getitem__, self._indices)
        return [each.data_ptr() for tensors in (moving, memory) for each in tensors]

    def bind(self, inputs: Sequence[Any], addresses: list[int], number: int) -> int:
        """Bind to other addresses, those of `addresses_of`; return how many nodes were written.

        Raises `UnfitError` with nothing changed, or `DriverError`, after which the executable is of no more use.
        """
        moved = self._moved(addresses)
        # All is checked before anything is changed.
        bases = self._bases_of(moved, inputs)
        for index, address in moved.items():
            self._pointers[index] = address
        inputs_end = len(self._indices)
        for slot, address in enumerate(addresses[inputs_end:], start=len(self._groups)):
            if address != self._bases[slot]:
                bases[slot] = address
        for slot, base in bases.items():
            self._move(slot, base)
        self._memory = addresses[inputs_end:]
        self.addresses = addresses
        self.number = number
        return self._write()

    def check(self, inputs: Sequence[Any], addresses: list[int]) -> None:
        """Raise `UnfitError` if it cannot be bound to these inputs."""
        self._bases_of(self._moved(addresses), inputs)

    def _moved(self, addresses: Sequence[int]) -> dict[int, int]:
        """Return the inputs that do not lie where they are bound to, and where they lie."""
        return {
            index: now
            for index, now, bound in zip(self._indices, addresses, self.addresses, strict=False)
            if now != bound
        }

    def _bases_of(self, moved: Iterable[int], inputs: Sequence[Any]) -> dict[int, int]:
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


def _differ(first: list[int], second: list[int]) -> int:
    """Return how many of two lists' addresses differ."""
    return sum(map(operator.ne, first, second))


class Bindings:
    """The executables of one graph, the one that was used last first."""

    def __init__(self, make: Callable[[], Binding], unchanged: Unchanged) -> None:
        self._make = make
        self._unchanged = unchanged
        self._all = [make()]
        self._most = MAX_BINDINGS
        self._recent: deque[list[int]] = deque(maxlen=REMEMBERED)
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
        return self._bind(inputs, memory, number)

    def _bind(self, inputs: list[Any], memory: list[Any], number: int) -> Binding:
        addresses = self._all[0].addresses_of(inputs, memory)
        position, moved = self._nearest(addresses)
        if len(self._all) < self._most and self._deserves_another(addresses, number, moved):
            self._all[position].check(inputs, addresses)
            if self._add():
                position = len(self._all) - 1
        chosen = self._all[position]
        self.written = chosen.bind(inputs, addresses, number)
        return self._to_front(position)

    def _to_front(self, position: int) -> Binding:
        if position:
            self._all.insert(0, self._all.pop(position))
        return self._all[0]

    def _nearest(self, addresses: list[int]) -> tuple[int, int]:
        """Return the executable for which least has moved, of several the one that was not used for longest; and how much."""
        moved = [_differ(binding.addresses, addresses) for binding in self._all]
        position = max(range(len(moved)), key=lambda position: (-moved[position], position))
        return position, moved[position]

    def _deserves_another(self, addresses: list[int], number: int, moved: int) -> bool:
        """Whether these addresses, or nearly these, come back; or memory of a set is met for the first time."""
        came_back = any(2 * _differ(recent, addresses) <= moved for recent in self._recent)
        self._recent.append(addresses)
        return came_back or all(binding.number != number for binding in self._all)

    def _add(self) -> bool:
        try:
            self._all.append(self._make())
        except DriverError:
            self._most = len(self._all)  # those that there are go on
            return False
        return True

    def close(self) -> None:
        """Destroy all executables."""
        while self._all:
            self._all.pop().close()
