"""Groups memory that has to move together: inputs that overlap, and allocations of a capture that overlap.

During a capture the allocator gives the memory of dead temporaries to later ones. Allocations that overlap form an alias set, which moves
as one segment, so that no write of a kernel leaves its memory. Each storage of an output is an alias set of its own: see `output_reserves`.
Tensors that only the backward uses lie side by side in a few allocations of a replay, since host time grows with the number of allocations.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import NotRelocatableError
from pygraphd.client.replay.addresses import extent, storage_of
from pygraphd.client.replay.layout import Memory
from pygraphd.client.replay.outputs import (
    Empty,
    Fixed,
    Flagged,
    Input,
    Output,
    Part,
    Same,
    View,
    Whole,
    first_positions,
)
from pygraphd.client.replay.relocation_table import (
    BLOCK,
    SegmentRange,
    Share,
    Span,
    alignment,
    blocks,
    find,
    merge,
    pack,
)
from pygraphd.client.replay.segments import InputGroup

if TYPE_CHECKING:
    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.recording.capture import Capture

SAVED_SHARE = Share(count=16, least=2 << 20)
"""About how many allocations hold the tensors saved for a backward. A single one would need a gap of its whole size in memory."""

InputGroups = Sequence[tuple[InputGroup, Span]]
"""The inputs that can move, in groups of those that overlap, each with the addresses that belong to it; see `input_groups`."""


class AliasSets:
    """The alias sets of a capture's allocations, by index, and which outputs lie in which. Raises `NotRelocatableError`."""

    def __init__(self, capture: Capture, saved: frozenset[int] = frozenset()) -> None:
        """Find the alias sets; `saved` are the indices of outputs that only a backward sees."""
        self._spans = merge((*capture.allocations, *capture.held))
        self._held = {find(self._spans, span.start) for span in capture.held}
        # Temporaries that overlap with it would have to move with the set, and held memory has to stay.
        if any(span not in self._spans for span in capture.held):
            raise NotRelocatableError("memory that must stay in place was used for something else before")
        self._outputs = capture.outputs
        self._members: dict[int, list[int]] = {}
        storages: dict[Span, list[int]] = {}
        for index, value in enumerate(capture.outputs):
            if (number := self._set_of(value)) is not None:
                self._members.setdefault(number, []).append(index)
                storages.setdefault(storage_of(value), []).append(index)
        if not self._held.isdisjoint(self._members):
            raise NotRelocatableError("an output lies in memory that must stay in place")
        self.storages = {storage: tuple(outputs) for storage, outputs in storages.items()}
        """The indices of the outputs in each storage."""
        # Saved outputs alone: the program may free or resize the storage of any other output, and none may go with it.
        only_saved = [each for each, outputs in self._members.items() if saved.issuperset(outputs)]
        sizes = [blocks(self._spans[each].size) * BLOCK for each in only_saved]
        shares = ([only_saved[position] for position in share] for share in SAVED_SHARE.pieces(sizes))
        pieces = [share for share in shares if len(share) > 1]
        together = {*itertools.chain.from_iterable(pieces)}
        self._alone = [number for number in self._members if number not in together]
        self._packed = [pack([self._spans[number] for number in piece]) for piece in pieces]
        self.saves_together = bool(pieces)
        """Whether several outputs share a storage in a replay."""
        self._at = {number: (order, 0) for order, number in enumerate(self._alone)}
        """For each alias set with outputs: the index of the replay's allocation that it lies in, and its offset in bytes."""
        for order, (piece, (offsets, _)) in enumerate(
            zip(pieces, self._packed, strict=True), len(self._alone)
        ):
            self._at.update((number, (order, offset)) for number, offset in zip(piece, offsets, strict=True))

    def _set_of(self, value: Any) -> int | None:
        is_here = isinstance(value, torch.Tensor) and value.numel()
        return find(self._spans, value.data_ptr()) if is_here else None

    @property
    def overlapping(self) -> frozenset[Span]:
        """The storages of outputs that overlap with another storage or a temporary. Padding of the allocator's block is no overlap."""
        found = set()
        for number, members in self._members.items():
            span = self._spans[number]
            for storage in (storage_of(self._outputs[index]) for index in members):
                fills = span.start == storage.start and blocks(span.size) == blocks(storage.size)
                if not fills or len(members) != len(self.storages[storage]):
                    found.add(storage)
        return frozenset(found)

    # --- for the builder ---

    def outputs(self, inputs: Sequence[Any], groups: InputGroups) -> tuple[Output, ...]:
        """Return how each output of a replay is made."""
        pairs = enumerate(zip(first_positions(self._outputs), self._outputs, strict=True))
        return tuple(
            Same(first) if first < index else self._output(value, inputs, groups)
            for index, (first, value) in pairs
        )

    def _output(self, value: Any, inputs: Sequence[Any], groups: InputGroups) -> Output:
        if not isinstance(value, torch.Tensor):
            return Fixed(value)
        if not value.numel():
            return Empty(tuple(value.size()), tuple(value.stride()), value.dtype, value.device)
        # By identity: where the callable returns its input itself, so does a call.
        if (index := next((at for at, each in enumerate(inputs) if each is value), None)) is not None:
            return Input(index)
        number = self._set_of(value)
        if number is None:
            # In no memory of the call: a constant of the module. Verification checks that KERNELS return it from there, too.
            return _view_of_input(value, inputs, groups) or Fixed(value)
        memory, begin = self._at[number]
        if memory < len(self._alone) and value is self._whole(number):
            return Whole(memory)
        form = tuple(value.size()), tuple(value.stride())
        offset = _elements(begin, value.dtype) + int(value.storage_offset())
        part = Part(memory, *form, offset, value.dtype)
        if not is_flagged(value):
            return part
        none = torch.empty(0, dtype=value.dtype, device=value.device)
        return Flagged(part, torch_private.viewed_like(none, value))

    def _whole(self, number: int) -> torch.Tensor | None:
        """Return the first output that fills its storage."""
        members = (self._outputs[index] for index in self._members[number])
        whole = (each for each in members if extent(each) == storage_of(each) and not is_flagged(each))
        return next(whole, None)

    def memories(self, first: int) -> tuple[tuple[Memory, ...], list[SegmentRange], list[int]]:
        """Return the allocations of a call for outputs, the segments in them, and their addresses in the capture (0: none)."""
        if self.overlapping:
            raise NotRelocatableError("outputs overlap with other memory")
        segments = [
            SegmentRange(self._spans[number], first + memory, begin)
            for number, (memory, begin) in self._at.items()
        ]
        packed = [Memory((size,), (1,), torch.uint8) for _, size in self._packed]
        # 0: a packed allocation was nowhere in the capture, so the first call writes its nodes.
        bound = [self._spans[number].start for number in self._alone] + [0] * len(packed)
        return (*map(self._memory, self._alone), *packed), segments, bound

    def _memory(self, number: int) -> Memory:
        """Return the allocation for a storage of the size that it had in the capture."""
        if (whole := self._whole(number)) is not None:
            return Memory(tuple(whole.size()), tuple(whole.stride()), whole.dtype)
        first = self._outputs[self._members[number][0]]
        size = storage_of(first).size
        # The type of an output where that is possible: to see memory as another type costs a view at each call.
        dtype = first.dtype if not size % first.dtype.itemsize else torch.uint8
        return Memory((size // dtype.itemsize,), (1,), dtype)

    @property
    def scratch(self) -> list[Span]:
        """The alias sets of temporaries: without outputs, and free to move."""
        others = self._held.union(self._members)
        return [span for number, span in enumerate(self._spans) if number not in others]


def is_flagged(value: Any) -> bool:
    """Return whether a value is a conjugate or negative view."""
    return isinstance(value, torch.Tensor) and (value.is_conj() or value.is_neg())


def _view_of_input(value: torch.Tensor, inputs: Sequence[Any], groups: InputGroups) -> Output | None:
    storage = value.untyped_storage().data_ptr()
    for index, each in enumerate(inputs):
        if isinstance(each, torch.Tensor) and each.numel() and each.untyped_storage().data_ptr() == storage:
            if is_flagged(value):
                raise NotRelocatableError("an output is a conjugate or negative view of an input")
            offset = _elements(value.data_ptr() - each.data_ptr(), value.dtype)
            keeps = each.dtype == value.dtype
            return View(index, tuple(value.size()), tuple(value.stride()), offset, value.dtype, keeps)
    if any(span.start <= value.data_ptr() < span.end for _, span in groups):
        raise NotRelocatableError("an output shares memory with an input of another storage")
    return None


def _elements(size: int, dtype: torch.dtype) -> int:
    itemsize: int = dtype.itemsize
    elements, rest = divmod(size, itemsize)
    if rest:
        raise NotRelocatableError("an output begins within an element")
    return elements


# --- inputs ------------------------------------------------------------------------------------------------------


def input_groups(inputs: Sequence[Any]) -> list[tuple[InputGroup, Span]]:
    """Return the tensors among the inputs, in groups of those that overlap."""
    # By elements and not by storages: views of one storage that lie apart may lie otherwise at the next call.
    moving = {
        index: extent(value)
        for index, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and value.numel()
    }
    spans = merge(moving.values())
    members: list[list[int]] = [[] for _ in spans]
    for index, each in moving.items():
        position = find(spans, each.start)
        assert position is not None
        members[position].append(index)
    widened = _widen(spans, [inputs[each[0]] for each in members])
    groups = []
    for indices, span in zip(members, widened, strict=True):
        starts = [moving[index].start for index in indices]
        offsets = tuple((index, start - span.start) for index, start in zip(indices, starts, strict=True))
        # A group moves as one. By a multiple of its best alignment, every member keeps its own.
        groups.append((InputGroup(offsets, max(map(alignment, starts)), span.start), span))
    return groups


def _widen(spans: list[Span], first_members: list[torch.Tensor]) -> list[Span]:
    """Extend each group to its whole storage if no other group lies in that: a kernel may be given the address of the storage alone."""
    widened: list[Span] = []
    for index, (span, tensor) in enumerate(zip(spans, first_members, strict=True)):
        storage = tensor.untyped_storage()
        # Without its last byte: where an allocation ends another one may begin, and its address would belong to both.
        last = storage.data_ptr() + storage.nbytes() - 1
        start, end = min(storage.data_ptr(), span.start), max(last, span.end)
        free_before = index == 0 or max(widened[-1].end, spans[index - 1].end) <= start
        free_after = index + 1 == len(spans) or end <= spans[index + 1].start
        widened.append(Span(start, end) if free_before and free_after else span)
    return widened


def only_for_backward(facts: GraphFacts, outputs: Sequence[Any], inputs: Sequence[Any]) -> frozenset[int]:
    """Return the saved outputs whose storages only the backward sees."""
    if torch_private.saves_by_hooks():
        return frozenset()
    gradients = {_size(each) for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad}
    sizes = facts.backward.returned_sizes

    def may_be_returned(output: Any) -> bool:
        if not isinstance(output, torch.Tensor):
            return False  # a size, or RNG state that is on the CPU
        return _size(output) in gradients if sizes is None else output.numel() in sizes

    return frozenset(at for at in facts.saved if not may_be_returned(outputs[at]))


def _size(value: torch.Tensor) -> tuple[torch.dtype, int]:
    return value.dtype, value.numel()
