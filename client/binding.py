"""An executable graph and the addresses it is bound to: what has moved is written, and nothing else."""

from __future__ import annotations

import contextlib
import copy
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.bulk import Watch
from pygraphd.client.driver import DriverError
from pygraphd.client.misfits import Misfit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pygraphd.client.bulk import Bulk
    from pygraphd.client.driver import Driver
    from pygraphd.client.parameters import Parameters
    from pygraphd.client.relocation import Table
    from pygraphd.client.wandering import Following

TORN = -1
"""No set's number: of an executable that something has come in between of while it was written to, as an interrupt of the user's may."""


class UnfitError(Exception):
    """A recording does not fit the inputs of one call, which is to be launched; the text is the reason."""

    misfit: Misfit | None = None
    """What another recording would have to allow for, if one could."""


class MisfitError(UnfitError):
    """It does not fit where the inputs lie."""

    def __init__(self, misfit: Misfit) -> None:
        """Say why."""
        super().__init__(misfit.value)
        self.misfit = misfit


@dataclass(frozen=True, slots=True)
class Fresh:
    """Slots whose memory a call has from the allocator, counted from the first memory on."""

    slots: list[int]
    watch: Watch


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Inputs that overlap and so move together: `members` as (index, bytes from the group's base). Its number is its slot."""

    members: tuple[tuple[int, int], ...]
    alignment: int
    """The best alignment that any of them had."""
    recorded: int
    """The base when it was recorded."""

    def base(self, places: Sequence[int]) -> int:
        """Return where the group lies if its members lie in these places; raises `MisfitError`."""
        base = places[0] - self.members[0][1]
        if len(places) > 1 and any(
            place - offset != base for place, (_, offset) in zip(places, self.members, strict=True)
        ):
            raise MisfitError(Misfit.OVERLAP)
        if (base - self.recorded) % self.alignment:
            raise MisfitError(Misfit.ALIGNMENT)
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
        bulk: Bulk,
        stream: int,
    ) -> None:
        """Instantiate a graph whose parameters are `parameters`, and in which each slot lies where `bound` says."""
        self._stream = stream
        self._driver = driver
        self._graph = graph
        self._parameters = parameters
        self._words = parameters.words
        self.table = table
        """What follows its slots."""
        self.groups = groups
        self._indices = [index for group in groups for index, _ in group.members]
        places = [bound[slot] + offset for slot, group in enumerate(groups) for _, offset in group.members]
        self.pointers = bulk.addresses(_by_index(self._indices, places))
        """Where each input lies that can move, by index,"""
        self._positions = {index: position for position, index in enumerate(self._indices)}
        self.addresses = [*places, *bound[len(groups) :]]
        """Where each input lies that can move, and then each memory: a *position* each."""
        self._first_memory = len(places)
        self._slots = [slot for slot, group in enumerate(groups) for _ in group.members]
        self._slots += range(len(groups), len(bound))
        """Of each position."""
        ends = list(itertools.accumulate(len(group.members) for group in groups))
        self._members = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
        """Of each group, the positions."""
        self.memory = bulk.addresses(bound[len(groups) :])
        """and each memory that a call makes."""
        self._bulk = bulk
        self.inputs, self._memories = bulk.watch(self._indices), bulk.watch([*range(len(self.memory))])
        self.number = 0
        """Of the set of recycled memory that it is bound to; 0: of none."""
        self.latest_use = 0
        """The number of the call that used it."""
        self.new_at = 0
        """The number of the call that it was bound for, if nobody had come with these addresses before, as far as is remembered."""
        self._placed: tuple[int, Any] = (0, None)  # an executable, and what the helper knows of it
        self.follower: Binding | None = None
        """The executable that was used after this one the last time: where addresses rotate, so do executables."""
        self.executable = driver.instantiate(graph, stream)

    def fits(self, inputs: list[Any], memory: list[Any], number: int, fresh: Fresh) -> bool:
        """Whether it is bound to these inputs and this memory already.

        Memory of a set lies where it always did: with the same `number`, only the `fresh` slots can have moved.
        """
        return (
            number == self.number
            and fresh.watch.unchanged(memory, self.memory)
            and self.inputs.unchanged(inputs, self.pointers)
        )

    def moved(self, inputs: list[Any], memory: list[Any], number: int, fresh: Fresh) -> dict[int, int]:
        """Return the positions that do not lie where they are bound to, and where they lie; see `fits`."""
        positions, first = self._positions, self._first_memory
        watch = fresh.watch if number == self.number else self._memories
        moved = {positions[index]: at for index, at in self.inputs.moved(inputs, self.pointers).items()}
        for slot, at in watch.moved(memory, self.memory).items():
            moved[first + slot] = at
        return moved

    @property
    def came_again(self) -> bool:
        """Whether the addresses that it is bound to have come more than once."""
        return self.latest_use > self.new_at

    def watch_first(self, indices: Collection[int]) -> Watch:
        """Return what looks at all inputs that can move, and at those of these indices first."""
        first = [index for index in self._indices if index in indices]
        return self._bulk.watch([*first, *(index for index in self._indices if index not in indices)])

    def inputs_among(self, positions: Iterable[int]) -> set[int]:
        """Return the indices of the inputs that are at some positions."""
        return {self._indices[position] for position in positions if position < self._first_memory}

    def addresses_with(self, moved: Mapping[int, int]) -> list[int]:
        """Return what `addresses` would be if some positions had moved."""
        addresses = self.addresses.copy()
        for position, address in moved.items():
            addresses[position] = address
        return addresses

    def bind(self, addresses: list[int], moved: Collection[int], number: int) -> int:
        """Bind to other addresses, which differ at the positions that have `moved`; return how many nodes were written.

        Raises `UnfitError` with nothing changed, or `DriverError`, after which the executable is of no more use; neither is it after
        any other exception.
        """
        self.raise_if_torn()
        bases = self._bases_of(moved, addresses)
        nodes = self._nodes_of(bases)
        self.number = TORN
        self._move_to(addresses, moved, bases)
        self._parameters.write(self.executable, nodes)
        self.number = number
        return len(nodes)

    def track(self, following: Following) -> Any:
        """Return what the helper needs to bind executables of this graph by itself; None if it cannot."""
        if self._driver.launch_address is None:
            return None  # nobody is to call the driver but Python
        return self._bulk.track(following, self._parameters.fail_to_write)

    def place(self, track: Any) -> Any:
        """Return what the helper needs to bind and launch this one."""
        executable, place = self._placed
        if executable != self.executable:
            writes = self._parameters.writes_by_address()
            place = self._bulk.place(track, self.pointers, self.memory, self._words, writes, self.executable)
            self._placed = self.executable, place
        return place

    def unused(self, track: Any) -> int:
        """Return for how many calls the helper has not launched it."""
        return self._bulk.unused(track, self.place(track))

    def wrote(self) -> None:
        """Note that the helper has bound it elsewhere."""
        self.new_at = self.latest_use

    def catch_up(self) -> None:
        """Have `addresses` say where the helper has bound it."""
        pointers = self.pointers
        self.addresses = [*(pointers[index] for index in self._indices), *self.memory]

    def another(self, addresses: list[int], moved: Collection[int], number: int) -> Binding:
        """Return another executable of the graph, bound to other addresses; see `bind`, and this one is as it was."""
        self.raise_if_torn()
        # Before anything is made: what does not fit may come at every call.
        bases = self._bases_of(moved, addresses)
        other = copy.copy(self)
        other._parameters = self._parameters.again()
        other._words = other._parameters.words
        other.pointers, other.memory = self.pointers[:], self.memory[:]
        other._move_to(addresses, moved, bases)
        other.number = number
        other.follower = None
        other._placed = 0, None
        other._instantiate()
        return other

    def _instantiate(self) -> None:
        """Make an executable with the words as they are.

        Where the graph was recorded, or another executable is bound, may be nobody's memory by now, and instantiating, the
        driver looks at that of copies and memsets.
        """
        with self._driver.relaxed():
            self._parameters.write_graph()
            self.executable = self._driver.instantiate(self._graph, self._stream)

    @property
    def is_torn(self) -> bool:
        """Whether nobody knows any more what it is bound to."""
        return self.number == TORN

    def raise_if_torn(self) -> None:
        """Raise DriverError if it is."""
        if self.is_torn:
            raise DriverError("something came in between while an executable was written to", 0)

    def _move_to(self, addresses: list[int], moved: Collection[int], bases: Mapping[int, int]) -> None:
        first, indices = self._first_memory, self._indices
        for position in moved:
            if position < first:
                self.pointers[indices[position]] = addresses[position]
            else:
                self.memory[position - first] = addresses[position]
        words, places = self._words, self.table.places
        for slot, base in bases.items():
            for index, offset in places[slot]:
                words[index] = base + offset
        self.addresses = addresses

    @property
    def nodes(self) -> int:
        """How many nodes of the graph can be written."""
        return len(self._parameters)

    def nodes_that_follow(self, moved: Collection[int]) -> int:
        """Return how many nodes are to be written when some positions have moved."""
        return len(self._nodes_of({self._slots[position] for position in moved}))

    def _nodes_of(self, slots: Collection[int]) -> Collection[int]:
        """Return the nodes that follow some slots."""
        nodes = self.table.nodes
        if len(slots) == 1:
            return nodes[next(iter(slots))]
        return set(itertools.chain.from_iterable(map(nodes.__getitem__, slots)))

    def _bases_of(self, moved: Iterable[int], addresses: Sequence[int]) -> dict[int, int]:
        """Return where the slots lie that have moved; raises `UnfitError`."""
        bases: dict[int, int] = {}
        for position in moved:
            slot = self._slots[position]
            if slot not in bases:  # hundreds of inputs may be one slot
                bases[slot] = self._base(slot, addresses)
        return bases

    def _base(self, slot: int, addresses: Sequence[int]) -> int:
        """Return where a slot lies; raises `UnfitError`."""
        memory = slot - len(self.groups)
        if memory >= 0:
            return addresses[self._first_memory + memory]
        return self.groups[slot].base(addresses[self._members[slot]])

    def close(self) -> None:
        """Destroy the executable; a launch of it that still runs goes on."""
        executable, self.executable, self.follower = self.executable, 0, None
        self._placed = 0, None
        if executable:
            with contextlib.suppress(DriverError):
                self._driver.destroy_executable(executable)


def _by_index(indices: Sequence[int], values: Sequence[int]) -> list[int]:
    """Return a list with each value at its index, and 0 elsewhere."""
    placed = [0] * (max(indices, default=-1) + 1)
    for index, value in zip(indices, values, strict=True):
        placed[index] = value
    return placed
