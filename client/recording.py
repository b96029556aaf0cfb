"""From what a capture saw to a graph that can be bound anywhere: slots, clusters, how each output is made.

During a capture the allocator gives dead temporaries' memory to later ones, so an output may lie where a larger temporary was.
All allocations that overlap form a cluster, and a cluster moves as one: then no write of any kernel leaves its memory. Clusters
in which nothing lies but outputs that may be together are packed into a few allocations, and so is all that is no output's and that a node has an address in.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client import _torch
from pygraphd.client.binding import Binding, InputGroup, UnfitError
from pygraphd.client.bulk import helper
from pygraphd.client.executables import Bindings
from pygraphd.client.outputs import Empty, Fixed, Input, Outputs, Part, View, Whole
from pygraphd.client.parameters import OpaqueError, Parameters
from pygraphd.client.relocation import (
    BLOCK,
    IN_PLACE,
    Segment,
    Share,
    Span,
    alignment,
    blocks,
    find,
    in_pieces,
    merge,
    outside,
    pack,
    scan,
)
from pygraphd.client.replay import Device, Layout, Memory, Replay, Ticket
from pygraphd.client.witness import OTHERWISE, Moved, UnclearError, false_addresses

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pygraphd.client.driver import Driver
    from pygraphd.client.outputs import Output
    from pygraphd.client.relocation import Table


SMALL_BYTES = 64 << 10
TOGETHER = Share(count=32, least=4 << 20, most=16 << 20)
"""What is together comes from the allocator in pieces, as small as the host's time for so many allows: these fit into gaps.

In one piece, the gradients of ResNet-50 (102 MB) were reserved twice: something small had been put where they were to go again.
"""
SMALL_TOGETHER = Share(count=1, least=1 << 20, most=1 << 20)
"""The same for outputs of `SMALL_BYTES` at most: who keeps one of a bias keeps its piece."""
SCRATCH = Share(count=32, least=4 << 20)
"""The same for memory in which no output lies."""
SECONDS = 2
"""Further captures of a call, at most, that are to tell what is an address."""


class Pool(Protocol):
    """Memory that a capture has allocated from."""

    def release(self) -> None:
        """Give back what is free."""


@dataclass(slots=True)
class Capture:
    """What a capture saw. The outputs lie where the graph, a CUgraph, writes them.

    `allocations` are all that were made during the capture, dead or alive; `held` are those that are alive and are nobody's
    output, and that the graph may read again. `pool` keeps the memory of all of them.
    """

    graph: int
    outputs: list[Any]
    allocations: tuple[Span, ...]
    held: tuple[Span, ...] = ()
    as_tuple: bool = True
    ticket: Ticket | None = None
    pool: Pool | None = None

    @property
    def bytes(self) -> int:
        """How much memory was allocated during the capture, but for what was used again."""
        return sum(span.size for span in merge(self.allocations))

    def places(self, device: torch.device) -> list[torch.Tensor]:
        """Return the memory that the capture worked on and that nobody holds, as 64-bit integers."""
        spans = [span for span in merge(self.allocations) if span not in self.held]
        pieces = [_torch.memory_at(span.start, blocks(span.size) * BLOCK, device) for span in spans]
        return [each.view(torch.int64) for each in pieces]

    def let_go(self) -> None:
        """Give back the memory that was allocated during the capture, but for what is held."""
        self.outputs.clear()  # before the pool: what still lies in it would keep its memory
        pool, self.pool = self.pool, None
        if pool is not None:
            pool.release()

    def discard(self, driver: Driver) -> None:
        """Give back everything."""
        try:
            driver.destroy_graph(self.graph)
        finally:
            if self.ticket is not None:
                self.ticket.close()
            self.let_go()


# --- building ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Second:
    """Another capture of the same call, while the memory of the first one stays: with its inputs, and their memory."""

    capture: Capture
    inputs: Sequence[Any]
    places: Sequence[torch.Tensor]


Elsewhere = Callable[[int], Second]
"""Captures a call once more, beside so many captures of it that have their memory still."""


def build(
    driver: Driver,
    capture: Capture,
    inputs: Sequence[Any],
    staged: Mapping[int, torch.Tensor],
    note: Callable[[str], None],
    together: Collection[int] = (),
    elsewhere: Elsewhere | None = None,
) -> Built:
    """Make a replay of a capture of `inputs`, with `staged` ones given by their buffers; `note` is told what fails later.

    Outputs that are `together`, by index, share allocations: making one for each takes most of the host's time of a call.
    `elsewhere` captures the call once more, if it has to be told what is an address (None: what looks like one is). Takes over the capture's graph and
    ticket; its memory stays until it is let go. Raises `OpaqueError`, `UnfitError`, `DriverError` or what `elsewhere` does; then nothing is left of it.
    """
    try:
        return _build(driver, capture, inputs, staged, note, together, elsewhere)
    except BaseException:
        capture.discard(driver)
        raise


@dataclass(frozen=True, slots=True)
class Built:
    """A replay, and the inputs that show up in none of its nodes."""

    replay: Replay
    unseen: frozenset[int]
    device: torch.device
    nodes: int


def _build(
    driver: Driver,
    capture: Capture,
    inputs: Sequence[Any],
    staged: Mapping[int, torch.Tensor],
    note: Callable[[str], None],
    together: Collection[int],
    elsewhere: Elsewhere | None,
) -> Built:
    device = _device(inputs, capture.outputs)
    groups = input_groups(inputs, staged)
    clusters = _Clusters(capture, together)
    given = {id(each): index for index, each in reversed([*enumerate(inputs)])}
    outputs = tuple(clusters.output(output, inputs, given, groups) for output in capture.outputs)
    memories, memory_segments, bound = clusters.memories(len(groups))
    parameters = Parameters(driver, capture.graph)
    segments = [Segment(span, slot) for slot, (_, span) in enumerate(groups)]
    segments += memory_segments
    first = len(groups) + len(memories)
    segments += [Segment(span, slot) for slot, span in enumerate(clusters.scratch, start=first)]
    known = [*segments, *[Segment(span, IN_PLACE) for span in capture.held]]
    slots = first + len(clusters.scratch)
    table = scan(parameters.words, parameters.candidates, known, slots)
    if table.doubtful and elsewhere is not None:
        false = _false(driver, parameters, table, _First(capture, inputs, groups), elsewhere)
        if false:
            table = scan(parameters.words, parameters.candidates, known, slots, false)
    table, sizes = in_pieces(table, first, clusters.scratch, SCRATCH)
    memories = (*memories, *(Memory((size,), (1,), torch.uint8) for size in sizes))
    bound += [0] * len(sizes)  # what is in a piece lay apart: no address is right for all of it
    layout = Layout(
        tuple(group for group, _ in groups),
        memories,
        Outputs(outputs, [memory.dtype for memory in memories], as_tuple=capture.as_tuple),
        tuple(staged.items()),
    )
    bases = [span.start for _, span in groups] + bound
    means = replay_device(device, note)
    if capture.ticket is not None:
        others = functools.partial(outside, parameters.words, parameters.candidates, segments)
        if not capture.ticket.learn(others, means.stream()):
            # A recording that draws no random numbers does not wait for those that do, from its trial on.
            capture.ticket.close()
            capture.ticket = None
    parameters.candidates.clear()  # one for each argument, and of use only to the search
    binding = Binding(driver, capture.graph, parameters, table, layout.groups, bases, means.bulk)
    bindings = Bindings(binding, note)
    try:
        replay = Replay(driver, capture.graph, bindings, layout, means, capture.ticket)
    except BaseException:
        bindings.close()
        raise
    return Built(replay, _unseen(table, layout), device, len(parameters))


@dataclass(frozen=True, slots=True)
class _First:
    """The capture that a recording is made of."""

    capture: Capture
    inputs: Sequence[Any]
    groups: Sequence[tuple[InputGroup, Span]]

    def moved_to(self, second: Second) -> list[Moved]:
        """Return where all that it worked on is in another capture; raises `UnfitError` if that cannot be told."""
        made, again = self.capture.allocations, second.capture.allocations
        if [span.size for span in made] != [span.size for span in again]:
            raise UnfitError(OTHERWISE)
        moved = [Moved(span, to.start) for span, to in zip(made, again, strict=True)]
        for group, span in self.groups:
            mine, other = self.inputs[group.members[0][0]], second.inputs[group.members[0][0]]
            moved.append(Moved(span, span.start + other.data_ptr() - mine.data_ptr()))
            # A kernel may be given the beginning of a storage, which is another one in the second capture.
            begin, there = (each.untyped_storage().data_ptr() for each in (mine, other))
            moved.append(Moved(Span(begin, begin), there))
        return moved


def _false(
    driver: Driver, parameters: Parameters, table: Table, first: _First, elsewhere: Elsewhere
) -> frozenset[int]:
    """Return which words only look like addresses, in view of a second capture, or if need be of a third: nothing is left of these."""
    seconds: list[Second] = []
    with contextlib.ExitStack() as stack:
        while True:
            # One that could not tell keeps its memory until the end: the next one is to lie elsewhere.
            seconds.append(elsewhere(1 + len(seconds)))
            stack.callback(seconds[-1].capture.discard, driver)
            try:
                return _false_by(seconds[-1], parameters, table, first)
            except UnclearError:
                if len(seconds) == SECONDS:
                    raise


def _false_by(second: Second, parameters: Parameters, table: Table, first: _First) -> frozenset[int]:
    """Return which words only look like addresses, in view of one other capture."""
    words = parameters.of_another(second.capture.graph, table.doubtful)
    if words is None:
        raise UnfitError(OTHERWISE)
    given = [Span(each.data_ptr(), each.data_ptr() + each.nbytes) for each in second.places]
    spans = merge((*given, *second.capture.allocations, *second.capture.held))
    moved = functools.partial(first.moved_to, second)
    return false_addresses(table.doubtful, parameters.words, words, spans, moved)


def _unseen(table: Table, layout: Layout) -> frozenset[int]:
    slots = table.unseen()
    groups = [group for slot, group in enumerate(layout.groups) if slot in slots]
    return frozenset(index for group in groups for index, _ in group.members)


def _device(inputs: Sequence[Any], outputs: Sequence[Any]) -> torch.device:
    devices = {value.device for value in (*inputs, *outputs) if isinstance(value, torch.Tensor)}
    if len(devices) != 1:
        raise OpaqueError(f"it works on {len(devices)} devices")
    return devices.pop()


def replay_device(device: torch.device, note: Callable[[str], None]) -> Device:
    """Return what replaying on a device needs of torch; `note` is told what is slower than it might be."""
    return Device(
        _torch.allocator(device),
        helper.bulk(note),
        _torch.current_stream(device),
        _torch.stream_watch(device),
        _torch.empty_cache,
    )


Moving = Sequence[tuple[InputGroup, Span]]
"""Inputs that can move, of `input_groups`."""


def input_groups(inputs: Sequence[Any], staged: Collection[int]) -> list[tuple[InputGroup, Span]]:
    """Return the inputs that can move, those that overlap as one group, each with the addresses that belong to it."""
    moving = {
        index: extent(value)
        for index, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and index not in staged and value.numel()
    }
    spans = merge(moving.values())
    members: list[list[int]] = [[] for _ in spans]
    for index, each in moving.items():
        position = find(spans, each.start)
        assert position is not None
        members[position].append(index)
    widened = _widen(spans, [inputs[each[0]] for each in members])
    return [
        (_group(indices, moving, span.start), span) for indices, span in zip(members, widened, strict=True)
    ]


def _group(indices: list[int], extents: Mapping[int, Span], base: int) -> InputGroup:
    members = tuple((index, extents[index].start - base) for index in indices)
    return InputGroup(members, max(alignment(extents[index].start) for index in indices), base)


def _widen(spans: list[Span], first_members: list[torch.Tensor]) -> list[Span]:
    """Give each group the whole of its storage if no other group lies in there.

    A kernel may be handed the beginning of a storage and find its input from there.
    """
    widened: list[Span] = []
    for index, (span, tensor) in enumerate(zip(spans, first_members, strict=True)):
        storage = tensor.untyped_storage()
        # Without its last byte: where an allocation ends another one may begin, and what is handed an address there may mean that one.
        last = storage.data_ptr() + storage.nbytes() - 1
        start, end = min(storage.data_ptr(), span.start), max(last, span.end)
        free_before = index == 0 or max(widened[-1].end, spans[index - 1].end) <= start
        free_after = index + 1 == len(spans) or end <= spans[index + 1].start
        widened.append(Span(start, end) if free_before and free_after else span)
    return widened


def extent(tensor: torch.Tensor) -> Span:
    """Return the addresses from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return Span(start, start + (last + 1) * tensor.element_size())


class _Clusters:
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
