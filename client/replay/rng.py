"""Gives a recording its random numbers: before each launch, writes the generator's state for the kernels and advances it.

PyTorch keeps the seed and the offset that captured kernels read in two tensors that live as long as its graph. Its `replay` writes them
with a kernel each and launches the graph: 20 to 60 us of host time, even if the graph is empty. Once their addresses are known, the
driver writes them in one call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pygraphd.client.backend.driver import WORD_VALUE, WORD_WRITE, DriverError, MemoryType, word_writes
from pygraphd.client.backend.errors import DisturbedError, LayoutMismatch, LayoutMismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from pygraphd.client.backend.driver import Driver
    from pygraphd.client.replay.stream_affinity import StreamAffinity

DRAWN_BESIDE = "another thread drew random numbers while it was recorded"

_ROUNDS = 2
_ADVANCES = 3
_WORD = 8
_WRITES = 2
"""Words written for each generator: its seed and its offset."""
_SEED, _OFFSET = WORD_VALUE, WORD_WRITE + WORD_VALUE
"""Indices of the two values of the first generator in the array for the driver; those of the next generators follow."""
_APART = 1 << 20
"""Difference between the offsets of several generators while their addresses are searched; a multiple of 4."""


class PhiloxRange(NamedTuple):
    """The random numbers of one launch: the seed, the offset before and after it, and both offsets of each further generator."""

    seed: int
    before: int
    after: int
    further: tuple[tuple[int, int], ...] = ()


class Generators:
    """Several generators as one. Its offset is the tuple of their offsets."""

    def __init__(self, each: Sequence[torch.Generator]) -> None:
        self._each = tuple(each)

    def get_offset(self) -> Any:
        """Return the offset of each."""
        return tuple([generator.get_offset() for generator in self._each])

    def set_offset(self, offset: Any) -> None:
        """Set the offset of each generator that has another one."""
        for generator, its in zip(self._each, offset, strict=True):
            if generator.get_offset() != its:
                generator.set_offset(its)


class _Watch:
    """Sets generators back to where they began, unless another thread has drawn from them: its numbers would be drawn again."""

    def __init__(self, generators: Generators) -> None:
        self._generators = generators
        self.began = self._left = generators.get_offset()
        self._by: Any = None
        self.is_disturbed = False
        """Whether another thread has drawn."""

    def replay(self, graph: torch.cuda.CUDAGraph) -> tuple[Any, Any]:
        """Replay a graph, which advances the generators by as much each time; return their offsets before and after."""
        before = self._generators.get_offset()
        self.is_disturbed |= before != self._left
        try:
            graph.replay()
        finally:
            self._left = self._generators.get_offset()
        by = tuple(end - begin for begin, end in zip(before, self._left, strict=True))
        self._by = self._by or by
        self.is_disturbed |= by != self._by
        return before, self._left

    def advance(self, generator: torch.Generator, by: int) -> None:
        """Advance a generator by more than a launch would."""
        self.is_disturbed |= self._generators.get_offset() != self._left
        generator.set_offset(generator.get_offset() + by)
        self._left = self._generators.get_offset()

    def set_back(self) -> None:
        """Set the generators back if nobody else has drawn."""
        self.is_disturbed |= self._generators.get_offset() != self._left
        if not self.is_disturbed:
            self._generators.set_offset(self.began)
            self._left = self.began


def generators_in(inputs: Sequence[Any]) -> dict[int, torch.Generator]:
    """Return the generators that a call is given, by index: PyTorch hands them to graphs that draw the numbers of another one again."""
    return {index: each for index, each in enumerate(inputs) if isinstance(each, torch.Generator)}


@dataclass(frozen=True, slots=True)
class _State:
    """Writes for the driver, and by how much a launch advances each generator."""

    writes: Any
    own: int
    """By how much a launch advances the device's own generator; 0: the launch draws nothing from it."""
    further: tuple[tuple[torch.Generator, int], ...]
    """The other generators, with the same number."""


class RngCursor:
    """Advances generators as a launch of one recording would, and hands their state to its kernels.

    It has a captured graph of PyTorch's without nodes: its replay advances the generators, and launches nothing.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        default: torch.Generator,
        driver: Driver,
        synchronize: Callable[[], None],
        affinity: StreamAffinity,
        further: Sequence[torch.Generator] = (),
    ) -> None:
        """Take over `graph`; `synchronize` waits for the work that is queued on the current stream.

        `further` generators are drawn from beside `default`, the device's own, whose state the program may exchange. `affinity` is shared
        by all graphs that may read the same state: in torch 2.11 all graphs of a generator, in later versions those of one capture.
        """
        self.affinity = affinity
        self._graph = graph
        self._default = default
        # To set the default generator's own offset would have cuDNN's recurrent layers draw their dropout anew.
        self._generator = generator = default.graphsafe_get_state()
        self._further = tuple(further)
        self._all = Generators((generator, *further))
        self._driver = driver
        self._synchronize = synchronize
        self._state: _State | None = None

    def advance(self, stream: int) -> PhiloxRange:
        """Write the generators' state for one launch on the current stream, and advance them; may raise DriverError."""
        state = self._state
        if state is None:
            return self._advance_by_pytorch()
        writes, at, spans = state.writes, 0, []
        seed, offset = self._draw_own(state.own)
        if state.own:
            writes[_SEED], writes[_OFFSET] = seed, offset
            at = _WRITES * WORD_WRITE
        for generator, by in state.further:
            before = generator.get_offset()
            if by:
                generator.set_offset(before + by)
                writes[at + _SEED], writes[at + _OFFSET] = generator.initial_seed(), before
                at += _WRITES * WORD_WRITE
            spans.append((before, before + by))
        drawn = PhiloxRange(seed, offset, offset + state.own, tuple(spans))
        try:
            self._driver.write_words(stream, writes, at // WORD_WRITE)
        except DriverError:
            self.take_back(drawn)
            raise
        return drawn

    def _draw_own(self, by: int) -> tuple[int, int]:
        """Advance the device's generator; return its seed, and the offset that it had.

        The program may have given it another state, as libraries for tensor parallelism do. A write to the state of the capture
        would then not show in the generator's offset, and the state that it has now is drawn from.
        """
        default, generator = self._default, self._generator
        offset = generator.get_offset()
        was_its = default.get_offset() == offset
        if by:
            generator.set_offset(offset + by)  # before the GIL is let go, and another thread draws
        if was_its and default.get_offset() == offset + by:
            return generator.initial_seed(), offset
        if by and generator.get_offset() == offset + by:
            generator.set_offset(offset)
        self._generator = generator = default.graphsafe_get_state()
        offset = generator.get_offset()
        if by:
            generator.set_offset(offset + by)
        return generator.initial_seed(), offset

    def _advance_by_pytorch(self) -> PhiloxRange:
        """Have PyTorch write the state; raises `LayoutMismatchError` if the program has exchanged that of the default generator."""
        seed = self._generator.initial_seed()
        before, *others = self._all.get_offset()
        was_its = self._default.get_offset() == before
        self._graph.replay()
        after, *ends = self._all.get_offset()
        drawn = PhiloxRange(seed, before, after, tuple(zip(others, ends, strict=True)))
        if not was_its or self._default.get_offset() != after:
            self.take_back(drawn)
            raise LayoutMismatchError(LayoutMismatch.GENERATOR)
        return drawn

    def take_back(self, drawn: PhiloxRange) -> None:
        """Set the generators back, as nothing was launched: the kernels that run instead will advance them.

        A generator from which another thread has drawn since stays, or its numbers would be drawn again.
        """
        spans = ((drawn.before, drawn.after), *drawn.further)
        for generator, (before, after) in zip((self._generator, *self._further), spans, strict=True):
            if before != after and generator.get_offset() == after:
                generator.set_offset(before)

    def learn(self, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        """Find the addresses of the state among `addresses`; if that is ambiguous, PyTorch goes on to write it.

        Return whether random numbers are drawn at all. The generators are set back. Raises `FallbackError` if the state is in use on
        another stream, or if another thread has drawn meanwhile; then they stay as they are.
        """
        with self.affinity.held():
            is_new = self.affinity.enter(stream)
            draws = self._learn(addresses, stream)
            # Else a graph that draws on another stream would be held up by one that draws nothing.
            if is_new and not draws:
                self.affinity.leave()
        return draws

    def _learn(self, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        watch, draws = _Watch(self._all), True  # as far as is known, should a replay fail
        try:
            draws = self._draws(watch)
            if draws:
                with self._driver.relaxed():
                    aligned = [each for each in set(addresses()) if each > 0 and each % _WORD == 0]
                    type_at = self._driver.memory_type
                    # To read a word that is no address would fail, and end the search.
                    self._state = self._find(
                        [each for each in aligned if type_at(each) is MemoryType.DEVICE], watch
                    )
                    if self._state is not None:
                        # Not every driver lets a stream write.
                        watch.set_back()
                        self.take_back(self.advance(stream))
        except DriverError:
            self._state = None
        finally:
            if draws:
                watch.set_back()
        if draws and watch.is_disturbed:
            raise DisturbedError(DRAWN_BESIDE)
        return draws

    def _draws(self, watch: _Watch) -> bool:
        """Return whether each of several replays has advanced a generator: a single one, beside another thread that draws, may seem to."""
        for _ in range(_ADVANCES):
            before, after = watch.replay(self._graph)
            if before == after:
                return False
        return True

    def _find(self, addresses: list[int], watch: _Watch) -> _State | None:
        """Return the address of each generator's state, found by the values that PyTorch writes there; None if it is ambiguous."""
        everyone = (self._generator, *self._further)
        for number, each in enumerate(self._further, start=1):
            watch.advance(each, number * _APART)  # they may have come equally far
        candidates: list[tuple[set[int], set[int]]] = [(set(addresses), set(addresses)) for _ in everyone]
        advances = [0] * len(everyone)
        # The offset is another one in the second round, and a word that held it by chance does not follow.
        for _ in range(_ROUNDS):
            offsets, ends = watch.replay(self._graph)
            self._synchronize()
            words = {address: self._driver.read_word(address) for address in addresses}
            advances = [end - begin for begin, end in zip(offsets, ends, strict=True)]
            for each, offset, (seed_at, offset_at) in zip(everyone, offsets, candidates, strict=True):
                seed_at.intersection_update(a for a in addresses if words[a] == each.initial_seed())
                offset_at.intersection_update(a for a in addresses if words[a] == offset)
        found: list[int] = []
        drawn_from = [number for number, by in enumerate(advances) if by]
        for number in drawn_from:
            seed_at, offset_at = candidates[number]
            if len(seed_at - offset_at) != 1 or len(offset_at) != 1:
                return None
            found += [*(seed_at - offset_at), *offset_at]
        if len(set(found)) != len(found):
            return None
        own, *others = advances
        return _State(word_writes(found), own, tuple(zip(self._further, others, strict=True)))

    def close(self) -> None:
        """Release PyTorch's graph."""
        self._graph.reset()
