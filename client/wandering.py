"""Graphs of a few nodes whose inputs lie elsewhere at each call: words follow tensors, and nobody asks whether they were there before.

To see whether addresses have come before takes longer than to write a few nodes (H200: of a call 10 us, the write of one in them 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.binding import InputGroup
    from pygraphd.client.bulk import Addresses
    from pygraphd.client.relocation import Table

MOST_NODES = 8
MOST_TENSORS = 16
"""Each is looked at in Python."""


@dataclass(frozen=True, slots=True)
class Follower:
    """An input, or a memory that a call makes, and what follows it when it moves."""

    index: int
    base: int
    """Where it was when it was recorded: it must be aligned as that is,"""
    alignment: int
    """to so many bytes."""
    words: tuple[tuple[int, int], ...]
    """As (index, bytes from the tensor)."""
    nodes: tuple[int, ...]


Moved = tuple[Follower, int, "Addresses"]
"""What has moved, where it lies now, and what is known of addresses where it was."""


@dataclass(frozen=True, slots=True)
class Following:
    """What follows the inputs and the memories of a graph."""

    inputs: tuple[Follower, ...]
    memory: tuple[Follower, ...]

    def moved(
        self, inputs: Sequence[Any], memory: Sequence[Any], of_inputs: Addresses, of_memory: Addresses
    ) -> list[Moved] | None:
        """Return which of a call's tensors do not lie where they are known to; None if one is not aligned as it must be."""
        moved = []
        for followers, tensors, known in ((self.inputs, inputs, of_inputs), (self.memory, memory, of_memory)):
            for each in followers:
                at = tensors[each.index].data_ptr()
                if at != known[each.index]:
                    if (at - each.base) % each.alignment:
                        return None
                    moved.append((each, at, known))
        return moved


def move(moved: Sequence[Moved], words: Any) -> set[int]:
    """Have what is known of addresses, and words, follow what has moved; return the nodes to be written."""
    nodes: set[int] = set()
    for each, at, known in moved:
        known[each.index] = at
        for word, offset in each.words:
            words[word] = at + offset
        nodes.update(each.nodes)
    return nodes


def following(table: Table, groups: Sequence[InputGroup], nodes: int) -> Following | None:
    """Return what follows the tensors of a graph with so many nodes; None if it is too large, or inputs must move together."""
    slots = len(table.places)
    if nodes > MOST_NODES or slots > MOST_TENSORS or any(len(group.members) > 1 for group in groups):
        return None
    inputs = []
    for slot, group in enumerate(groups):
        ((index, before),) = group.members
        words = tuple((word, offset - before) for word, offset in table.places[slot])
        inputs.append(Follower(index, group.recorded + before, group.alignment, words, table.nodes[slot]))
    first = len(groups)
    memory = [
        Follower(slot - first, 0, 1, table.places[slot], table.nodes[slot]) for slot in range(first, slots)
    ]
    return Following(tuple(inputs), tuple(memory))
