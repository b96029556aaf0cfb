"""The allocations of a capture, joined where they overlap, and what each output of it is made of.

During a capture the allocator gives dead temporaries' memory to later ones, so an output may lie where a larger temporary was.
All allocations that overlap form a cluster, and a cluster moves as one: then no write of any kernel leaves its memory. Clusters
in which nothing lies but outputs that may be together are packed into a few allocations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.extents import extent
from pygraphd.client.outputs import Empty, Fixed, Input, Part, View, Whole
from pygraphd.client.parameters import OpaqueError
from pygraphd.client.relocation import BLOCK, Segment, Share, Span, blocks, find, merge, pack
from pygraphd.client.replay import Memory

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from pygraphd.client.binding import InputGroup
    from pygraphd.client.outputs import Output
    from pygraphd.client.recording import Capture


SMALL_BYTES = 64 << 10
TOGETHER = Share(count=32, least=4 << 20, most=16 << 20)
"""What is together comes from the allocator in pieces, as small as the host's time for so many allows: these fit into gaps.

In one piece, the gradients of ResNet-50 (102 MB) were reserved twice: something small had been put where they were to go again.
"""
SMALL_TOGETHER = Share(count=1, least=1 << 20, most=1 << 20)
"""The same for outputs of `SMALL_BYTES` at most: who keeps one of a bias keeps its piece."""


class Clusters:
    """The allocations of a capture, joined where they overlap, and which outputs lie in which."""

    def __init__(self, capture: Capture, together: Collection[int]) -> None:
        self._spans = merge((*capture.allocations, *capture.held))
        self._held = {find(self._spans, span.start) for span in capture.held}
        if any(span not in self._spans for span in capture.held):
            raise OpaqueError("memory that must stay in place was used for something else before")
        self._members: dict[int, list[torch.Tensor]] = {}
        apart: set[int] = set()
        for index, value in enumerate(capture.outputs):
            if (cluster := self._cluster(value)) is not None:
                self._members.setdefault(cluster, []).append(value)
                if index not in together:
                    apart.add(cluster)
        if not self._held.isdisjoint(self._members):
            raise OpaqueError("an output lies in memory that must stay in place")
        self._groups = self._in_groups([cluster for cluster in self._members if cluster not in apart])
        grouped = {cluster for group in self._groups for cluster in group}
        self._order = {
            cluster: order
            for order, cluster in enumerate(each for each in self._members if each not in grouped)
        }
        self._in_group: dict[int, tuple[int, int]] = {}
        """Of clusters that are together, which memory they are in and at which byte."""
        for memory, group in enumerate(self._groups, start=len(self._order)):
            offsets, _ = pack([self._spans[cluster] for cluster in group])
            self._in_group |= {
                cluster: (memory, offset) for cluster, offset in zip(group, offsets, strict=True)
            }

    def _in_groups(self, clusters: Iterable[int]) -> list[list[int]]:
        """Return which clusters are to be together: of one type, small ones apart from others, and no cluster alone.

        Autograd copies a gradient that lies otherwise than its parameter, as a transposed one may, and lets go of it at once. What
        lay beside it would keep its memory. Large ones are alone, so that the copy of the next one may lie where one was.
        """
        alike: dict[tuple[torch.dtype, bool, bool], list[int]] = {}
        for cluster in clusters:
            is_small = self._size(cluster) <= SMALL_BYTES
            as_written = all(member.is_contiguous() for member in self._members[cluster])
            if is_small or as_written:
                alike.setdefault((self._type([cluster]), is_small, as_written), []).append(cluster)
        groups: list[list[int]] = []
        for (_, is_small, _), those in alike.items():
            pieces = (SMALL_TOGETHER if is_small else TOGETHER).pieces([*map(self._size, those)])
            groups += ([those[number] for number in piece] for piece in pieces)
        return [group for group in groups if len(group) > 1]

    def _size(self, cluster: int) -> int:
        return blocks(self._spans[cluster].size) * BLOCK

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
        cluster = self._cluster(value)
        if cluster is not None:
            return self._in_cluster(cluster, value)
        return _view_of_input(value, inputs, groups) or Fixed(value)

    def _in_cluster(self, cluster: int, value: torch.Tensor) -> Output:
        memory, begin = self._in_group.get(cluster) or (self._order[cluster], 0)
        if cluster in self._order and self._whole(cluster) is not None:
            return Whole(memory)
        offset = _elements(begin + value.data_ptr() - self._spans[cluster].start, value.dtype)
        return Part(memory, tuple(value.size()), tuple(value.stride()), offset, value.dtype)

    def _whole(self, cluster: int) -> torch.Tensor | None:
        """Return the output that takes all of a cluster, up to what the allocator rounds it up to."""
        value, *others = self._members[cluster]
        span, taken = self._spans[cluster], extent(value)
        fills = span.start == taken.start and blocks(taken.size) == blocks(span.size)
        return value if fills and not others else None

    def memories(self, first_slot: int) -> tuple[tuple[Memory, ...], list[Segment], list[int]]:
        """Return what a call allocates, and where it was.

        That is one allocation for each cluster with outputs, and one for each group that is together.
        """
        memories: list[Memory] = []
        segments: list[Segment] = []
        bound: list[int] = []
        for cluster, order in self._order.items():
            span = self._spans[cluster]
            memories.append(self._memory(cluster, span))
            segments.append(Segment(span, first_slot + order))
            bound.append(span.start)
        for group in self._groups:
            spans, dtype = [self._spans[each] for each in group], self._type(group)
            offsets, size = pack(spans)
            slot = first_slot + len(memories)
            segments += [Segment(span, slot, offset) for span, offset in zip(spans, offsets, strict=True)]
            memories.append(Memory((size // dtype.itemsize,), (1,), dtype))
            bound.append(0)  # they lay apart: no address is right for all of them
        return tuple(memories), segments, bound

    @property
    def scratch(self) -> list[Span]:
        """Where temporaries lay in which no output lies, and that need not stay in place."""
        return [
            span
            for cluster, span in enumerate(self._spans)
            if cluster not in self._members and cluster not in self._held
        ]

    def _type(self, clusters: Iterable[int]) -> torch.dtype:
        # Of the type that saves most outputs from being told theirs.
        members = itertools.chain.from_iterable(self._members[cluster] for cluster in clusters)
        return Counter(member.dtype for member in members).most_common(1)[0][0]

    def _memory(self, cluster: int, span: Span) -> Memory:
        whole = self._whole(cluster)
        if whole is not None:
            return Memory(tuple(whole.size()), tuple(whole.stride()), whole.dtype)
        # Whole blocks, which can be seen as elements of any type.
        dtype = self._type([cluster])
        return Memory((blocks(span.size) * BLOCK // dtype.itemsize,), (1,), dtype)


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
