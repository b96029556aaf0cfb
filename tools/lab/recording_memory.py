"""Memory of a recording: each allocation of a call by its role."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygraphd.client.replay.replay import Replay


class Role(enum.StrEnum):
    """The role of an allocation of a call."""

    OUTPUT = "outputs"
    """An output, or some that share a storage."""
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One that a call makes."""

    role: Role
    bytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """A recording's memory, in bytes."""

    allocations: tuple[Allocation, ...]
    executables: int
    """Their number. The allocator does not know their memory."""


def footprint_of(replay: Replay) -> Footprint:
    """Look at a recording."""
    # Imported here: it imports torch, which those who only need `Role` do without.
    from pygraphd.client.replay.outputs import Flagged, Part, Whole

    layout = replay.layout
    parts = [each.of if isinstance(each, Flagged) else each for each in layout.outputs.all]
    seen = {each.memory for each in parts if isinstance(each, Whole | Part)}
    return Footprint(
        tuple(
            Allocation(Role.OUTPUT if slot in seen else Role.SCRATCH, memory.bytes)
            for slot, memory in enumerate(layout.memories)
        ),
        replay.executables,
    )
