"""The segments of a recording: inputs, and memory that the call allocates, with the words and nodes that hold their addresses."""

from __future__ import annotations

import array
import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.backend.errors import FallbackError, LayoutMismatch, LayoutMismatchError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

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


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory that moves as one, with the words and nodes that hold addresses in it."""

    group: InputGroup
    """The group of inputs, or one allocation of the call as a group of its own, which fits at any alignment."""
    is_input: bool
    words: tuple[tuple[int, int], ...]
    """The words that hold an address in it, as (index, bytes from the segment's base)."""
    nodes: tuple[int, ...]


def moving_segments(
    groups: Sequence[InputGroup], table: RelocationTable, bound: Sequence[int], viewed: Container[int]
) -> list[Segment]:
    """Return the segments in which a node holds an address: first those of inputs, then those of allocations.

    Others may lie anywhere, and nothing is written for them. But inputs that overlap, one of which is among the `viewed` (indices of
    inputs that outputs are views of), have to overlap alike at each call: nothing tells which of these inputs an output is a view of.
    `bound` are the addresses of the allocations when they were recorded.
    """

    def moving(number: int, group: InputGroup) -> InputGroup | None:
        if table.words[number]:
            return group
        members = group.members if number < len(groups) else ()
        is_viewed = len(members) > 1 and any(index in viewed for index, _ in members)
        # No kernel reads them, so that they fit at any alignment.
        return dataclasses.replace(group, alignment=1) if is_viewed else None

    # Alignment 1: the allocator's blocks are aligned better than any library asks for.
    memories = [InputGroup(((memory, 0),), 1, address) for memory, address in enumerate(bound)]
    return [
        Segment(found, number < len(groups), table.words[number], table.nodes[number])
        for number, group in enumerate([*groups, *memories])
        if (found := moving(number, group)) is not None
    ]


def mismatch(segments: Iterable[Segment], inputs: Sequence[Any]) -> FallbackError:
    """Return why inputs do not fit a recording with these segments; raises what an object that is no tensor raises."""
    for group in [segment.group for segment in segments if segment.is_input]:
        bases = {inputs[index].data_ptr() - offset for index, offset in group.members}
        if len(bases) > 1:
            return LayoutMismatchError(LayoutMismatch.OVERLAP)
        if (bases.pop() - group.recorded) % group.alignment:
            return LayoutMismatchError(LayoutMismatch.ALIGNMENT)
    return FallbackError("the compiled helper does not find where its inputs lie")


def table_numbers(segments: Sequence[Segment], writes: Iterable[Sequence[int]]) -> array.array[int]:
    """Return the segments as the numbers that `exec_table.h` reads; each write is (function, node, parameters[, context])."""
    # In the order of `lay_out` in `exec_table.h`. The last column has no count: it is as long as the first.
    columns: list[list[tuple[int, ...]]] = [
        [member for each in segments for member in each.group.members],
        [
            (
                len(each.group.members),
                each.group.recorded,
                each.group.alignment,
                len(each.words),
                len(each.nodes),
            )
            for each in segments
        ],
        [word for each in segments for word in each.words],
        [(node,) for each in segments for node in each.nodes],
        [(*each, 0)[:4] for each in writes],
        [(each.group.recorded + offset,) for each in segments for _, offset in each.group.members],
    ]
    inputs = sum(len(each.group.members) for each in segments if each.is_input)
    counts = [inputs, *map(len, columns[:-1])]
    flat = itertools.chain.from_iterable(itertools.chain.from_iterable(columns))
    return array.array("Q", (number % _MODULUS for number in itertools.chain(counts, flat)))
