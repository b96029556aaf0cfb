"""What stands in for a call's inputs: copies of them, and tensors like them without their values, in memory of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.recording.builder import input_groups
from pygraphd.client.recording.layout_mismatch import LayoutConstraints
from pygraphd.client.replay.addresses import extent
from pygraphd.client.replay.arena import Arena
from pygraphd.client.replay.graph_exec import InputGroup
from pygraphd.client.replay.node_params import OpaqueError
from pygraphd.client.replay.relocation_table import BLOCK, Span, alignment, blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pygraphd.client.recording.builder import Moving


def moving_of(inputs: Sequence[Any], told: Moving | None) -> Moving:
    """Return the inputs' groups, unless they are `told`."""
    # For hundreds of inputs it takes milliseconds, and most of what is here needs it.
    return input_groups(inputs, ()) if told is None else told


def bytes_to_copy(inputs: Sequence[Any], moving: Moving | None = None) -> int:
    """Return how much memory `copies_of` takes."""
    return sum(_room(span) for _, span in moving_of(inputs, moving))


def copies_of(inputs: Sequence[Any], moving: Moving | None = None) -> list[Any]:
    """Return the inputs with all tensors copied; what overlaps does so again, and alignment is the same. `moving` are their groups."""
    copies, groups = list(inputs), moving_of(inputs, moving)
    arena = Arena(sum(_room(span) for _, span in groups), _device_of(inputs)) if groups else None
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for group, span in groups:
        assert arena is not None
        start = arena.take(span.size, span.start)
        for index, _ in group.members:
            tensor = inputs[index]
            copies[index] = arena.tensor(start + tensor.data_ptr() - span.start, tensor)
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        # What is neither 0 nor 1 among booleans, as where nothing was written, would become 1.
        if len(group.members) == 1 and span.size == tensor.nbytes and is_plain and tensor.dtype != torch.bool:
            pairs.append((copies[index], tensor))
        else:
            pairs.append((arena.bytes(start, span.size), _bytes(tensor, span)))
    torch_private.copy_all(pairs)
    return copies


def _device_of(inputs: Sequence[Any]) -> torch.device:
    return next(each.device for each in inputs if isinstance(each, torch.Tensor))


def stand_ins_for(
    inputs: Sequence[Any],
    constraints: LayoutConstraints = LayoutConstraints(),  # noqa: B008 - it is frozen
    moving: Moving | None = None,
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return tensors like the inputs in memory of their own, without their values, and that memory as 64-bit integers.

    They are aligned as the inputs are, or worse, and overlap as these do unless they are to lie apart. `moving` are the inputs' groups.
    """
    copies, places = list(inputs), []
    for group, span in _groups(inputs, constraints, moving):
        members = [(index, inputs[index]) for index, _ in group.members]
        copy, base = _room_for(*members[0], span, constraints if len(members) == 1 else LayoutConstraints())
        places.append(copy.view(torch.int64))
        for index, tensor in members:
            start = base + tensor.data_ptr() - span.start
            size, stride = tuple(tensor.size()), tuple(tensor.stride())
            plain = torch_private.reinterpret(
                copy, tensor.dtype, size, stride, start // tensor.element_size()
            )
            copies[index] = torch_private.viewed_like(plain, tensor)
    return copies, places


def _groups(
    inputs: Sequence[Any], constraints: LayoutConstraints, moving: Moving | None
) -> Iterator[tuple[InputGroup, Span]]:
    """Yield the inputs that can move, those that overlap together unless they are to lie apart."""
    if not constraints.apart:
        yield from moving_of(inputs, moving)
        return
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.numel():
            span = extent(value)
            yield InputGroup(((index, 0),), alignment(span.start), span.start), span


def bytes_to_stand_in(
    inputs: Sequence[Any], constraints: LayoutConstraints, moving: Moving | None = None
) -> int:
    """Return how much memory `stand_ins_for` takes."""
    return sum(_room(span) for _, span in _groups(inputs, constraints, moving))


def elsewhere_for(
    inputs: Sequence[Any],
    constraints: LayoutConstraints = LayoutConstraints(),  # noqa: B008 - it is frozen
    moving: Moving | None = None,
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return tensors as `stand_ins_for` does, but side by side in one allocation, and that: it takes less time to make."""
    copies, groups = list(inputs), list(_groups(inputs, constraints, moving))
    if not groups:
        return copies, []
    arena = Arena(sum(_room(span) for _, span in groups), _device_of(inputs))
    for group, span in groups:
        first = group.members[0][0]
        like = _base_like(
            first, inputs[first], span, constraints if len(group.members) == 1 else LayoutConstraints()
        )
        start = arena.take(span.size, like)
        for index, _ in group.members:
            copies[index] = arena.tensor(start + inputs[index].data_ptr() - span.start, inputs[index])
    return copies, [arena.whole]


def _room_for(
    index: int, member: torch.Tensor, span: Span, constraints: LayoutConstraints
) -> tuple[torch.Tensor, int]:
    """Return bytes that a span has room in, and where in them its member is aligned as it is, or worse."""
    room = torch.empty(_room(span), dtype=torch.uint8, device=member.device)
    return room, (_base_like(index, member, span, constraints) - room.data_ptr()) % BLOCK


def _base_like(index: int, member: torch.Tensor, span: Span, constraints: LayoutConstraints) -> int:
    """Return an address that a span's is to be like, up to multiples of a block, for its member to be aligned as it is, or worse."""
    address: int = member.data_ptr()
    worst = constraints.alignments.get(index, BLOCK)
    like = worst if worst < alignment(address) else address
    return like - (address - span.start)


def _room(span: Span) -> int:
    return (blocks(span.size) + 1) * BLOCK


def _bytes(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the bytes of a span of a tensor's storage."""
    storage = tensor.untyped_storage()
    offset = span.start - storage.data_ptr()
    if offset < 0 or offset + span.size > storage.nbytes():
        raise OpaqueError("inputs overlap that are of different storages")
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, offset, (span.size,), (1,))
