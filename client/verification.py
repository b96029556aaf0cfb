"""Whether a recording does what the compiled callable does, found out on the inputs of a real call before it serves one.

The recording runs first, on copies of all inputs and on poisoned memory; then the callable runs on the inputs themselves,
with the generator's state restored. Outputs and inputs must agree afterwards. The caller gets what the callable returned.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client import _torch
from pygraphd.client.arena import Arena, lay_apart
from pygraphd.client.binding import InputGroup
from pygraphd.client.extents import extent
from pygraphd.client.misfits import Leeway
from pygraphd.client.parameters import OpaqueError
from pygraphd.client.recording import input_groups
from pygraphd.client.relocation import BLOCK, Share, Span, alignment, blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from pygraphd.client.recording import Moving
    from pygraphd.client.replay import Replay

POISON = 0xFF
"""A byte whose repetition is a NaN in every floating-point type, and -1 in every integer type."""

OLD_POISON = -2
"""Of 64 bits: what memory of the capture holds. It is another one, and as `POISON` an index from the end in 32 and 64 bits: what `x[index]` reads
there by mistake is to be wrong, and not to end the process by an assertion on the GPU. What stands in for inputs that may be indices holds `other_indices`,
as embeddings do not count from the end."""

MAX_INDICES_BYTES = 16 << 20
"""Inputs that are larger are not taken for indices."""

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Share of the largest value that kernels may differ by which add in an order of their own; all else must be equal. Of a graph that takes or
returns several types it is that of the coarsest: a gradient in 32 bits of what was computed in 16 differs by as much as those."""
SMALL_BYTES = 256 << 10
AT_ONCE = Share(count=1, least=32 << 20, most=32 << 20)
"""Tensors of `SMALL_BYTES` at most are compared together, so many bytes at a time: they are copied for that."""
JOINED_BYTES = 256 << 20
"""Memory is looked at in pieces of so many, or as it was allocated: an eighth of that is needed to say which words differ."""
_WHOLE_NUMBERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


class Generator(Protocol):
    """The state of a random number generator, as far as kernels advance it."""

    def get_offset(self) -> int:
        """Return how far it has come."""

    def set_offset(self, offset: int) -> None:
        """Put it there."""


@dataclass(frozen=True, slots=True)
class Disagreement:
    """What a replay did otherwise than the callable: `what` names it, `detail` says more, which may be something else the next time."""

    what: str
    detail: str = ""
    in_values: bool = False
    """An output or an input holds something else: the replay may read what lies where nobody knows of."""

    def __str__(self) -> str:
        return f"verification: {self.what}{self.detail}"


class Trial:
    """A replay on copies of a call's inputs, to be held against what the callable does with the inputs themselves.

    `old` is the memory that the capture worked on, as 64-bit integers, with the `stand_ins` for the inputs. It is poisoned: an address that was
    missed then reads poison, or writes where nothing may be written, and either shows. `undefined` outputs hold nothing, and are not compared.
    """

    def __init__(
        self,
        replay: Replay,
        inputs: Sequence[Any],
        generator: Generator | None,
        old: Sequence[torch.Tensor] = (),
        undefined: Collection[int] = (),
        stand_ins: Sequence[Any] = (),
        moving: Moving | None = None,
    ) -> None:
        """Run the replay, and put the generator back where it was.

        `moving` are the inputs' groups. Raises what `copies_of` and `Replay.run` raise; inputs and generator are as they were in any case.
        """
        self._inputs = list(inputs)
        moving = _moving(inputs, moving)
        self._copies = copies_of(inputs, moving)
        poison, self._memory, between = lay_apart(replay.memories, replay.allocate_bytes)
        poison.fill_(POISON)
        self._undefined = undefined
        poisoned = _poison(old, stand_ins, inputs, moving)
        self._generator = generator
        began = generator.get_offset() if generator is not None else 0
        try:
            self._outputs = replay.run(list(self._copies), self._memory)
        finally:
            self._ended = generator.get_offset() if generator is not None else 0
            self.random = self._ended != began
            """Whether the recording draws random numbers."""
            if generator is not None and self.random:
                generator.set_offset(began)
        # Looked at now, so that this memory can go before the callable needs as much.
        looked_at = [*((torch.cat(between), POISON) for _ in between[:1]), *poisoned]
        written = _answers([torch.ne(each, held).any() for each, held in looked_at])
        self._wrote_between = bool(between) and written[0]
        self._wrote_to_old = any(written[len(between[:1]) :])

    def disagreement(self, outputs: Sequence[Any]) -> Disagreement | None:
        """Return how the replay differs from the callable, which has run on the inputs and returned `outputs`."""
        if self._generator is not None and self._generator.get_offset() != self._ended:
            return Disagreement("it draws another number of random numbers")
        if self._wrote_to_old:
            return Disagreement("it writes to where it was recorded")
        if self._wrote_between:
            return Disagreement("it writes beyond its memory")
        tolerance = _coarsest((*self._inputs, *outputs))
        return (
            _compare("output", self._comparable(outputs), outputs, tolerance)
            or _compare("input", self._copies, self._inputs, tolerance)
            or self._misplaced(outputs)
        )

    def close(self) -> None:
        """Let go of all memory."""
        self._inputs, self._copies, self._memory, self._outputs = [], [], [], ()

    def _comparable(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the replayed outputs, with the launched one for each that holds nothing."""
        if len(self._outputs) != len(outputs):
            return list(self._outputs)
        return [
            right if index in self._undefined and _form_of(mine) == _form_of(right) else mine
            for index, (mine, right) in enumerate(zip(self._outputs, outputs, strict=True))
        ]

    def _misplaced(self, outputs: Sequence[Any]) -> Disagreement | None:
        # An output in memory of neither the call nor its inputs must be a constant, or each call would overwrite the last.
        own = {
            each.untyped_storage().data_ptr() for each in (*self._copies, *self._memory) if _is_tensor(each)
        }
        for index, (mine, right) in enumerate(zip(self._outputs, outputs, strict=True)):
            if not _is_tensor(mine) or not mine.numel() or mine.untyped_storage().data_ptr() in own:
                continue
            if mine.data_ptr() != right.data_ptr():
                return Disagreement(f"output {index} lies in memory that relocation does not know")
        return None


def _poison(
    old: Sequence[torch.Tensor], stand_ins: Sequence[Any], inputs: Sequence[Any], moving: Moving
) -> list[tuple[torch.Tensor, torch.Tensor | int]]:
    """Make memory hold what shows that it was read; return each with what it holds now."""
    for each in _joined(old):
        each.fill_(OLD_POISON)
    filled = set()
    for index in _indices(inputs, moving) if stand_ins else ():
        stand_ins[index].copy_(other_indices(inputs[index]))
        filled.add(stand_ins[index].untyped_storage().data_ptr())
    others = [each for each in old if each.untyped_storage().data_ptr() in filled]
    poisoned = [each for each in old if each.untyped_storage().data_ptr() not in filled]
    return [
        *((each, each.clone()) for each in others),
        *((each, OLD_POISON) for each in _joined(poisoned)),
    ]


def _joined(places: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same memory, as 64-bit integers, in as few tensors as there are gaps: kernels for hundreds take milliseconds to launch."""
    spans: list[Span] = []
    for span in sorted(Span(each.data_ptr(), each.data_ptr() + each.nbytes) for each in places):
        if spans and spans[-1].end == span.start and spans[-1].size + span.size <= JOINED_BYTES:
            spans[-1] = Span(spans[-1].start, span.end)
        else:
            spans.append(span)
    return [_torch.memory_at(span.start, span.size, places[0].device).view(torch.int64) for span in spans]


def _indices(inputs: Sequence[Any], moving: Moving) -> Iterator[int]:
    """Yield the inputs that may be indices."""
    for group, _ in moving:
        index, tensor = group.members[0][0], inputs[group.members[0][0]]
        is_one = len(group.members) == 1 and tensor.is_contiguous() and tensor.nbytes <= MAX_INDICES_BYTES
        if is_one and tensor.dtype in {torch.int32, torch.int64}:
            yield index


def other_indices(indices: torch.Tensor) -> torch.Tensor:
    """Return other values of the same range, or poison where all are the same; the GPU is not waited for."""
    least, most = torch.aminmax(indices.detach())
    return torch.where(least == most, OLD_POISON, least + most - indices.detach())


# --- copies ------------------------------------------------------------------------------------------------------


def _moving(inputs: Sequence[Any], told: Moving | None) -> Moving:
    # For hundreds of inputs it takes milliseconds, and most of what is here needs it.
    return input_groups(inputs, ()) if told is None else told


def bytes_to_copy(inputs: Sequence[Any], moving: Moving | None = None) -> int:
    """Return how much memory `copies_of` takes."""
    return sum(_room(span) for _, span in _moving(inputs, moving))


def copies_of(inputs: Sequence[Any], moving: Moving | None = None) -> list[Any]:
    """Return the inputs with all tensors copied; what overlaps does so again, and alignment is the same. `moving` are their groups."""
    copies, groups = list(inputs), _moving(inputs, moving)
    arena = Arena(sum(_room(span) for _, span in groups), _device_of(inputs)) if groups else None
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for group, span in groups:
        assert arena is not None
        start = arena.take(span.size, span.start)
        for index, _ in group.members:
            tensor = inputs[index]
            copies[index] = arena.tensor(start + tensor.data_ptr() - span.start, tensor)
        if len(group.members) == 1 and span.size == tensor.nbytes and tensor.is_contiguous():
            pairs.append((copies[index], tensor))
        else:
            pairs.append((arena.bytes(start, span.size), _bytes(tensor, span)))
    _torch.copy_all(pairs)
    return copies


def _device_of(inputs: Sequence[Any]) -> torch.device:
    return next(each.device for each in inputs if _is_tensor(each))


def stand_ins_for(
    inputs: Sequence[Any],
    leeway: Leeway = Leeway(),  # noqa: B008 - it is frozen
    moving: Moving | None = None,
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return tensors like the inputs in memory of their own, without their values, and that memory as 64-bit integers.

    They are aligned as the inputs are, or worse, and overlap as these do unless they are to lie apart. `moving` are the inputs' groups.
    """
    copies, places = list(inputs), []
    for group, span in _groups(inputs, leeway, moving):
        members = [(index, inputs[index]) for index, _ in group.members]
        copy, base = _room_for(*members[0], span, leeway if len(members) == 1 else Leeway())
        places.append(copy.view(torch.int64))
        for index, tensor in members:
            start = base + tensor.data_ptr() - span.start
            copies[index] = _torch.reinterpret(
                copy,
                tensor.dtype,
                tuple(tensor.size()),
                tuple(tensor.stride()),
                start // tensor.element_size(),
            )
    return copies, places


def _groups(
    inputs: Sequence[Any], leeway: Leeway, moving: Moving | None
) -> Iterator[tuple[InputGroup, Span]]:
    """Yield the inputs that can move, those that overlap together unless they are to lie apart."""
    if not leeway.apart:
        yield from _moving(inputs, moving)
        return
    for index, value in enumerate(inputs):
        if _is_tensor(value) and value.numel():
            span = extent(value)
            yield InputGroup(((index, 0),), alignment(span.start), span.start), span


def bytes_to_stand_in(inputs: Sequence[Any], leeway: Leeway, moving: Moving | None = None) -> int:
    """Return how much memory `stand_ins_for` takes."""
    return sum(_room(span) for _, span in _groups(inputs, leeway, moving))


def elsewhere_for(
    inputs: Sequence[Any],
    leeway: Leeway = Leeway(),  # noqa: B008 - it is frozen
    moving: Moving | None = None,
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return tensors as `stand_ins_for` does, but side by side in one allocation, and that: it takes less time to make."""
    copies, groups = list(inputs), list(_groups(inputs, leeway, moving))
    if not groups:
        return copies, []
    arena = Arena(sum(_room(span) for _, span in groups), _device_of(inputs))
    for group, span in groups:
        first = group.members[0][0]
        like = _base_like(first, inputs[first], span, leeway if len(group.members) == 1 else Leeway())
        start = arena.take(span.size, like)
        for index, _ in group.members:
            copies[index] = arena.tensor(start + inputs[index].data_ptr() - span.start, inputs[index])
    return copies, [arena.whole]


def _room_for(index: int, member: torch.Tensor, span: Span, leeway: Leeway) -> tuple[torch.Tensor, int]:
    """Return bytes that a span has room in, and where in them its member is aligned as it is, or worse."""
    room = torch.empty(_room(span), dtype=torch.uint8, device=member.device)
    return room, (_base_like(index, member, span, leeway) - room.data_ptr()) % BLOCK


def _base_like(index: int, member: torch.Tensor, span: Span, leeway: Leeway) -> int:
    """Return an address that a span's is to be like, up to multiples of a block, for its member to be aligned as it is, or worse."""
    address: int = member.data_ptr()
    worst = leeway.alignments.get(index, BLOCK)
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


# --- comparing ---------------------------------------------------------------------------------------------------


def _coarsest(values: Iterable[Any]) -> float:
    return max((TOLERANCE.get(each.dtype, 0.0) for each in values if _is_tensor(each)), default=0.0)


def _compare(
    what: str, replayed: Sequence[Any], launched: Sequence[Any], tolerance: float
) -> Disagreement | None:
    if len(replayed) != len(launched):
        return Disagreement(f"{len(replayed)} {what}s and not {len(launched)}")
    pairs: Pairs = {}
    for index, (mine, right) in enumerate(zip(replayed, launched, strict=True)):
        if _is_tensor(right) and mine is not right and _form_of(mine) == _form(right):
            pairs[index] = mine, right
        elif mine is not right and not _is_same_value(mine, right):
            return _differs(what, index)
    far = (index for index in _differing(pairs) if not _close(*pairs[index], tolerance))
    return next((_differs(what, index, _by_how_much(*pairs[index])) for index in far), None)


Pairs = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""Tensors of one form each, by index."""


def _differing(pairs: Pairs) -> list[int]:
    """Return which of some pairs hold other values; small ones are held against each other together, as the host launches two kernels for each."""
    together, alone = _batches(pairs)
    asked = [
        _differ(*map(_as_one, zip(*(pairs[index] for index in batch), strict=True))) for batch in together
    ]
    asked += [_differ(*pairs[index]) for index in alone]
    answers = _answers(asked)
    found = [*itertools.compress(alone, answers[len(together) :])]
    unclear = [*itertools.chain.from_iterable(itertools.compress(together, answers))]
    found += itertools.compress(unclear, _answers([_differ(*pairs[index]) for index in unclear]))
    return sorted(found)


def _batches(pairs: Pairs) -> tuple[list[list[int]], list[int]]:
    """Return which pairs are to be looked at together, and which alone."""
    alike: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    alone = []
    for index, (_, right) in pairs.items():
        if right.nbytes <= SMALL_BYTES and _has_values(right.dtype) and right.is_contiguous():
            alike.setdefault((right.dtype, right.device), []).append(index)
        else:
            alone.append(index)
    together = [
        [those[number] for number in batch]
        for those in alike.values()
        for batch in AT_ONCE.pieces([pairs[index][1].nbytes for index in those])
    ]
    return together, alone


def _as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in tensors])


def _differs(what: str, index: int, by_how_much: str = "") -> Disagreement:
    return Disagreement(f"{what} {index} differs", by_how_much, in_values=True)


def _by_how_much(mine: torch.Tensor, right: torch.Tensor) -> str:
    """Return how far two tensors are apart that differ, for whoever reads the report; nothing where there is nothing to be said."""
    if right.dtype not in TOLERANCE:
        return ""
    if bool((mine.isfinite() != right.isfinite()).any()):
        return " in what are numbers"
    off, largest = _largest(mine.detach() - right.detach()), _largest(right.detach().clone())
    if not largest:
        return ""
    percent = 100 * off / largest
    told = "over 1000" if percent > 1000 else f"{percent:.0f}" if percent >= 10 else f"{percent:.2g}"
    return f" by {told} % of its largest value"


def _largest(values: torch.Tensor) -> float:
    """Return the largest of the values that are numbers; overwrites them, since there may be little memory left."""
    return float(values.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).abs_().max())


def _is_same_value(mine: Any, right: Any) -> bool:
    return not _is_tensor(right) and type(mine) is type(right) and bool(mine == right)


def _answers(questions: Sequence[torch.Tensor]) -> list[bool]:
    """Return the values of boolean tensors; each device is waited for once, and not for each of hundreds."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for each in questions:
        by_device.setdefault(each.device, []).append(each)
    # Of several devices: attention keeps its random state on the CPU, beside what it returns.
    answers = {device: iter(torch.stack(mine).tolist()) for device, mine in by_device.items()}
    return [next(answers[each.device]) for each in questions]


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _form_of(value: Any) -> tuple[Any, ...] | None:
    return _form(value) if _is_tensor(value) else None


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tuple(tensor.size()), tuple(tensor.stride())


def _close(mine: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    if right.dtype not in TOLERANCE:
        return False
    finite = torch.nan_to_num(right.detach(), nan=0.0, posinf=0.0, neginf=0.0)
    scale = float(finite.abs().max())
    return bool(torch.allclose(mine, right, rtol=0.0, atol=tolerance * scale, equal_nan=True))


def _differ(mine: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return, on their device, whether two tensors of one form hold other values; what is no number differs from itself."""
    if _has_values(right.dtype):
        return torch.ne(mine, right).any()
    return torch.ne(_bits(mine), _bits(right)).any()


def _has_values(dtype: torch.dtype) -> bool:
    """Whether values can be compared: of some types they cannot."""
    return dtype in TOLERANCE or dtype in _WHOLE_NUMBERS


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 1:
        # It may have any stride, and is not seen as bytes then.
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
