"""Whether a recording does what the compiled callable does, found out on the inputs of a real call before it serves one.

The recording runs first, on copies of all inputs and on poisoned memory; then the callable runs on the inputs themselves,
with the generator's state restored. Outputs and inputs must agree afterwards. The caller gets what the callable returned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.torch_private import Runnable
from pygraphd.client.recording.comparison import Disagreement, Values, compare, form_of, read, tolerance_of
from pygraphd.client.recording.stand_ins import copies_of, moving_of
from pygraphd.client.replay.arena import lay_apart
from pygraphd.client.replay.relocation_table import Span

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from pygraphd.client.recording.builder import Moving
    from pygraphd.client.replay.replay import Replay

POISON = 0xFF
"""A byte whose repetition is a NaN in every floating-point type, and -1 in every integer type."""

OLD_POISON = -2
"""Of 64 bits: what memory of the capture holds. It is another one, and as `POISON` an index from the end in 32 and 64 bits: what `x[index]` reads
there by mistake is to be wrong, and not to end the process by an assertion on the GPU. What stands in for inputs that may be indices holds `other_indices`,
as embeddings do not count from the end."""

MAX_INDICES_BYTES = 16 << 20
"""Inputs that are larger are not taken for indices."""

JOINED_BYTES = 256 << 20
"""Memory is looked at in pieces of so many, or as it was allocated: an eighth of that is needed to say which words differ."""
TIMES = 4
"""Further replays, and launches, that are to show how much these differ from themselves."""


class Generator(Protocol):
    """The state of a random number generator, as far as kernels advance it."""

    def get_offset(self) -> Any:
        """Return how far it has come."""

    def set_offset(self, offset: Any) -> None:
        """Put it there."""


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
        *,
        keeps_inputs: bool = False,
    ) -> None:
        """Run the replay, and put the generator back where it was.

        `moving` are the inputs' groups. If it `keeps_inputs`, the callable can be launched on them again. Raises what `copies_of` and
        `Replay.run` raise; inputs and generator are as they were in any case.
        """
        self._inputs = list(inputs)
        self._replay: Replay | None = replay
        moving = moving_of(inputs, moving)
        self._copies = copies_of(inputs, moving)
        self._kept = copies_of(inputs, moving) if keeps_inputs else None
        self._memory, between = _guarded(replay)
        self._undefined = undefined
        poisoned = _poison(old, stand_ins, inputs, moving)
        self._generator = generator
        self._began = generator.get_offset() if generator is not None else 0
        try:
            self._outputs = replay.run(list(self._copies), self._memory)
        finally:
            self._ended = generator.get_offset() if generator is not None else 0
            self.random = self._ended != self._began
            """Whether the recording draws random numbers."""
            self._put_generator(self._began)
        # Looked at now, so that this memory can go before the callable needs as much.
        looked_at = [*((torch.cat(between), POISON) for _ in between[:1]), *poisoned]
        written = read([torch.ne(each, held).any() for each, held in looked_at])
        self._wrote_between = bool(between) and written[0]
        self._wrote_to_old = any(written[len(between[:1]) :])

    def disagreement(self, outputs: Sequence[Any], launch: Runnable | None = None) -> Disagreement | None:
        """Return how the replay differs from the callable, which has run on the inputs and returned `outputs`.

        If the inputs were kept, both run again where they seem to differ: each may differ as much from itself.
        """
        if self._generator is not None and self._generator.get_offset() != self._ended:
            return Disagreement("it draws another number of random numbers")
        if self._wrote_to_old:
            return Disagreement("it writes to where it was recorded")
        if self._wrote_between:
            return Disagreement("it writes beyond its memory")
        kept = self._kept
        return compare(
            Values(self._comparable(outputs), self._copies),
            Values(outputs, self._inputs),
            tolerance_of((*self._inputs, *outputs)),
            None
            if launch is None or kept is None
            else _Again(self._replay_again, launch, kept, self._rewinding),
        ) or self._misplaced(outputs)

    def _replay_again(self, inputs: list[Any]) -> Any:
        assert self._replay is not None
        # A recording that differs may be wrong, and write anywhere near.
        memory, _ = _guarded(self._replay)
        return self._replay.run(inputs, memory)

    @contextlib.contextmanager
    def _rewinding(self) -> Iterator[None]:
        """Have the generator be where it was before the call, and then again where it was after it."""
        self._put_generator(self._began)
        try:
            yield
        finally:
            self._put_generator(self._ended)

    def _put_generator(self, offset: Any) -> None:
        if self._generator is not None and self.random:
            self._generator.set_offset(offset)

    def close(self) -> None:
        """Let go of all memory."""
        self._replay = None
        self._inputs, self._copies, self._kept, self._memory, self._outputs = [], [], None, [], ()

    def _comparable(self, outputs: Sequence[Any]) -> list[Any]:
        """Return the replayed outputs, with the launched one for each that holds nothing."""
        if len(self._outputs) != len(outputs):
            return list(self._outputs)
        return [
            right if index in self._undefined and form_of(mine) == form_of(right) else mine
            for index, (mine, right) in enumerate(zip(self._outputs, outputs, strict=True))
        ]

    def _misplaced(self, outputs: Sequence[Any]) -> Disagreement | None:
        # An output in memory of neither the call nor its inputs must be a constant, or each call would overwrite the last.
        own = {
            each.untyped_storage().data_ptr()
            for each in (*self._copies, *self._memory)
            if isinstance(each, torch.Tensor)
        }
        for index, (mine, right) in enumerate(zip(self._outputs, outputs, strict=True)):
            if (
                not isinstance(mine, torch.Tensor)
                or not mine.numel()
                or mine.untyped_storage().data_ptr() in own
            ):
                continue
            if mine.data_ptr() != right.data_ptr():
                return Disagreement(f"output {index} lies in memory that relocation does not know")
        return None


def _guarded(replay: Replay) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return poisoned memory for a replay, and what lies between, which is poisoned, too."""
    poison, memory, between = lay_apart(replay.memories, replay.allocate_bytes)
    poison.fill_(POISON)
    return memory, between


@dataclass(frozen=True, slots=True)
class _Again:
    """Runs a replay and the launched callable on copies of a call's inputs; `rewinding` has either draw the same random numbers."""

    replay: Runnable
    launch: Runnable
    inputs: Sequence[Any]
    rewinding: Callable[[], contextlib.AbstractContextManager[None]]

    def replays(self) -> Iterator[Values]:
        """Yield what some more replays leave."""
        return self._runs(self.replay)

    def launches(self) -> Iterator[Values]:
        """Yield what some more launches leave."""
        return self._runs(self.launch)

    def _runs(self, run: Runnable) -> Iterator[Values]:
        for _ in range(TIMES):
            copies = copies_of(self.inputs)
            with self.rewinding():
                outputs = run(list(copies))
            yield Values(outputs, copies)


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
    return [
        torch_private.memory_at(span.start, span.size, places[0].device).view(torch.int64) for span in spans
    ]


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
