"""Graphs of a few nodes whose inputs lie elsewhere at each call: words follow tensors, and nobody asks whether they were there before.

To see whether addresses have come before takes longer than to write a few nodes (H200: of a call 10 us, the write of one in them 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pygraphd.client.binding import InputGroup
    from pygraphd.client.bulk import Addresses
    from pygraphd.client.relocation import Table

MOST_NODES = 8
MOST_TENSORS = 16
"""What has moved is written in Python."""


@dataclass(frozen=True, slots=True)
class Follower:
    """An input, or a memory that a call makes, and what follows it when it moves."""

    base: int
    """Where it was when it was recorded: it must be aligned as that is,"""
    alignment: int
    """to so many bytes."""
    words: tuple[tuple[int, int], ...]
    """As (index, bytes from the tensor)."""
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Following:
    """What follows the inputs and the memories of a graph, by their indices."""

    inputs: Mapping[int, Follower]
    memory: Mapping[int, Follower]

    def are_aligned(self, inputs: Mapping[int, int]) -> bool:
        """Whether inputs may lie in these places, by index."""
        followers = self.inputs
        return not any(
            (at - followers[index].base) % followers[index].alignment for index, at in inputs.items()
        )


def move(
    followers: Mapping[int, Follower], moved: Mapping[int, int], known: Addresses, words: Any
) -> Iterable[int]:
    """Have what is known of addresses, and words, follow what has moved; return the nodes to be written, some twice."""
    nodes: list[int] = []
    for index, at in moved.items():
        known[index] = at
        each = followers[index]
        for word, offset in each.words:
            words[word] = at + offset
        nodes += each.nodes
    return nodes


def following(table: Table, groups: Sequence[InputGroup], nodes: int) -> Following | None:
    """Return what follows the tensors of a graph with so many nodes; None if it is too large, or inputs must move together."""
    slots = len(table.places)
    if nodes > MOST_NODES or slots > MOST_TENSORS or any(len(group.members) > 1 for group in groups):
        return None
    inputs = {}
    for slot, group in enumerate(groups):
        ((index, before),) = group.members
        words = tuple((word, offset - before) for word, offset in table.places[slot])
        inputs[index] = Follower(group.recorded + before, group.alignment, words, table.nodes[slot])
    first = len(groups)
    memory = {
        slot - first: Follower(0, 1, table.places[slot], table.nodes[slot]) for slot in range(first, slots)
    }
    return Following(inputs, memory)
