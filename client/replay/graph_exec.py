"""What a graph is bound to: inputs and memories that move, what follows each of them, and where they lie in a call."""

from __future__ import annotations

import array
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend.errors import LayoutMismatch, LayoutMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pygraphd.client.replay.relocation_table import Table

_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Inputs that overlap and so move together: `members` as (index, bytes from the group's base). Its number is its slot."""

    members: tuple[tuple[int, int], ...]
    alignment: int
    """The best alignment that any of them had."""
    recorded: int
    """The base when it was recorded."""

    def base(self, places: Sequence[int]) -> int:
        """Return where the group lies if its members lie in these places; raises `LayoutMismatchError`."""
        base = places[0] - self.members[0][1]
        if len(places) > 1 and any(
            place - offset != base for place, (_, offset) in zip(places, self.members, strict=True)
        ):
            raise LayoutMismatchError(LayoutMismatch.OVERLAP)
        if (base - self.recorded) % self.alignment:
            raise LayoutMismatchError(LayoutMismatch.ALIGNMENT)
        return base


@dataclass(frozen=True, slots=True)
class Slot:
    """What moves as one, and what follows it."""

    group: InputGroup
    """The inputs; or a memory that each call makes, by its index, which may lie anywhere."""
    positions: slice
    """Where its members are in a list of addresses."""
    words: tuple[tuple[int, int], ...]
    """As (index, bytes from where the slot begins)."""
    nodes: tuple[int, ...]


class Slots:
    """All slots that a node has an address in: first those of inputs, then those of memories.

    What no node has an address in may lie anywhere: nothing is written for it. A list of addresses is one of each slot's members in turn.
    """

    def __init__(self, groups: Sequence[InputGroup], table: Table, bound: Sequence[int]) -> None:
        """Slots of the table are those of `groups` and then one for each memory, and lay where `bound` says."""
        memories = (InputGroup(((memory, 0),), 1, 0) for memory in range(len(bound) - len(groups)))
        self.slots: list[Slot] = []
        self.inputs: list[int] = []
        """The index of each member that is an input,"""
        self.memories: list[int] = []
        """and of each that is a memory."""
        self.bound: list[int] = []
        """Where each member lay."""
        for slot, group in enumerate([*groups, *memories]):
            if table.places[slot]:
                begin = len(self.bound)
                self.bound += [bound[slot] + offset for _, offset in group.members]
                indices = self.inputs if slot < len(groups) else self.memories
                indices += [index for index, _ in group.members]
                positions = slice(begin, len(self.bound))
                self.slots.append(Slot(group, positions, table.places[slot], table.nodes[slot]))

    def places(self, inputs: Sequence[Any], memory: Sequence[Any]) -> list[int]:
        """Return where the members lie in a call; raises whatever what is no tensor does."""
        return [
            *[inputs[index].data_ptr() for index in self.inputs],
            *[memory[index].data_ptr() for index in self.memories],
        ]

    def elsewhere(self, at: Sequence[int] | None, now: Sequence[int]) -> Iterator[tuple[Slot, int]]:
        """Return the slots that lie elsewhere now than `at`, all of them if that is None, and where; raises `LayoutMismatchError`."""
        for slot in self.slots:
            places = now[slot.positions]
            if at is None or at[slot.positions] != places:
                yield slot, slot.group.base(places)

    def numbers(self, writes: Sequence[Sequence[int]]) -> array.array[int]:
        """Return all of this as `exec_table.h` reads it; a node is written by (function, node, parameters[, context])."""
        slots = self.slots
        sizes = [(len(each.group.members), len(each.words), len(each.nodes)) for each in slots]
        columns: list[list[tuple[int, ...]]] = [
            [member for slot in slots for member in slot.group.members],
            [
                (members, each.group.recorded, each.group.alignment, words, nodes)
                for each, (members, words, nodes) in zip(slots, sizes, strict=True)
            ],
            [word for slot in slots for word in slot.words],
            [(node,) for slot in slots for node in slot.nodes],
            [(*each, 0)[:4] for each in writes],
        ]
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(columns))
        numbers = (len(self.inputs), *map(len, columns), *flat, *self.bound)
        return array.array("Q", (number % _MODULUS for number in numbers))
