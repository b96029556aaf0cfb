"""The segments of a recording, and their addresses in a call: inputs, and memory that the call allocates."""

from __future__ import annotations

import array
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend.errors import LayoutMismatch, LayoutMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pygraphd.client.replay.relocation_table import RelocationTable

_MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Inputs that overlap and so move together: `members` as (index, bytes from the group's base). Its number is that of its segment."""

    members: tuple[tuple[int, int], ...]
    alignment: int
    """The best alignment of any member, in bytes."""
    recorded: int
    """The address of the base when it was recorded."""

    def base(self, addresses: Sequence[int]) -> int:
        """Return the address of the base in view of those of the members; raises `LayoutMismatchError`."""
        base = addresses[0] - self.members[0][1]
        if len(addresses) > 1 and any(
            address - offset != base for address, (_, offset) in zip(addresses, self.members, strict=True)
        ):
            raise LayoutMismatchError(LayoutMismatch.OVERLAP)
        if (base - self.recorded) % self.alignment:
            raise LayoutMismatchError(LayoutMismatch.ALIGNMENT)
        return base


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that moves as one, with the words and nodes that hold addresses in it."""

    group: InputGroup
    """The group of inputs, or one allocation of the call as a group of its own, which fits at any alignment."""
    positions: slice
    """The positions of its members in a list of addresses."""
    words: tuple[tuple[int, int], ...]
    """The words that hold an address in it, as (index, bytes from the segment's base)."""
    nodes: tuple[int, ...]


class Segments:
    """The segments in which a node holds an address: first those of inputs, then those of allocations.

    Others may lie anywhere, and nothing is written for them. A list of addresses has one for each member of each segment in turn.
    """

    def __init__(self, groups: Sequence[InputGroup], table: RelocationTable, bound: Sequence[int]) -> None:
        """Take the segments of `groups`, and one for each allocation; `bound` are their addresses when they were recorded."""
        memories = (InputGroup(((memory, 0),), 1, 0) for memory in range(len(bound) - len(groups)))
        self.segments: list[Segment] = []
        self.inputs: list[int] = []
        """The index of each member that is an input."""
        self.memories: list[int] = []
        """The index of each member that is an allocation."""
        self.bound: list[int] = []
        """The address of each member when it was recorded."""
        for number, group in enumerate([*groups, *memories]):
            if table.words[number]:
                begin = len(self.bound)
                self.bound += [bound[number] + offset for _, offset in group.members]
                indices = self.inputs if number < len(groups) else self.memories
                indices += [index for index, _ in group.members]
                positions = slice(begin, len(self.bound))
                self.segments.append(Segment(group, positions, table.words[number], table.nodes[number]))

    def addresses(self, inputs: Sequence[Any], memory: Sequence[Any]) -> list[int]:
        """Return the addresses of the members in a call; raises what an object that is no tensor raises."""
        return [
            *[inputs[index].data_ptr() for index in self.inputs],
            *[memory[index].data_ptr() for index in self.memories],
        ]

    def moved(self, since: Sequence[int] | None, now: Sequence[int]) -> Iterator[tuple[Segment, int]]:
        """Return the segments with other addresses `now` than `since` (None: all), with their bases; raises `LayoutMismatchError`."""
        for segment in self.segments:
            addresses = now[segment.positions]
            if since is None or since[segment.positions] != addresses:
                yield segment, segment.group.base(addresses)

    def numbers(self, writes: Sequence[Sequence[int]]) -> array.array[int]:
        """Return the segments as the numbers that `exec_table.h` reads; each write is (function, node, parameters[, context])."""
        segments = self.segments
        sizes = [(len(each.group.members), len(each.words), len(each.nodes)) for each in segments]
        columns: list[list[tuple[int, ...]]] = [
            [member for segment in segments for member in segment.group.members],
            [
                (members, each.group.recorded, each.group.alignment, words, nodes)
                for each, (members, words, nodes) in zip(segments, sizes, strict=True)
            ],
            [word for segment in segments for word in segment.words],
            [(node,) for segment in segments for node in segment.nodes],
            [(*each, 0)[:4] for each in writes],
        ]
        flat = itertools.chain.from_iterable(itertools.chain.from_iterable(columns))
        numbers = (len(self.inputs), *map(len, columns), *flat, *self.bound)
        return array.array("Q", (number % _MODULUS for number in numbers))
