"""Inputs of a backward that later memory is laid over, once they are needed no more: *donated* ones, as PyTorch calls them.

Most of what a backward takes are activations that its forward has saved, and that nobody else can see. They are kept side by side, in
one allocation (see `recycling`), and so lies in a capture what stands in for them: in a *stretch*, which the callable lets go of piece by
piece, so that the allocator puts temporaries there, as it does in trees. These move with the stretch then. What the allocator puts an
output into is captured anew as an input that stays.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client import _torch
from pygraphd.client.binding import InputGroup
from pygraphd.client.extents import extent
from pygraphd.client.relocation import BLOCK, MAX_ALIGNMENT, Span, alignment, blocks, find

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pygraphd.client.recording import Capture, Moving

LEAST_BYTES = (1 << 20) + BLOCK
"""Smaller tensors are allocated apart from larger ones, and there is little in them. So much lies beside each stretch, as the allocator
joins what is free side by side."""
WORTH_BYTES = 1 << 30
"""What a call must be able to overwrite: to record takes longer."""
STRETCH_BYTES = 32 << 20
"""What a stretch must have at least."""
ROUNDS = 8
"""How often a call is captured to find out which inputs no output is put into; then none is laid over."""
_MAY_BE_INDICES = frozenset({torch.int32, torch.int64})
"""What stands in for inputs of these types is to hold other indices in the trial, see `verification`, and so has to be there then."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Inputs side by side: `members` as (index, bytes from where it begins)."""

    members: tuple[tuple[int, int], ...]
    size: int

    def spans(self, start: int) -> Iterator[tuple[int, Span]]:
        """Yield each input and where it lies, if the stretch begins at `start`."""
        ends = [*(offset for _, offset in self.members[1:]), self.size]
        for (index, offset), end in zip(self.members, ends, strict=True):
            yield index, Span(start + offset, start + end)


@dataclass(frozen=True, slots=True)
class Donation:
    """What a capture lays other memory over: stretches, but for inputs in them that are `kept`."""

    stretches: tuple[Stretch, ...] = ()
    kept: frozenset[int] = frozenset()
    rooms: tuple[int, ...] = ()
    """How large outputs are, in bytes: of just this size there is room, so that they are not put into inputs."""

    @property
    def members(self) -> frozenset[int]:
        """All inputs in stretches."""
        return frozenset(index for stretch in self.stretches for index, _ in stretch.members)

    @property
    def overwritten(self) -> frozenset[int]:
        """The inputs in which something else is left."""
        return self.members - self.kept

    @property
    def is_worth_it(self) -> bool:
        """Whether there is enough to be overwritten."""
        spans = (each for stretch in self.stretches for each in stretch.spans(0))
        return sum(span.size for index, span in spans if index not in self.kept) >= WORTH_BYTES

    @property
    def bytes(self) -> int:
        """How much memory it takes in a capture; 0 for none."""
        sizes = [*(stretch.size for stretch in self.stretches), *self.rooms]
        return sum(size + LEAST_BYTES for size in sizes)

    def keeping(self, occupied: frozenset[int], capture: Capture) -> Donation:
        """Return the same for the next capture, in view of what the last one has put into these inputs.

        There is room for each output, and from then on for another one like each that was put into an input all the same, since a
        temporary had taken its room.
        """
        kept, places = self.kept | occupied, taken(capture)
        outputs = [each for each in capture.outputs if isinstance(each, torch.Tensor)]
        if self.rooms:
            outputs = [each for each in outputs if find(places, each.data_ptr()) is not None]
        sizes = (blocks(each.nbytes) * BLOCK for each in outputs)
        rooms = (*self.rooms, *sorted(size for size in sizes if size >= LEAST_BYTES))
        stretches = tuple(
            each for each in self.stretches if any(index not in kept for index, _ in each.members)
        )
        return Donation(stretches, kept, rooms)


NONE = Donation()


def are_large_enough(inputs: Sequence[Any], named: Collection[int]) -> bool:
    """Whether the `named` inputs have enough bytes in all, wherever they lie."""
    size: int = sum(inputs[index].nbytes for index in named if isinstance(inputs[index], torch.Tensor))
    return size >= WORTH_BYTES


def donation_of(inputs: Sequence[Any], named: Collection[int]) -> Donation:
    """Return what may be laid over in a call: of the `named` inputs large ones, side by side."""
    if not are_large_enough(inputs, named):
        return NONE
    places = sorted((extent(inputs[index]).start, index) for index in named if _fills_blocks(inputs[index]))
    stretches = tuple(_stretches(inputs, [index for _, index in places]))
    found = Donation(tuple(each for each in stretches if each.size >= STRETCH_BYTES))
    return found if found.is_worth_it and not _is_shared(inputs, found) else NONE


def _fills_blocks(tensor: Any) -> bool:
    """Whether nothing but a tensor's elements lies in the allocator's blocks that it takes, and what stands in for it may hold anything."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype in _MAY_BE_INDICES:
        return False
    span = extent(tensor)
    is_whole = span.size == tensor.nbytes >= LEAST_BYTES and not span.size % BLOCK
    return bool(is_whole) and alignment(span.start) == MAX_ALIGNMENT


def _stretches(inputs: Sequence[Any], ordered: Iterable[int]) -> Iterator[Stretch]:
    """Yield what lies side by side in one storage, of inputs in the order of their addresses."""
    members: list[tuple[int, int]] = []
    begin, span, storage = 0, Span(0, 0), 0
    for index in ordered:
        mine, own = extent(inputs[index]), inputs[index].untyped_storage().data_ptr()
        if members and (mine.start, own) != (span.end, storage):
            yield Stretch(tuple(members), span.end - begin)
            members = []
        begin = begin if members else mine.start
        members.append((index, mine.start - begin))
        span, storage = mine, own
    if members:
        yield Stretch(tuple(members), span.end - begin)


def _is_shared(inputs: Sequence[Any], donation: Donation) -> bool:
    """Whether any other input, or that of another stretch, lies in a stretch, in part at least."""
    taken = sorted(
        Span(_start(inputs, each), _start(inputs, each) + each.size) for each in donation.stretches
    )
    if any(one.end > other.start for one, other in itertools.pairwise(taken)):
        return True
    members = donation.members
    others = [
        extent(each)
        for index, each in enumerate(inputs)
        if isinstance(each, torch.Tensor) and each.numel() and index not in members
    ]
    return any(each.start < span.end and span.start < each.end for each in others for span in taken)


def _start(inputs: Sequence[Any] | Mapping[int, Any], stretch: Stretch) -> int:
    start: int = inputs[stretch.members[0][0]].data_ptr()
    return start


# --- in a capture ------------------------------------------------------------------------------------------------


class StandIns:
    """What is allocated in a capture before the callable runs: what stands in for donated inputs, which it is the only one to hold."""

    def __init__(self, donation: Donation = NONE, shifts: Sequence[int] = ()) -> None:
        """Of these inputs, behind so many bytes each that are in nobody's way."""
        self.donation, self._shifts = donation, shifts
        self._held: list[torch.UntypedStorage] = []
        self.places: dict[int, torch.Tensor] = {}
        """The same memory, held by nobody, by the input's index."""
        guards = len(donation.stretches) + len(donation.rooms)
        self.allocations = bool(guards) + len(shifts) + len(donation.members) + len(donation.rooms) + guards
        """How many allocations that takes."""

    def put(self, inputs: list[Any], device: torch.device) -> None:
        """Put them in the place of the inputs."""
        if size := self.donation.bytes:
            # Gone at once: what comes next is cut from it, in its order.
            self._storage(size + sum(self._shifts), device)
        self._held += [self._storage(size, device) for size in self._shifts]
        for stretch in self.donation.stretches:
            for index, span in stretch.spans(0):
                self._put(index, span.size, inputs, device)
            self._held.append(self._storage(LEAST_BYTES, device))
        rooms = []
        for size in self.donation.rooms:
            rooms.append(self._storage(size, device))
            self._held.append(self._storage(LEAST_BYTES, device))

    def _put(self, index: int, size: int, inputs: list[Any], device: torch.device) -> None:
        like, storage = inputs[index], self._storage(size, device)
        form = tuple(like.size()), tuple(like.stride())
        bytes_there = _torch.memory_at(storage.data_ptr(), size, device)
        self.places[index] = _torch.reinterpret(bytes_there, like.dtype, *form, 0)
        inputs[index] = torch.empty(0, dtype=like.dtype, device=device).set_(storage, 0, *form)
        if index in self.donation.kept:
            self._held.append(storage)

    @staticmethod
    def _storage(size: int, device: torch.device) -> torch.UntypedStorage:
        # Not a tensor, which deterministic mode fills: with a kernel of the graph.
        return torch.UntypedStorage(size, device=device)

    def close(self) -> None:
        """Let go of what nobody else holds."""
        self._held.clear()


def taken(capture: Capture) -> list[Span]:
    """Return where a capture's donated inputs lay, in the order of addresses."""
    return sorted(map(extent, capture.donated.values()))


def apart(spans: Iterable[Span], capture: Capture) -> list[Span]:
    """Return those of some allocations that do not begin in a capture's donated inputs."""
    places = taken(capture)
    return [each for each in spans if find(places, each.start) is None] if places else [*spans]


def occupied(capture: Capture) -> frozenset[int]:
    """Return the donated inputs that cannot be laid over after all, in view of what a capture has put there.

    That is an output, which is somebody else's, or what must stay in place, or what reaches beyond the stretch.
    """
    tensors = [each for each in capture.outputs if isinstance(each, torch.Tensor) and each.numel()]
    staying = [*map(extent, tensors), *capture.held]
    found: set[int] = set()
    for stretch in capture.donation.stretches:
        start = _start(capture.donated, stretch)
        whole, lay = Span(start, start + stretch.size), dict(stretch.spans(start))
        across = [each for each in capture.allocations if _overlap(each, whole) and not _within(each, whole)]
        if _is_torn(capture, stretch):
            found.update(lay)
        for each in (*across, *staying):
            found.update(index for index, span in lay.items() if _overlap(each, span))
    return frozenset(found - capture.donation.kept)


def is_torn(capture: Capture) -> bool:
    """Whether inputs of a stretch do not lie side by side in a capture, as the allocator has put them elsewhere."""
    return any(_is_torn(capture, each) for each in capture.donation.stretches)


def _is_torn(capture: Capture, stretch: Stretch) -> bool:
    lie = stretch.spans(_start(capture.donated, stretch))
    return any(capture.donated[index].data_ptr() != span.start for index, span in lie)


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.end and other.start < one.end


def _within(one: Span, other: Span) -> bool:
    return other.start <= one.start and one.end <= other.end


# --- in a recording ----------------------------------------------------------------------------------------------


def joined(
    moving: Moving, stretches: Iterable[Stretch], inputs: Sequence[Any]
) -> list[tuple[InputGroup, Span]]:
    """Return inputs that can move with those of each stretch as one group."""
    members = {index for stretch in stretches for index, _ in stretch.members}
    groups = [each for each in moving if each[0].members[0][0] not in members]
    for stretch in stretches:
        start = _start(inputs, stretch)
        groups.append((InputGroup(stretch.members, MAX_ALIGNMENT, start), Span(start, start + stretch.size)))
    return groups
