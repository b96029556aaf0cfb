"""Makes tensors to be used in place of the inputs of a call: stand-ins without values in captures, and copies in replays."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import Driver, DriverError
from pygraphd.client.backend.errors import NotRelocatableError
from pygraphd.client.decisions.ranks.lockstep import Lockstep
from pygraphd.client.recording.alias_sets import InputGroups
from pygraphd.client.recording.aliased_memory import AliasedMemory, bytes_behind
from pygraphd.client.recording.size_slot import LayoutConstraints
from pygraphd.client.replay.addresses import extent
from pygraphd.client.replay.relocation_table import BLOCK, PAGE, Span, alignment, blocks
from pygraphd.client.replay.segments import InputGroup

NO_CONSTRAINTS = LayoutConstraints()

MAX_SMALL = 64 << 10
"""Largest size in bytes of inputs that are always copied, and whose stand-ins have memory of their own. Copying hundreds of these is quick."""
ALIASED_FROM = 32 << 20
"""Where the inputs above `MAX_SMALL` have this many bytes together, their stand-ins are addresses of `AliasedMemory`."""
ALIASES = 16
"""Bytes of aliased copies for each byte of their memory. The memory has a prime number of pages, so that rows at powers of two are seldom aliases."""
ALIASED_COPY_FROM = 64 << 20
"""Bytes from which on a group of inputs may have an aliased copy, where there is no memory for a whole one."""
MAX_INDICES_BYTES = 16 << 20
"""Inputs with more bytes are not taken for indices."""


@dataclass(frozen=True, slots=True)
class StandIns:
    """The tensors on which a call is captured."""

    tensors: list[Any]
    """The inputs, with a stand-in in place of each tensor."""
    memory: list[torch.Tensor]
    """The memory of the stand-ins, as 64-bit integers."""
    ranges: list[torch.Tensor]
    """The address ranges of all stand-ins, as tensors: `memory`, and ranges of aliased memory."""
    bytes: int
    """Bytes of `memory` without aliased memory."""


@dataclass(frozen=True, slots=True)
class AliasedCopies:
    """Copies of large inputs on aliased memory, for a verification without the memory to copy them.

    They lie in one range, in which aliases are a multiple of the memory's size apart. A kernel whose writes lie closer together writes to none.
    """

    memory: torch.Tensor
    """The memory, as 64-bit integers."""
    filled: Sequence[tuple[torch.Tensor, torch.Tensor]]
    """Pieces of the memory, each with the bytes of the input that are copied to it."""
    tensors: Mapping[int, torch.Tensor]
    """The tensors by index of their input."""

    def among(self, copies: Sequence[Any]) -> list[Any]:
        """Return `copies` with the aliased copies in their places, after filling the memory with bytes of the inputs."""
        torch_private.copy_all(self.filled)
        return [self.tensors.get(index, each) for index, each in enumerate(copies)]

    def left(self, copies: Sequence[Any], memory: torch.Tensor) -> list[Any]:
        """Return `copies` with `memory` in place of the first aliased copy, and None in place of the others, for a comparison."""
        first, *others = self.tensors
        seen = {first: memory.view(self.tensors[first].dtype), **dict.fromkeys(others)}
        return [seen.get(index, each) for index, each in enumerate(copies)]


@dataclass(slots=True)
class RecordedCall:
    """A call that is recorded. It owns the aliased memory of its stand-ins."""

    inputs: list[Any]
    constraints: LayoutConstraints
    groups: InputGroups
    driver: Driver
    device: torch.device
    require: Callable[[int, int], None]
    """Raises an error if a number of bytes cannot be allocated beside another that the recording holds; see `Budget`."""
    differed: bool = False
    """Whether an earlier recording of the size differed from KERNELS. Then the callable is also compared with itself."""
    in_full: frozenset[int] | None = None
    """The large values that are kept for the comparison, by index (outputs, then inputs): of others there are digests. None: all."""
    lockstep: Lockstep | None = None
    """The attempt of all ranks that this recording is part of, where the graph has collectives."""
    has_aliases: bool = True
    """Whether stand-ins of large inputs are addresses of `AliasedMemory`, if that can be mapped."""
    has_memory: bool = False
    """Whether the allocations of its captures have memory of their own."""
    capture_bytes: int = 0
    """Bytes of the allocations of its latest capture, or an estimate before the first one."""
    bytes_held: int = 0
    """Bytes that the recording holds beside aliased memory, and releases before the call itself."""
    _addresses: AliasedMemory | None = None
    _aliased: list[AliasedMemory] = field(default_factory=list)

    def stand_ins(self, *, besides: int = 0, is_further: bool = False) -> StandIns:
        """Return stand-ins, at other addresses modulo 4 GiB if `is_further`. Raises the error of `require` for them and `besides` bytes."""
        large, others = 0, 0
        for group, span in _groups(self.inputs, self.groups, self.constraints):
            is_large = _is_aliased(group.members, span, self.inputs, self.device)
            large, others = large + is_large * _bytes_for(span), others + (not is_large) * _bytes_for(span)
        self.has_aliases = self.has_aliases and large >= ALIASED_FROM
        # A block more, by which the stand-ins of a further capture are shifted.
        aliased = self._alias(large + BLOCK) if self.has_aliases else None
        own = others + (large if aliased is None else 0)
        self.require(besides + own, self.held())
        if aliased is not None and is_further:
            aliased.take(BLOCK)  # the ranges of two captures may lie a multiple of 4 GiB apart
        tensors, memory = stand_ins_for(self.inputs, self.groups, self.constraints, aliased)
        if aliased is None:
            return StandIns(tensors, memory, memory, own)
        return StandIns(tensors, [*memory, aliased.memory], [*memory, aliased.whole], own)

    def aliased_copies(self, written: Collection[int]) -> AliasedCopies | None:
        """Return aliased copies of the large inputs with an index in `written`; None if memory cannot be mapped."""
        chosen = [
            (group, span)
            for group, span in self.groups
            if self.inputs[group.members[0][0]].device == self.device
            and _is_large(span, written)
            and is_copied(group, span, written)
        ]
        # By index: the inputs of one kernel mostly follow one another.
        chosen.sort(key=lambda each: each[0].members[0][0])
        size = sum(_bytes_for(span) for _, span in chosen)
        aliased = self._alias(size, prime_from(1 + size // (ALIASES * PAGE))) if chosen else None
        if aliased is None:
            return None
        memory, taken = aliased.memory, 0
        filled, tensors = [], dict[int, torch.Tensor]()
        for group, span in chosen:
            members = [(index, self.inputs[index]) for index, _ in group.members]
            whole, base = _allocated(*members[0], span, NO_CONSTRAINTS, aliased.take)
            tensors.update(_laid_over(whole, base, members, span))
            # Beyond the end of the memory a place is empty: that tensor lies over bytes that earlier ones have filled.
            place = memory.view(torch.uint8)[taken:][: whole.nbytes][base:][: span.size]
            filled.append((place, bytes_of(members[0][1], span)[: place.numel()]))
            taken += whole.nbytes
        return AliasedCopies(memory, filled, tensors)

    def addresses(self, size: int, *, is_further: bool = False) -> AliasedMemory | None:
        """Return `size` bytes of addresses for a capture, the last ones again unless it `is_further`; None: it gets memory of its own."""
        if self.has_memory or not size:
            return None
        if self._addresses is None or is_further:
            self._addresses = self._alias(size)
            self.has_memory = self._addresses is None
        else:
            self._addresses.take_back()
        return self._addresses

    def held(self, beside: int = 0) -> int:
        """Return the bytes that the recording holds, less those that it releases before `beside` more are allocated."""
        return sum(each.bytes for each in self._aliased) + max(self.bytes_held - beside, 0)

    def _alias(self, size: int, pages: int = 0) -> AliasedMemory | None:
        self.require(0, self.held() + bytes_behind(size, pages))  # the driver says what is not free
        try:
            self._aliased.append(AliasedMemory(self.driver, self.device, size, pages))
        except DriverError:
            return None  # the caller then allocates memory
        return self._aliased[-1]

    def close(self) -> None:
        """Give aliased memory back; stand-ins must not be used any more."""
        self._addresses = None
        while self._aliased:
            with contextlib.suppress(DriverError):  # no fault of the recording
                self._aliased.pop().close()


# --- copies ------------------------------------------------------------------------------------------------------


def bytes_to_copy(
    groups: InputGroups, written: Collection[int] | None = None, *, but_large: bool = False
) -> int:
    """Return the bytes that `copies_of` allocates; with `but_large`, less those of inputs that may have aliased copies."""
    copied = [span for group, span in groups if is_copied(group, span, written)]
    return sum(_bytes_for(span) for span in copied if not but_large or not _is_large(span, written))


def _is_large(span: Span, written: Collection[int] | None) -> bool:
    return written is not None and span.size >= ALIASED_COPY_FROM


def copies_of(
    inputs: Sequence[Any], groups: InputGroups, written: Collection[int] | None = None
) -> list[Any]:
    """Return the inputs, with copies in place of those that are small or have an index in `written` (None: of all).

    The copies are aligned and overlap as the inputs do. Raises NotRelocatableError if inputs of several storages overlap.
    """
    copies, pairs = list(inputs), list[tuple[torch.Tensor, torch.Tensor]]()
    for group, span in groups:
        if not is_copied(group, span, written):
            continue
        members = [(index, inputs[index]) for index, _ in group.members]
        memory, base = _allocated(*members[0], span, NO_CONSTRAINTS)
        for index, copy in _laid_over(memory, base, members, span):
            copies[index] = copy
        index, tensor = members[-1]
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        # A copy of a boolean tensor turns other bytes than 0 and 1, as in memory that was never written, into 1.
        if len(group.members) == 1 and span.size == tensor.nbytes and is_plain and tensor.dtype != torch.bool:
            pairs.append((copies[index], tensor))
        else:
            pairs.append((memory[base:][: span.size], bytes_of(tensor, span)))
    # All together: one by one, hundreds of copies take the host long.
    torch_private.copy_all(pairs)
    return copies


def is_copied(group: InputGroup, span: Span, written: Collection[int] | None) -> bool:
    """Return whether `copies_of` copies a group."""
    return written is None or span.size <= MAX_SMALL or any(index in written for index, _ in group.members)


def prime_from(least: int) -> int:
    """Return the smallest prime number that is no less than a number."""
    return next(
        n for n in itertools.count(max(least, 2)) if all(n % each for each in range(2, math.isqrt(n) + 1))
    )


def may_be_indices(members: Sequence[tuple[int, int]], inputs: Sequence[Any]) -> bool:
    """Return whether the inputs of a group may hold indices."""
    tensor = inputs[members[0][0]]
    is_one = len(members) == 1 and tensor.is_contiguous() and tensor.nbytes <= MAX_INDICES_BYTES
    return is_one and tensor.dtype in {torch.int32, torch.int64}


def bytes_of(tensor: torch.Tensor, span: Span) -> torch.Tensor:
    """Return the bytes of a span of a tensor's storage."""
    storage = tensor.untyped_storage()
    offset = span.start - storage.data_ptr()
    if offset < 0 or offset + span.size > storage.nbytes():
        raise NotRelocatableError("inputs overlap that are of different storages")
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, offset, (span.size,), (1,))


# --- stand-ins ---------------------------------------------------------------------------------------------------


def stand_ins_for(
    inputs: Sequence[Any],
    groups: InputGroups,
    constraints: LayoutConstraints = NO_CONSTRAINTS,
    aliased: AliasedMemory | None = None,
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return stand-ins for the inputs, and their memory as 64-bit integers: an allocation for each group.

    They have the alignment of the inputs or of the constraints, whichever is less, and overlap as the inputs do unless the constraints
    have them lie apart. Stand-ins of large inputs lie in `aliased`, if it is given.
    """
    copies, memory = list(inputs), []
    for group, span in _groups(inputs, groups, constraints):
        members = [(index, inputs[index]) for index, _ in group.members]
        # Members of a group keep their distances, so that none can be aligned by itself.
        own = constraints if len(members) == 1 else NO_CONSTRAINTS
        if aliased is not None and _is_aliased(group.members, span, inputs, aliased.device):
            copy, base = _allocated(*members[0], span, own, aliased.take)
        else:
            copy, base = _allocated(*members[0], span, own)
            memory.append(copy.view(torch.int64))
        for index, tensor in _laid_over(copy, base, members, span):
            copies[index] = tensor
    return copies, memory


def _laid_over(
    memory: torch.Tensor, base: int, members: Sequence[tuple[int, torch.Tensor]], span: Span
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield tensors with the layout of the members of a group, whose span begins at the byte `base` of `memory`."""
    for index, tensor in members:
        start = base + tensor.data_ptr() - span.start
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        plain = torch_private.reinterpret(memory, tensor.dtype, size, stride, start // tensor.element_size())
        # Negative and conjugate views stay such, so that the same kernels are recorded.
        yield index, torch_private.viewed_like(plain, tensor)


def _is_aliased(
    members: Sequence[tuple[int, int]], span: Span, inputs: Sequence[Any], device: torch.device
) -> bool:
    is_here = inputs[members[0][0]].device == device
    # Indices get memory of their own, for other indices: an embedding fails an assertion on poison.
    return span.size > MAX_SMALL and is_here and not may_be_indices(members, inputs)


def _groups(
    inputs: Sequence[Any], groups: InputGroups, constraints: LayoutConstraints
) -> Iterator[tuple[InputGroup, Span]]:
    """Yield the groups of the inputs, with their spans; one group for each input if the constraints have them lie apart."""
    if not constraints.apart:
        yield from groups
        return
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor) and value.numel():
            span = extent(value)
            yield InputGroup(((index, 0),), alignment(span.start), span.start), span


def _allocated(
    index: int,
    member: torch.Tensor,
    span: Span,
    constraints: LayoutConstraints,
    allocate: Callable[[int], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, int]:
    """Return an allocation, and the offset of a span in it at which `member` has its own alignment, or a lesser one of the constraints."""
    size, address = _bytes_for(span), member.data_ptr()
    memory = (
        torch.empty(size, dtype=torch.uint8, device=member.device) if allocate is None else allocate(size)
    )
    worst = constraints.alignments.get(index, BLOCK)
    like = worst if worst < alignment(address) else address
    return memory, (like - (address - span.start) - memory.data_ptr()) % BLOCK


def _bytes_for(span: Span) -> int:
    """Return the bytes that an allocation needs to hold a span at any offset modulo `BLOCK`."""
    return (blocks(span.size) + 1) * BLOCK
