"""Makes a replay of a capture: finds its segments, and the words of the node parameters that hold addresses in each.

A segment is a group of inputs that overlap, an allocation for outputs (see `alias_sets`), or a piece of scratch: memory in which
no output lies and that a node refers to.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import Driver, MemoryType
from pygraphd.client.backend.errors import NotRelocatableError
from pygraphd.client.recording.alias_sets import AliasSets, InputGroups, input_groups
from pygraphd.client.recording.false_pointers import CapturedCall, Recapture, find_false_pointers
from pygraphd.client.replay.exec_cache import Executables
from pygraphd.client.replay.layout import Layout, Memory
from pygraphd.client.replay.native.ffi import helper
from pygraphd.client.replay.node_params import Parameters
from pygraphd.client.replay.outputs import Outputs, View
from pygraphd.client.replay.relocation_table import (
    BLOCK,
    IN_PLACE,
    RelocationTable,
    SegmentRange,
    Share,
    in_pieces,
    outside,
    scan,
)
from pygraphd.client.replay.replay import Device, Replay
from pygraphd.client.replay.rng import generators_in
from pygraphd.client.replay.segments import moving_segments
from pygraphd.client.replay.single_kernel import SingleKernel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.client.recording.capture import Capture

SCRATCH = Share(count=32, least=4 << 20)
"""Scratch is allocated in about 32 pieces of at least 4 MiB: a single one would need a gap of its whole size, and many cost host time."""
IN_ONE = Share(count=1, least=0)
"""Scratch of a graph with sizes is one piece, which all sizes allocate alike; see `replay/scratch.py`."""
MIN_SCRATCH_BYTES = (1 << 20) + BLOCK
"""Bytes of the smallest piece of scratch. PyTorch allocates up to 1 MiB among small tensors, where any tensor that is kept takes its place.

The piece would move at the next call, and nearly all nodes would be written, since nearly all have addresses in scratch.
"""

LAUNCHES_NOTHING = "it launches nothing"
KEPT_MEMORY = "it holds an operator that nobody vouches for (PYGRAPH_GRAPH_OPS), and memory that it allocates outlives the call"
OWN_MEMORY = "it holds an operator that nobody vouches for (PYGRAPH_GRAPH_OPS), and works on memory from outside of the call"


@dataclass(frozen=True, slots=True)
class Built:
    """A replay that is not yet verified."""

    replay: Replay
    device: torch.device
    nodes: int


def build(
    driver: Driver,
    first: CapturedCall,
    note: Callable[[str], None],
    recapture: Recapture | None = None,
    facts: GraphFacts = GraphFacts(),  # noqa: B008 - it is frozen
) -> Built:
    """Make a replay of a captured call; `note` is called with later failures.

    `recapture` captures the call again where false pointers are possible. Without it, every word that looks like an address counts as one.
    Takes over graph and cursor of the capture, whose memory stays until `Capture.let_go`. Raises `NotRelocatableError`, `FallbackError`,
    `DriverError` or what `recapture` raises; then the capture is discarded.
    """
    try:
        if not facts.is_vouched:
            _refuse_own_memory(driver, first, facts)
        return _build(driver, first, note, recapture, facts)
    except BaseException:
        # Interrupts, too: the capture was handed over, and nobody else would destroy its graph.
        first.capture.discard(driver)
        raise


def _build(
    driver: Driver,
    first: CapturedCall,
    note: Callable[[str], None],
    recapture: Recapture | None,
    facts: GraphFacts,
) -> Built:
    capture, inputs = first.capture, first.inputs
    devices = {value.device for value in (*inputs, *capture.outputs) if isinstance(value, torch.Tensor)}
    if len(devices) != 1:
        raise NotRelocatableError(f"it works on {len(devices)} devices")
    (device,) = devices
    parameters = Parameters(driver, capture.graph, may_reduce=any(facts.collectives))
    groups = input_groups(inputs)
    sets = AliasSets(capture, facts.saved)
    outputs = sets.outputs(inputs, groups)
    memories, segments, bases = sets.memories(len(groups))
    if not len(parameters):
        raise NotRelocatableError(LAUNCHES_NOTHING)
    segments = [*(SegmentRange(span, number) for number, (_, span) in enumerate(groups)), *segments]
    first_scratch = len(groups) + len(memories)
    # Scratch comes last: `in_pieces` joins these segments, and all others keep their numbers.
    segments += [SegmentRange(span, number) for number, span in enumerate(sets.scratch, start=first_scratch)]
    # Known to the search as well: where a segment ends such memory may begin, and its address must not move.
    in_place = [SegmentRange(span, IN_PLACE) for span in capture.held]
    table = _relocation_table(driver, parameters, [*segments, *in_place], first, groups, recapture)
    has_sizes = any(type(value) is int for value in inputs)
    table, sizes = in_pieces(table, first_scratch, sets.scratch, IN_ONE if has_sizes else SCRATCH)
    memories = (*memories, *(Memory((max(size, MIN_SCRATCH_BYTES),), (1,), torch.uint8) for size in sizes))
    layout = Layout(
        tuple(group for group, _ in groups),
        memories,
        Outputs(outputs, [memory.dtype for memory in memories], as_tuple=capture.as_tuple),
        tuple(generators_in(inputs).items()),
        sets.saves_together,
        len(memories) - 1 if has_sizes and sizes else None,
    )
    means = replay_device(device)
    _learn_random_state(capture, parameters, segments, means)
    parameters.candidates.clear()  # one for each argument, and of use only to the search
    viewed = {each.index for each in outputs if isinstance(each, View)}
    bound = [*bases, *[0] * len(sizes)]  # 0: a piece is in no capture
    moving = moving_segments(layout.groups, table, bound, viewed)
    if parameters.is_single_kernel:
        executables: Executables | SingleKernel = SingleKernel(driver, parameters, moving, means.ops)
    else:
        executables = Executables(driver, capture.graph, parameters, moving, means.ops, means.stream(), note)
    try:
        replay = Replay(driver, capture.graph, executables, layout, means, capture.cursor)
    except BaseException:
        executables.close()
        raise
    return Built(replay, device, len(parameters))


def _refuse_own_memory(driver: Driver, first: CapturedCall, facts: GraphFacts) -> None:
    """Raise NotRelocatableError for memory from outside the call: an operator may replace its own workspace between two calls."""
    parameters = Parameters(driver, first.capture.graph, may_reduce=any(facts.collectives))
    spans = [*(span for _, span in input_groups(first.inputs)), *first.capture.allocations]
    known = [SegmentRange(span, IN_PLACE) for span in spans]
    others = outside(parameters.words, parameters.candidates, known)
    if first.capture.held:
        raise NotRelocatableError(KEPT_MEMORY)
    if any(driver.memory_type(each) is MemoryType.DEVICE for each in others):
        raise NotRelocatableError(OWN_MEMORY)


def _relocation_table(
    driver: Driver,
    parameters: Parameters,
    segments: Sequence[SegmentRange],
    first: CapturedCall,
    groups: InputGroups,
    recapture: Recapture | None,
) -> RelocationTable:
    """Return which words hold addresses in which segments, without false pointers. Raises `NotRelocatableError` and what `recapture` raises."""
    count = 1 + max((segment.number for segment in segments), default=-1)
    table = scan(parameters.words, parameters.candidates, segments, count)
    # Triton passes parameters one by one, without padding between: such graphs need no second capture.
    if not table.ambiguous or recapture is None:
        return table
    false = find_false_pointers(driver, parameters, table, first, groups, recapture)
    return scan(parameters.words, parameters.candidates, segments, count, false) if false else table


def _learn_random_state(
    capture: Capture, parameters: Parameters, segments: Sequence[SegmentRange], means: Device
) -> None:
    """Have the cursor find the generator's state among the parameters; a recording that draws no random numbers gets no cursor."""
    if capture.cursor is not None:
        others = functools.partial(outside, parameters.words, parameters.candidates, segments)
        if not capture.cursor.learn(others, means.stream()):
            # Its replays, from that of the verification on, do not wait for those that draw.
            capture.cursor.close()
            capture.cursor = None


def replay_device(device: torch.device) -> Device:
    """Return the functions of torch and of the helper for replays on a device."""
    stream, function = torch_private.current_stream(device), torch_private.stream_function(device)
    return Device(torch_private.allocator(device), helper.ops, stream, function)
