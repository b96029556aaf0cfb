"""An executable graph and the addresses it is bound to; several of one graph, where addresses alternate among a few sets."""

from __future__ import annotations

import contextlib
import copy
import itertools
import operator
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.bulk import Watch
from pygraphd.client.driver import DriverError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from pygraphd.client.bulk import Bulk
    from pygraphd.client.driver import Driver
    from pygraphd.client.parameters import Parameters
    from pygraphd.client.relocation import Table

FEW_BINDINGS = 4
"""Executables of one recording at least: batches in rotation and kept outputs make addresses recur with short periods."""
MAX_BINDINGS = 64
"""At most, as long as `MAX_NODES` are the nodes of all: the layers of a model may share one graph, and have weights of their own."""
MAX_NODES = 1_024
MANY_NODES = 3
"""Nodes of a graph whose addresses get an executable when they come for the second time, if half of the nodes would be written."""
WRITES_OF_ONE = 10
"""All other addresses get one when writing for them has taken as long as making it does: that of a single node takes as long as so
many calls that write a node take longer (H200: 160 us),"""
NODES_OF_A_WRITE = 5
"""and each of so many nodes more as one of them (H200: 0.2 to 1 ms for 256)."""
MOST_MOVERS = 32
"""Inputs that have moved are looked at before all others, if they are no more than these."""
PATIENCE = 2
"""Calls that find an executable bound since it was written to, after which it is made anew; then `LESS_OFTEN` times as many."""
LESS_OFTEN = 4
REMEMBERED = 8
"""Sets of addresses that are remembered, so that what nearly comes back gets an executable of its own,"""
MET = 4 * MAX_BINDINGS
"""and of graphs that may have many executables, so that what comes back later does, too; these are told by their hash."""

IDLE_CALLS = 8
"""Calls for which an executable was not used, after which it may go to other addresses; or twice as many as there are executables."""

ONE_LESS = "addresses take turns and share an executable"
STAYS_PATCHED = "an executable cannot be made anew, and stays slower"


class UnfitError(Exception):
    """A recording does not fit the inputs of one call, which is to be launched; the text is the reason."""


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
        """Return where the group lies if its members lie in these places; raises `UnfitError`."""
        base = places[0] - self.members[0][1]
        if len(places) > 1 and any(
            place - offset != base for place, (_, offset) in zip(places, self.members, strict=True)
        ):
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
        bulk: Bulk,
    ) -> None:
        """Instantiate a graph whose parameters are `parameters`, and in which each slot lies where `bound` says."""
        self._driver = driver
        self._graph = graph
        self._parameters = parameters
        self._words = parameters.words
        self._table = table
        self._groups = groups
        self._bases = list(bound)
        self._indices = [index for group in groups for index, _ in group.members]
        places = [bound[slot] + offset for slot, group in enumerate(groups) for _, offset in group.members]
        self._pointers = bulk.addresses([0] * (max(self._indices, default=-1) + 1))
        for index, place in zip(self._indices, places, strict=True):
            self._pointers[index] = place
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
        self._memory = bulk.addresses(bound[len(groups) :])
        self._bulk = bulk
        self.inputs, self._memories = bulk.watch(self._indices), bulk.watch([*range(len(self._memory))])
        self.number = 0
        """Of the set of recycled memory that it is bound to; 0: of none."""
        self._dirty: set[int] = set()
        self.is_patched = False
        """Whether any node was written since the executable was made."""
        self._patience = PATIENCE
        self._found_bound = 0
        self.latest_use = 0
        """The number of the call that used it."""
        self.follower: Binding | None = None
        """The executable that was used after this one the last time: where addresses rotate, so do executables."""
        self.executable = driver.instantiate(graph)

    def fits(self, inputs: list[Any], memory: list[Any], number: int, fresh: Fresh) -> bool:
        """Whether it is bound to these inputs and this memory already.

        Memory of a set lies where it always did: with the same `number`, only the `fresh` slots can have moved.
        """
        return (
            number == self.number
            and fresh.watch.unchanged(memory, self._memory)
            and self.inputs.unchanged(inputs, self._pointers)
        )

    def moved(self, inputs: list[Any], memory: list[Any], number: int, fresh: Fresh) -> dict[int, int]:
        """Return the positions that do not lie where they are bound to, and where they lie; see `fits`."""
        positions, first = self._positions, self._first_memory
        watch = fresh.watch if number == self.number else self._memories
        moved = {positions[index]: at for index, at in self.inputs.moved(inputs, self._pointers).items()}
        moved.update((first + slot, at) for slot, at in watch.moved(memory, self._memory).items())
        return moved

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

        Raises `UnfitError` with nothing changed, or `DriverError`, after which the executable is of no more use.
        """
        self._move_to(addresses, moved, number)
        return self._write()

    def another(self, addresses: list[int], moved: Collection[int], number: int) -> Binding:
        """Return another executable of the graph, bound to other addresses; see `bind`, and this one is as it was."""
        other = copy.copy(self)
        other._parameters = self._parameters.again()
        other._words = other._parameters.words
        other._bases, other._pointers, other._memory = (
            self._bases.copy(),
            self._pointers[:],
            self._memory[:],
        )
        other._dirty = set()
        other._move_to(addresses, moved, number)
        other._patience = PATIENCE
        other.follower = None
        other._instantiate()
        return other

    def _instantiate(self) -> None:
        """Make an executable with the words as they are.

        Where the graph was recorded, or another executable is bound, may be nobody's memory by now, and instantiating, the
        driver looks at that of copies and memsets.
        """
        with self._driver.relaxed():
            self._parameters.write_graph()
            self.executable = self._driver.instantiate(self._graph)
        self._dirty.clear()
        self.is_patched = False

    def settle(self) -> None:
        """Note that it was found bound; if that is so often enough, make it anew; raises DriverError, and it is as it was.

        On the GPU a node that was written into an executable takes longer to launch than one that it was made with: by 0.1 us,
        of cuBLAS's by 0.4 us (H200, driver 580). But making an executable takes milliseconds, as long as hundreds of launches.
        """
        self._found_bound += 1
        if self._found_bound < self._patience:
            return
        self._found_bound = 0
        self._patience *= LESS_OFTEN
        before = self.executable
        self._instantiate()
        with contextlib.suppress(DriverError), self._driver.relaxed():
            self._driver.destroy_executable(before)

    def _move_to(self, addresses: list[int], moved: Collection[int], number: int) -> None:
        # All is checked before anything is changed.
        bases = {slot: self._base(slot, addresses) for slot in map(self._slots.__getitem__, moved)}
        first, indices = self._first_memory, self._indices
        for position in moved:
            if position < first:
                self._pointers[indices[position]] = addresses[position]
            else:
                self._memory[position - first] = addresses[position]
        for slot, base in bases.items():
            self._move(slot, base)
        self.addresses = addresses
        self.number = number

    @property
    def nodes(self) -> int:
        """How many nodes of the graph can be written."""
        return len(self._parameters)

    def nodes_that_follow(self, moved: Collection[int]) -> int:
        """Return how many nodes are to be written when some positions have moved."""
        slots = {self._slots[position] for position in moved}
        return len(set(itertools.chain.from_iterable(self._table.nodes[slot] for slot in slots)))

    def _base(self, slot: int, addresses: Sequence[int]) -> int:
        """Return where a slot lies; raises `UnfitError`."""
        memory = slot - len(self._groups)
        if memory >= 0:
            return addresses[self._first_memory + memory]
        return self._groups[slot].base(addresses[self._members[slot]])

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
        self.is_patched |= count > 0
        self._found_bound = 0
        return count

    def close(self) -> None:
        """Destroy the executable; a launch of it that still runs goes on."""
        executable, self.executable, self.follower = self.executable, 0, None
        if executable:
            with contextlib.suppress(DriverError):
                self._driver.destroy_executable(executable)


def _most_executables(nodes: int) -> int:
    """Return how many executables there may be of a graph with so many nodes."""
    return max(FEW_BINDINGS, min(MAX_BINDINGS, MAX_NODES // max(nodes, 1)))


def differing(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the positions at which two lists of addresses differ."""
    return list(itertools.compress(itertools.count(), map(operator.ne, first, second)))


def _is_near_any(addresses: list[int], moved: Collection[int], others: Iterable[list[int]]) -> bool:
    """Whether some of the others differ from these addresses by half as much as what has moved, at most."""
    most = len(moved) // 2
    if not most:
        return addresses in others
    # Nearly always the first question is enough, and it is asked about a few positions of hundreds.
    at = operator.itemgetter(*moved)
    here = at(addresses)
    return any(
        sum(map(operator.ne, at(other), here)) <= most and len(differing(other, addresses)) <= most
        for other in others
    )


class Bindings:
    """The executables of one graph, the one that was used last first."""

    def __init__(self, first: Binding, note: Callable[[str], None]) -> None:
        """Take over the first one; `note` is told why there is not another one where there should be."""
        self._note = note
        self._settles = True
        self._all = [first]
        self._most = _most_executables(first.nodes)
        self._recent: deque[list[int]] = deque(maxlen=REMEMBERED)
        self._met: dict[int, tuple[int, int]] = {}
        """How many calls an executable was to be bound for to addresses, and the latest of them, by the hash of these."""
        self._bound_to: dict[int, Binding] = {}
        """By the hash of the addresses, which may be outdated. Kept where there are more than a few."""
        self._movers: frozenset[int] = frozenset()
        self._calls = 0
        self.written = 0
        """Nodes written for the latest call."""
        self.made = 1
        """Executables so far, with those that have gone."""

    def __len__(self) -> int:
        """Return how many executables there are."""
        return len(self._all)

    def bound(self, inputs: list[Any], memory: list[Any], number: int, fresh: Fresh) -> Binding:
        """Return an executable that is bound to a call's addresses; raises `UnfitError` or `DriverError`.

        For `number` and `fresh` see `Binding.fits`.
        """
        self.written = 0
        self._calls += 1
        latest = self._all[0]
        binding: Binding | None = latest.follower or latest
        assert binding is not None
        if not binding.fits(inputs, memory, number, fresh):
            binding = self._found(binding, inputs, memory, number, fresh)
        if binding is None:
            binding = self._bind(inputs, memory, number, fresh)
        elif binding.is_patched:
            self._settle(binding)
        if binding is not latest:
            self._to_front(self._all.index(binding))
        latest.follower = binding
        binding.latest_use = self._calls
        return binding

    def _found(
        self, asked: Binding, inputs: list[Any], memory: list[Any], number: int, fresh: Fresh
    ) -> Binding | None:
        """Return an executable that is bound already, other than the one that was asked first; only those used last are asked."""
        others = (each for each in self._all[: FEW_BINDINGS + 1] if each is not asked)
        return next((each for each in others if each.fits(inputs, memory, number, fresh)), None)

    def _bind(self, inputs: list[Any], memory: list[Any], number: int, fresh: Fresh) -> Binding:
        latest = self._all[0]
        just_moved = latest.moved(inputs, memory, number, fresh)
        self._look_first_at(latest.inputs_among(just_moved))
        addresses = latest.addresses_with(just_moved)
        mark = self._mark(addresses)
        if (known := self._known(addresses, mark)) is not None:
            known.number = number
            if known.is_patched:
                self._settle(known)
            return known
        position, moved = self._nearest(addresses, just_moved)
        nearest = self._all[position]
        has_room, is_idle = len(self._all) < self._most, self._is_idle(self._all[-1])
        met = self._met_before(nearest, mark, moved) if has_room or is_idle else None
        deserves = has_room and (met is not None or self._deserves_another(addresses, number, moved))
        if deserves and (another := self._another(nearest, addresses, moved, number)) is not None:
            self._recent.append(addresses)
            self._all.insert(0, another)
            self.made += 1
            self.written = another.nodes
            return self._note_bound(another, mark)
        if moved and is_idle:
            position, moved = self._or_the_last(position, moved, addresses, met)
        self._recent.append(addresses)
        self.written = self._all[position].bind(addresses, moved, number)
        return self._note_bound(self._to_front(position), mark)

    def _is_idle(self, binding: Binding) -> bool:
        """Whether others have taken turns for so long that this executable is of no use where it is bound."""
        return binding.latest_use < self._calls - max(IDLE_CALLS, 2 * len(self._all))

    def _or_the_last(
        self, position: int, moved: Collection[int], addresses: list[int], met: int | None
    ) -> tuple[int, Collection[int]]:
        """Return the last executable instead of another, if it is as near, or the addresses come back; and what has moved for it.

        They were `met` before in this call: what was not used since then is not one of those that take turns with them.
        """
        last = len(self._all) - 1
        also = differing(self._all[last].addresses, addresses)
        comes_back = addresses in self._recent or (met is not None and self._all[last].latest_use < met)
        return (last, also) if len(also) <= len(moved) or comes_back else (position, moved)

    def _mark(self, addresses: list[int]) -> int:
        """Return what tells addresses from others, of graphs that may have many executables; hashing hundreds takes a few us."""
        return hash(tuple(addresses)) if self._most > FEW_BINDINGS else 0

    def _known(self, addresses: list[int], mark: int) -> Binding | None:
        """Return the executable that is bound to these addresses, of many."""
        if len(self._all) <= FEW_BINDINGS:
            return None
        found = self._bound_to.get(mark)
        return found if found is not None and found.addresses == addresses else None

    def _note_bound(self, binding: Binding, mark: int) -> Binding:
        if self._most > FEW_BINDINGS:
            if len(self._bound_to) >= MET:
                self._bound_to = {self._mark(each.addresses): each for each in self._all}
            self._bound_to[mark] = binding
        return binding

    def _look_first_at(self, moved: set[int]) -> None:
        """Have executables that are bound elsewhere be told by the inputs that move, and not by hundreds that do not."""
        if not moved or len(moved) > MOST_MOVERS or moved <= self._movers:
            return
        both = self._movers | moved
        self._movers = both if len(both) <= MOST_MOVERS else frozenset(moved)
        watch = self._all[0].watch_first(self._movers)
        for each in self._all:
            each.inputs = watch

    def _settle(self, binding: Binding) -> None:
        if not self._settles:
            return
        before = binding.executable
        try:
            binding.settle()
        except DriverError as error:
            self._settles = False  # it is slower, and right
            self._note(f"{STAYS_PATCHED}: {error}")
        self.made += binding.executable != before

    def _to_front(self, position: int) -> Binding:
        if position:
            self._all.insert(0, self._all.pop(position))
        return self._all[0]

    def _nearest(self, addresses: list[int], moved: Collection[int]) -> tuple[int, Collection[int]]:
        """Return the executable for which least has moved, and what has; `moved` is what has for the first.

        Of several it is the one that was used last: where more addresses rotate than there are executables, that is the last one to
        be asked for again. Of many, those are looked at that were not used for longest.
        """
        nearest, begin = 0, max(1, len(self._all) - FEW_BINDINGS)
        for position, binding in enumerate(self._all[begin:], start=begin):
            if len(moved) == 1:
                break  # none is nearer, and looking at hundreds of addresses takes as long as writing a few nodes
            also = differing(binding.addresses, addresses)
            if len(also) < len(moved):
                nearest, moved = position, also
        return nearest, moved

    def _met_before(self, nearest: Binding, mark: int, moved: Collection[int]) -> int | None:
        """Return the call for which an executable was to be bound to these addresses before, if they are worth one of their own."""
        if self._most <= FEW_BINDINGS:
            return None
        times, before = self._met.pop(mark, (0, 0))
        self._met[mark] = times + 1, self._calls
        if len(self._met) > MET:
            del self._met[next(iter(self._met))]
        return before if times and self._is_worth_one(nearest, moved, times) else None

    def _is_worth_one(self, nearest: Binding, moved: Collection[int], times: int) -> bool:
        """Whether addresses that came so often, and for which so much has moved, are to have an executable of their own."""
        nodes = nearest.nodes
        if times >= WRITES_OF_ONE + nodes // NODES_OF_A_WRITE:
            return True
        return nodes >= MANY_NODES and 2 * nearest.nodes_that_follow(moved) >= nodes

    def _deserves_another(self, addresses: list[int], number: int, moved: Collection[int]) -> bool:
        """Whether these addresses, or nearly these, have come back lately; or memory of a set is met for the first time."""
        if len(self._all) >= FEW_BINDINGS:
            return False
        came_back = _is_near_any(addresses, moved, self._recent)
        return came_back or all(binding.number != number for binding in self._all)

    def _another(
        self, nearest: Binding, addresses: list[int], moved: Collection[int], number: int
    ) -> Binding | None:
        try:
            return nearest.another(addresses, moved, number)
        except DriverError as error:
            self._most = len(self._all)  # those that there are go on
            self._note(f"{ONE_LESS}: {error}")
            return None

    def close(self) -> None:
        """Destroy all executables."""
        self._bound_to.clear()
        while self._all:
            self._all.pop().close()
