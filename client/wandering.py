"""Graphs of a few nodes that are found elsewhere at most calls: the helper finds the executable that is bound there, or writes one.

To look for it in Python takes longer than to write a few nodes (H200: of a call 10 us, the write of one in them 2). So once many calls had
to be bound, Python is asked about those whose addresses have come often, which get an executable, and about one of every few others.
"""

from __future__ import annotations

import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.client.binding import TORN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pygraphd.client.binding import Binding

MOST_NODES = 32
MOST_TENSORS = 48
"""Of larger graphs writing takes longer than looking."""
TURNS = 60
"""Calls that the helper binds by itself, after which Python is asked about one, as that takes 50 to 80 us in a program (H100)."""
MANY_NODES = 3
"""Nodes of a graph whose addresses get an executable when they come again, if half of the nodes, or more, would be written;"""
OFTEN = 40
"""others when they have come so often (H100: writing one takes 2 us more than having one, which takes 200 to make),"""
SOON = 256
"""within so many calls each time."""
RESTS = 16
"""Calls for which it is not tried again if none of these was for the helper."""
_MODULUS = 1 << 64


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


@dataclass(frozen=True, slots=True)
class Following:
    """What follows the inputs and the memories of a graph."""

    inputs: tuple[Follower, ...]
    memory: tuple[Follower, ...]

    def told(self) -> tuple[int, tuple[tuple[int, int, int, int, int], ...], array.array[int], int, int, int]:
        """Return how many inputs there are, all followers and their words, and what comes often, as `bulk.c` takes them."""
        both = (*self.inputs, *self.memory)
        followers = tuple(
            (
                each.index,
                each.base,
                each.alignment,
                len(each.words),
                sum(1 << node for node in set(each.nodes)),
            )
            for each in both
        )
        words = (number % _MODULUS for each in both for word in each.words for number in word)
        return len(self.inputs), followers, array.array("Q", words), SOON, OFTEN, MANY_NODES


def following(binding: Binding) -> Following | None:
    """Return what follows the tensors of a graph; None if it is too large, or inputs must move together."""
    groups, table = binding.groups, binding.table
    slots, first = len(table.places), len(groups)
    if binding.nodes > MOST_NODES or slots > MOST_TENSORS or any(len(group.members) > 1 for group in groups):
        return None
    inputs = []
    for slot, group in enumerate(groups):
        ((index, before),) = group.members
        words = tuple((word, offset - before) for word, offset in table.places[slot])
        inputs.append(Follower(index, group.recorded + before, group.alignment, words, table.nodes[slot]))
    memory = [
        Follower(slot - first, 0, 1, table.places[slot], table.nodes[slot]) for slot in range(first, slots)
    ]
    return Following(tuple(inputs), tuple(memory))


class Wandering:
    """What the helper needs to serve calls of a graph by itself, and for how many it may."""

    def __init__(self, track: Any, spare: Binding) -> None:
        """Begin with no turns; `track` is of `Bulk.track`."""
        self.track = track
        self.spare = spare
        """The executable that is written when no other one is bound to a call's addresses."""
        self.places: tuple[Any, ...] = ()
        """The executables, that one first,"""
        self.number = TORN
        """and the set of recycled memory that they are bound to, see `Binding.number`."""
        self.turns = 0
        """Calls to come that Python is not asked about; before anything else is done with an executable, this has to be 0."""
        self.comes_often = False
        """Whether the addresses of the call that Python is asked about have."""
        self._may_have_written = False
        """Whether an executable may be bound elsewhere than Python knows."""
        self._rests = 0
        """Calls for which it is not worth beginning, as the latest turns have been of no use."""

    @property
    def is_at_work(self) -> bool:
        """Whether most calls are served by the helper: then what Python sees says little about how often addresses come."""
        return not self._rests

    def pause(self) -> None:
        """Have Python know what the helper has done, and ask it about the next calls."""
        if self.turns == TURNS:
            self._rests = RESTS
        if self._may_have_written:
            self.spare.catch_up()
        self.turns = 0
        self._may_have_written = False

    def uses(self, binding: Binding, calls: int) -> bool:
        """Whether the helper has launched an executable in the latest calls, so many of them."""
        return binding.unused(self.track) <= calls

    def renew(self, spare: Binding, others: Iterable[Binding]) -> None:
        """Go on for `TURNS` calls with these executables, which are as they are now."""
        self._rests -= self._rests > 0
        if spare.is_torn or self._rests:
            return
        if spare is not self.spare:
            self.spare.catch_up()
        self.spare, self.number = spare, spare.number
        chosen = [spare, *(each for each in others if each is not spare and each.number == spare.number)]
        self.places = tuple(each.place(self.track) for each in chosen)
        self.comes_often = False
        self._may_have_written = True
        self.turns = TURNS


def wandering(bindings: Sequence[Binding]) -> Wandering | None:
    """Return what serves calls of a graph with these executables; None if it is not for the helper."""
    first = bindings[0]
    followed = following(first)
    track = None if followed is None else first.track(followed)
    return None if track is None else Wandering(track, first)
