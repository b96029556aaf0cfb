"""Makes tensors in place of the inputs of a call: stand-ins without values for captures, and copies for replays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import NotRelocatableError
from pygraphd.client.recording.alias_sets import InputGroups, input_groups
from pygraphd.client.recording.size_slot import LayoutConstraints
from pygraphd.client.replay.addresses import extent
from pygraphd.client.replay.arena import Arena
from pygraphd.client.replay.graph_exec import InputGroup
from pygraphd.client.replay.relocation_table import BLOCK, Span, alignment, blocks

NO_CONSTRAINTS = LayoutConstraints()


@dataclass(frozen=True, slots=True)
class StandIns:
    """Tensors that a call is captured on."""

    tensors: list[Any]
    """A stand-in for each tensor among the inputs, and the other inputs as they are."""
    memory: list[torch.Tensor]
    """The memory of the stand-ins, as 64-bit integers."""
    bound: list[Any]
    """`tensors` with the buffers of staged inputs in their places."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that is recorded."""

    inputs: list[Any]
    staged: Mapping[int, torch.Tensor]
    """The buffers of staged inputs, by index."""
    constraints: LayoutConstraints
    groups: InputGroups

    def stand_ins(self, *, side_by_side: bool = False) -> StandIns:
        """Return stand-ins for the inputs, in an allocation for each group or in one for all."""
        make = stand_ins_side_by_side if side_by_side else stand_ins_for
        tensors, memory = make(self.inputs, self.constraints, self.groups)
        bound = [self.staged.get(index, value) for index, value in enumerate(tensors)]
        return StandIns(tensors, memory, bound)


# --- copies ------------------------------------------------------------------------------------------------------


def bytes_to_copy(inputs: Sequence[Any], groups: InputGroups | None = None) -> int:
    """Return the memory that `copies_of` takes."""
    return sum(_bytes_for(span) for _, span in groups_of(inputs, groups))


def copies_of(inputs: Sequence[Any], groups: InputGroups | None = None) -> list[Any]:
    """Return the inputs with copies of all tensors, which are aligned and overlap as the tensors do. Raises `NotRelocatableError`."""
    copies, groups = list(inputs), groups_of(inputs, groups)
    arena = Arena(sum(_bytes_for(span) for _, span in groups), _device_of(inputs)) if groups else None
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for group, span in groups:
        assert arena is not None
        start = arena.take(span.size, span.start)
        for index, _ in group.members:
            tensor = inputs[index]
            copies[index] = arena.tensor(start + tensor.data_ptr() - span.start, tensor)
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        # A byte that is neither 0 nor 1 in a boolean tensor, as in memory that was never written, would become 1.
        if len(group.members) == 1 and span.size == tensor.nbytes and is_plain and tensor.dtype != torch.bool:
            pairs.append((copies[index], tensor))
        else:
            pairs.append((arena.bytes(start, span.size), _bytes_of(tensor, span)))
    torch_private.copy_all(pairs)
    return copies


def groups_of(inputs: Sequence[Any], groups: InputGroups | None) -> InputGroups:
    """Return the groups of all inputs; `groups` if they are known, as finding them takes milliseconds for hundreds of inputs."""
    return input_groups(inputs, ()) if groups is None else groups


def _device_of(inputs: Sequence[Any]) -> torch.device:
    return next(each.device for each in inputs if isinstance(each, torch.Tensor))


def _bytes_of(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the bytes of a span of a tensor's storage."""
    storage = tensor.untyped_storage()
    offset = span.start - storage.data_ptr()
    if offset < 0 or offset + span.size > storage.nbytes():
        raise NotRelocatableError("inputs overlap that are of different storages")
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, offset, (span.size,), (1,))


# --- stand-ins ---------------------------------------------------------------------------------------------------


def stand_ins_for(
    inputs: Sequence[Any],
    constraints: LayoutConstraints = NO_CONSTRAINTS,
    groups: InputGroups | None = None,
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return stand-ins for the inputs, and their memory as 64-bit integers: an allocation for each group.

    They are aligned as the inputs are or as the constraints say, whichever is worse, and overlap as the inputs do unless they
    are to lie apart.
    """
    copies, memory = list(inputs), []
    for group, span in _groups(inputs, constraints, groups):
        members = [(index, inputs[index]) for index, _ in group.members]
        copy, base = _allocated(*members[0], span, constraints if len(members) == 1 else NO_CONSTRAINTS)
        memory.append(copy.view(torch.int64))
        for index, tensor in members:
            start = base + tensor.data_ptr() - span.start
            size, stride = tuple(tensor.size()), tuple(tensor.stride())
            plain = torch_private.reinterpret(
                copy, tensor.dtype, size, stride, start // tensor.element_size()
            )
            copies[index] = torch_private.viewed_like(plain, tensor)
    return copies, memory


def stand_ins_side_by_side(
    inputs: Sequence[Any],
    constraints: LayoutConstraints = NO_CONSTRAINTS,
    groups: InputGroups | None = None,
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return stand-ins as `stand_ins_for` does, but in one allocation, which takes less time to make."""
    copies, all_groups = list(inputs), list(_groups(inputs, constraints, groups))
    if not all_groups:
        return copies, []
    arena = Arena(sum(_bytes_for(span) for _, span in all_groups), _device_of(inputs))
    for group, span in all_groups:
        first = group.members[0][0]
        own = constraints if len(group.members) == 1 else NO_CONSTRAINTS
        start = arena.take(span.size, _base_like(first, inputs[first], span, own))
        for index, _ in group.members:
            copies[index] = arena.tensor(start + inputs[index].data_ptr() - span.start, inputs[index])
    return copies, [arena.whole]


def bytes_to_stand_in(
    inputs: Sequence[Any], constraints: LayoutConstraints, groups: InputGroups | None = None
) -> int:
    """Return the memory that stand-ins take."""
    return sum(_bytes_for(span) for _, span in _groups(inputs, constraints, groups))


def _groups(
    inputs: Sequence[Any], constraints: LayoutConstraints, groups: InputGroups | None
) -> Iterator[tuple[InputGroup, Span]]:
    """Yield the groups of the inputs; a group for each input if they are to lie apart."""
    if not constraints.apart:
        yield from groups_of(inputs, groups)
        return
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.numel():
            span = extent(value)
            yield InputGroup(((index, 0),), alignment(span.start), span.start), span


def _allocated(
    index: int, member: torch.Tensor, span: Span, constraints: LayoutConstraints
) -> tuple[torch.Tensor, int]:
    """Return an allocation for a span, and the offset in it at which the span is to begin; see `_base_like`."""
    memory = torch.empty(_bytes_for(span), dtype=torch.uint8, device=member.device)
    return memory, (_base_like(index, member, span, constraints) - memory.data_ptr()) % BLOCK


def _base_like(index: int, member: torch.Tensor, span: Span, constraints: LayoutConstraints) -> int:
    """Return an address for a span, modulo `BLOCK`, at which its member is aligned as it is, or as the constraints say if that is worse."""
    address: int = member.data_ptr()
    worst = constraints.alignments.get(index, BLOCK)
    like = worst if worst < alignment(address) else address
    return like - (address - span.start)


def _bytes_for(span: Span) -> int:
    """Return the bytes that an allocation needs to hold a span at any offset modulo `BLOCK`."""
    return (blocks(span.size) + 1) * BLOCK
