"""What a recording of a relocatable graph takes of memory: each allocation of a call by what it is for, what is kept, what is staged."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from pygraphd.client.outputs import Outputs
    from pygraphd.client.replay import Replay


class Role(enum.StrEnum):
    """What an allocation of a call is for."""

    OUTPUT = "outputs"
    """An output, or some that lay in one cluster."""
    GROUP = "groups"
    """Gradients that are together."""
    SCRATCH = "scratch"


@dataclass(frozen=True, slots=True)
class Allocation:
    """One that a call makes, or that is `kept` for it from the call before."""

    role: Role
    bytes: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Footprint:
    """A recording's memory, in bytes."""

    allocations: tuple[Allocation, ...]
    sets: tuple[int, ...]
    """Each set of memory that is kept."""
    staged: int
    """Buffers that inputs are copied to."""
    executables: int
    """How many there are; what these take of the device the allocator does not know."""

    def fresh(self, role: Role) -> int:
        """Return what calls allocate anew for this."""
        return sum(each.bytes for each in self.allocations if each.role is role and not each.kept)


def footprint_of(replay: Replay, gradients: Collection[int]) -> Footprint:
    """Look at a recording; `gradients` are the outputs that were to be together, by index."""
    layout, recycler = replay.layout, replay.recycler
    kept = recycler.slots if recycler is not None else ()
    roles = roles_of(layout.outputs, len(layout.memories), gradients)
    return Footprint(
        tuple(
            Allocation(role, memory.bytes, slot in kept)
            for slot, (role, memory) in enumerate(zip(roles, layout.memories, strict=True))
        ),
        tuple(size for _, size in recycler.places) if recycler is not None else (),
        sum(buffer.untyped_storage().nbytes() for _, buffer in layout.staged),
        replay.executables,
    )


def roles_of(outputs: Outputs, memories: int, gradients: Collection[int]) -> Sequence[Role]:
    """Return what each allocation is for. Of several outputs that are all to be together, it is taken for a group."""
    lying = Counter(outputs.memory_of(index) for index in range(len(outputs.all)))
    apart = {outputs.memory_of(index) for index in range(len(outputs.all)) if index not in gradients}
    return [
        Role.SCRATCH
        if not lying[slot]
        else Role.GROUP
        if lying[slot] > 1 and slot not in apart
        else Role.OUTPUT
        for slot in range(memories)
    ]
