"""The allocations of a capture, joined where they overlap, and what each output of it is made of.

During a capture the allocator gives dead temporaries' memory to later ones. All allocations that overlap form a cluster, and a cluster
moves as one: then no write of any kernel leaves its memory. The storage of an output is a cluster of its own; see `output_reserves`.
What a forward saves for its backward nobody else sees: in a replay such clusters lie side by side in a few allocations, which take a
third of the host's time of as many as there are tensors.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.replay.addresses import extent, storage_of
from pygraphd.client.replay.layout import Memory
from pygraphd.client.replay.node_params import OpaqueError
from pygraphd.client.replay.outputs import Empty, Fixed, Input, Part, View, Whole
from pygraphd.client.replay.relocation_table import BLOCK, Segment, Share, Span, blocks, find, merge, pack

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pygraphd.client.recording.builder import Capture
    from pygraphd.client.replay.graph_exec import InputGroup
    from pygraphd.client.replay.outputs import Output


SAVED = Share(count=16, least=2 << 20)
"""Into how many allocations, about, what is saved for a backward is put: a large one would need a gap of its size among other memory."""


class Clusters:
    """The allocations of a capture, joined where they overlap, and which outputs lie in which; raises `OpaqueError`."""

    def __init__(self, capture: Capture, saved: frozenset[int] = frozenset()) -> None:
        """Find them; `saved` outputs are seen by nobody but a backward."""
        self._spans = merge((*capture.allocations, *capture.held))
        self._held = {find(self._spans, span.start) for span in capture.held}
        if any(span not in self._spans for span in capture.held):
            raise OpaqueError("memory that must stay in place was used for something else before")
        self._outputs = capture.outputs
        self._members: dict[int, list[int]] = {}
        storages: dict[Span, list[int]] = {}
        for index, value in enumerate(capture.outputs):
            if (cluster := self._cluster(value)) is not None:
                self._members.setdefault(cluster, []).append(index)
                storages.setdefault(storage_of(value), []).append(index)
        if not self._held.isdisjoint(self._members):
            raise OpaqueError("an output lies in memory that must stay in place")
        self.storages = {storage: tuple(outputs) for storage, outputs in storages.items()}
        """The outputs in each storage, by index."""
        pieces = self._pieces([each for each, outputs in self._members.items() if saved.issuperset(outputs)])
        together = {*itertools.chain.from_iterable(pieces)}
        self._alone = [cluster for cluster in self._members if cluster not in together]
        self._packed = [pack([self._spans[cluster] for cluster in piece]) for piece in pieces]
        self._at = {cluster: (order, 0) for order, cluster in enumerate(self._alone)}
        """Of each cluster with outputs: which memory of a call it lies in, and how many bytes from where that begins."""
        for order, (piece, (begins, _)) in enumerate(
            zip(pieces, self._packed, strict=True), len(self._alone)
        ):
            self._at.update((cluster, (order, begin)) for cluster, begin in zip(piece, begins, strict=True))

    @property
    def saves_together(self) -> bool:
        """Whether several outputs share a storage in a replay."""
        return bool(self._packed)

    def _pieces(self, clusters: Sequence[int]) -> list[list[int]]:
        """Return which of some clusters come to lie in one allocation."""
        sizes = [blocks(self._spans[each].size) * BLOCK for each in clusters]
        pieces = ([clusters[number] for number in piece] for piece in SAVED.pieces(sizes))
        return [piece for piece in pieces if len(piece) > 1]

    @property
    def tangled(self) -> frozenset[Span]:
        """The storages of outputs that overlap with anything else, but for what fits into what they take of the allocator."""
        return frozenset(
            storage
            for members in self._members.values()
            for storage in (storage_of(self._outputs[index]) for index in members)
            if not self._is_apart(storage, members)
        )

    def _is_apart(self, storage: Span, members: Sequence[int]) -> bool:
        span = self._spans[self._cluster(self._outputs[members[0]]) or 0]
        fills = span.start == storage.start and blocks(span.size) == blocks(storage.size)
        return fills and len(members) == len(self.storages[storage])

    def _cluster(self, value: Any) -> int | None:
        return (
            find(self._spans, value.data_ptr()) if isinstance(value, torch.Tensor) and value.numel() else None
        )

    def output(
        self,
        value: Any,
        inputs: Sequence[Any],
        given: Mapping[int, int],
        groups: Sequence[tuple[InputGroup, Span]],
    ) -> Output:
        """Return how an output is made; `given` are the inputs' indices by their identity."""
        if not isinstance(value, torch.Tensor):
            return Fixed(value)
        if not value.numel():
            return Empty(tuple(value.size()), tuple(value.stride()), value.dtype, value.device)
        if (index := given.get(id(value))) is not None:
            return Input(index)
        if value.is_conj() or value.is_neg():
            raise OpaqueError("an output is a conjugate or negative view")
        cluster = self._cluster(value)
        if cluster is None:
            return _view_of_input(value, inputs, groups) or Fixed(value)
        memory, begin = self._at[cluster]
        if memory < len(self._alone) and value is self._whole(cluster):
            return Whole(memory)
        form = tuple(value.size()), tuple(value.stride())
        offset = _elements(begin, value.dtype) + int(value.storage_offset())
        return Part(memory, *form, offset, value.dtype)

    def _whole(self, cluster: int) -> torch.Tensor | None:
        """Return the output, the first one, that its storage has just enough bytes for."""
        members = (self._outputs[index] for index in self._members[cluster])
        return next((each for each in members if extent(each) == storage_of(each)), None)

    def memories(self, first_slot: int) -> tuple[tuple[Memory, ...], list[Segment], list[int]]:
        """Return what a call allocates for outputs, what lies in which of that, and where it was; 0: that lay apart."""
        if self.tangled:
            raise OpaqueError("outputs overlap with other memory")
        segments = [
            Segment(self._spans[cluster], first_slot + memory, begin)
            for cluster, (memory, begin) in self._at.items()
        ]
        packed = [Memory((size,), (1,), torch.uint8) for _, size in self._packed]
        bound = [self._spans[cluster].start for cluster in self._alone] + [0] * len(packed)
        return (*map(self._memory, self._alone), *packed), segments, bound

    @property
    def scratch(self) -> list[Span]:
        """Where temporaries lay in which no output lies, and that need not stay in place."""
        return [
            span
            for cluster, span in enumerate(self._spans)
            if cluster not in self._members and cluster not in self._held
        ]

    def _memory(self, cluster: int) -> Memory:
        """Return what makes a storage of the size that it had."""
        if (whole := self._whole(cluster)) is not None:
            return Memory(tuple(whole.size()), tuple(whole.stride()), whole.dtype)
        first = self._outputs[self._members[cluster][0]]
        size = storage_of(first).size
        dtype = first.dtype if not size % first.dtype.itemsize else torch.uint8
        return Memory((size // dtype.itemsize,), (1,), dtype)


def _view_of_input(
    value: torch.Tensor, inputs: Sequence[Any], groups: Sequence[tuple[InputGroup, Span]]
) -> Output | None:
    storage = value.untyped_storage().data_ptr()
    for index, each in enumerate(inputs):
        if isinstance(each, torch.Tensor) and each.numel() and each.untyped_storage().data_ptr() == storage:
            offset = _elements(value.data_ptr() - each.data_ptr(), value.dtype)
            keeps = each.dtype == value.dtype
            return View(index, tuple(value.size()), tuple(value.stride()), offset, value.dtype, keeps)
    if any(span.start <= value.data_ptr() < span.end for _, span in groups):
        raise OpaqueError("an output shares memory with an input in a way that cannot be told")
    return None


def _elements(size: int, dtype: torch.dtype) -> int:
    itemsize: int = dtype.itemsize
    elements, rest = divmod(size, itemsize)
    if rest:
        raise OpaqueError("an output begins within an element")
    return elements
