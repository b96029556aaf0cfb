"""From what a capture saw to a graph that can be bound anywhere: which slots there are, and which words follow each of them.

A slot is a group of inputs, the storage of outputs (see `alias_sets`), or a piece of what no output lies in and a node has an address in.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import MemoryType
from pygraphd.client.backend.errors import UnfitError
from pygraphd.client.recording.alias_sets import Clusters
from pygraphd.client.recording.false_pointers import OTHERWISE, Moved, UnclearError, false_addresses
from pygraphd.client.recording.output_reserves import Room
from pygraphd.client.replay.addresses import extent
from pygraphd.client.replay.exec_cache import Executables
from pygraphd.client.replay.graph_exec import InputGroup, Slots
from pygraphd.client.replay.layout import Layout, Memory
from pygraphd.client.replay.native.ffi import helper
from pygraphd.client.replay.node_params import TABLES, OpaqueError, Parameters
from pygraphd.client.replay.outputs import Outputs
from pygraphd.client.replay.relocation_table import (
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
    scan,
)
from pygraphd.client.replay.replay import Device, Replay
from pygraphd.client.replay.rng import Ticket, generators_in

if TYPE_CHECKING:
    from collections.abc import Collection

    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.replay.relocation_table import Table


SCRATCH = Share(count=32, least=4 << 20)
"""Memory in which no output lies comes from the allocator in pieces, as small as the host's time for so many allows."""
LEAST_SCRATCH = (1 << 20) + BLOCK
"""Bytes of a piece at least: PyTorch gives out 1 MiB and less between small tensors, so that any that is kept would move it at the next call.

Nearly all nodes of a graph have addresses in its scratch, and would be written.
"""
WITNESSES = 2
"""Further captures of a call, at most, that are to tell what is an address."""


NOTHING = "it launches nothing"
OWN_MEMORY = "it holds an operator that nobody vouches for (PYGRAPH_GRAPH_OPS), and works on memory from outside of the call"


class Pool(Protocol):
    """Memory that a capture has allocated from."""

    def release(self) -> None:
        """Give back what is free."""


@dataclass(slots=True)
class Capture:
    """What a capture saw. The outputs lie where the graph, a CUgraph, writes them.

    `allocations` are all that were made during the capture, dead or alive; `held` are those that are alive and are nobody's
    output, and that the graph may read again. `pool` keeps the memory of all of them. `rooms` are those that it was captured with,
    on a `ground` of so many bytes, and `made` is where what Inductor's code has allocated begins, in its order.
    """

    graph: int
    outputs: list[Any]
    allocations: tuple[Span, ...]
    held: tuple[Span, ...] = ()
    as_tuple: bool = True
    ticket: Ticket | None = None
    pool: Pool | None = None
    rooms: tuple[Room, ...] = ()
    ground: int = 0
    made: tuple[int, ...] = ()

    @property
    def spans(self) -> list[Span]:
        """All that was allocated during the capture, joined where it overlaps."""
        return merge(self.allocations)

    @property
    def bytes(self) -> int:
        """How much memory was allocated during the capture, but for what was used again."""
        return sum(span.size for span in self.spans)

    def places(self, device: torch.device) -> list[torch.Tensor]:
        """Return the memory that the capture worked on and that nobody holds, as 64-bit integers."""
        spans = [span for span in self.spans if span not in self.held]
        pieces = [torch_private.memory_at(span.start, blocks(span.size) * BLOCK, device) for span in spans]
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
    elsewhere: Elsewhere | None = None,
    facts: GraphFacts = GraphFacts(),  # noqa: B008 - it is frozen
) -> Built:
    """Make a replay of a capture of `inputs`, with `staged` ones given by their buffers; `note` is told what fails later.

    `elsewhere` captures the call once more, if it has to be told what is an address (None: what looks like one is). Takes over the capture's graph and
    ticket; its memory stays until it is let go. Raises `OpaqueError`, `UnfitError`, `DriverError` or what `elsewhere` does; then nothing is left of it.
    """
    try:
        if not facts.is_vouched:
            _refuse_own_memory(driver, capture, inputs, staged)
        return _build(driver, capture, inputs, staged, note, elsewhere, facts.saved)
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
    elsewhere: Elsewhere | None,
    saved: frozenset[int],
) -> Built:
    device = _device(inputs, capture.outputs)
    groups = input_groups(inputs, staged)
    clusters = Clusters(capture, saved)
    given = {id(each): index for index, each in reversed([*enumerate(inputs)])}
    outputs = tuple(clusters.output(output, inputs, given, groups) for output in capture.outputs)
    memories, memory_segments, bound = clusters.memories(len(groups))
    parameters = Parameters(driver, capture.graph)
    if not len(parameters):
        raise OpaqueError(NOTHING)
    segments = [Segment(span, slot) for slot, (_, span) in enumerate(groups)]
    segments += memory_segments
    first = len(groups) + len(memories)
    segments += [Segment(span, slot) for slot, span in enumerate(clusters.scratch, start=first)]
    known = [*segments, *[Segment(span, IN_PLACE) for span in capture.held]]
    _refuse_tables(driver, outside(parameters.words, parameters.transforms, known))
    slots = first + len(clusters.scratch)
    table = scan(parameters.words, parameters.candidates, known, slots)
    if table.doubtful and elsewhere is not None:
        false = _false(driver, parameters, table, _First(capture, inputs, groups), elsewhere)
        if false:
            table = scan(parameters.words, parameters.candidates, known, slots, false)
    table, sizes = in_pieces(table, first, clusters.scratch, SCRATCH)
    memories = (*memories, *(Memory((max(size, LEAST_SCRATCH),), (1,), torch.uint8) for size in sizes))
    bound += [0] * len(sizes)  # what is in a piece lay apart: no address is right for all of it
    layout = Layout(
        tuple(group for group, _ in groups),
        memories,
        Outputs(outputs, [memory.dtype for memory in memories], as_tuple=capture.as_tuple),
        tuple(staged.items()),
        tuple(generators_in(inputs).items()),
        clusters.saves_together,
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
    moving = Slots(layout.groups, table, bases)
    executables = Executables(driver, capture.graph, parameters, moving, means.bulk, means.stream(), note)
    try:
        replay = Replay(driver, capture.graph, executables, layout, means, capture.ticket)
    except BaseException:
        executables.close()
        raise
    return Built(replay, _unseen(table, layout), device, len(parameters))


def _refuse_own_memory(
    driver: Driver, capture: Capture, inputs: Sequence[Any], staged: Mapping[int, torch.Tensor]
) -> None:
    """Raise OpaqueError if a graph works on memory that is neither an input nor allocated and given back within the call.

    An operator that nobody vouches for may replace a workspace of its own between two calls, and the graph would go on to write there.
    """
    parameters = Parameters(driver, capture.graph)
    spans = [*(span for _, span in input_groups(inputs, staged)), *capture.allocations]
    known = [Segment(span, IN_PLACE) for span in spans]
    others = outside(parameters.words, parameters.candidates, known)
    if capture.held or any(driver.memory_type(each) is MemoryType.DEVICE for each in others):
        raise OpaqueError(OWN_MEMORY)


def _refuse_tables(driver: Driver, words: Collection[int]) -> None:
    """Raise OpaqueError if any of what transforms are given, beside memory of the call, lies on the device: tables of a plan."""
    if any(driver.memory_type(each) is MemoryType.DEVICE for each in words):
        raise OpaqueError(TABLES)


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
                if len(seconds) == WITNESSES:
                    raise


def _false_by(second: Second, parameters: Parameters, table: Table, first: _First) -> frozenset[int]:
    """Return which words only look like addresses, in view of one other capture."""
    words = parameters.of_another(second.capture.graph, table.doubtful)
    if words is None:
        raise UnfitError(OTHERWISE)
    given = [Span(each.data_ptr(), each.data_ptr() + each.nbytes) for each in second.places]
    spans = merge((*given, *second.capture.spans, *second.capture.held))
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
        torch_private.allocator(device),
        helper.bulk(note),
        torch_private.current_stream(device),
        torch_private.stream_watch(device),
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
