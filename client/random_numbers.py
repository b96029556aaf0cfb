"""Random numbers of a recording: the generator's state is handed to its kernels before each launch, and advanced.

PyTorch keeps the seed and the offset that captured kernels read in two tensors that live as long as its graph, and its `replay`
writes them by a kernel each and launches the graph: 20 to 60 us of the host's time, even if there is nothing left in the graph. Once it
is known where they lie, the driver writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from pygraphd.client.driver import WORD_VALUE, WORD_WRITE, DriverError, MemoryType, word_writes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pygraphd.client.driver import Driver
    from pygraphd.client.one_stream import OneStream

_ROUNDS = 2
_WORD = 8
_WRITES = 2
_SEED, _OFFSET = WORD_VALUE, WORD_WRITE + WORD_VALUE
"""Where in what is handed to the driver the two values are."""


class Graph(Protocol):
    """A `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Hand out the generator's state, advance it, and launch."""

    def reset(self) -> None:
        """Let go of everything."""


class Generator(Protocol):
    """A `torch.Generator` of a CUDA device."""

    def initial_seed(self) -> int:
        """Return the seed."""

    def get_offset(self) -> int:
        """Return how far it has come."""

    def set_offset(self, offset: int) -> None:
        """Put it there."""


class Draw(NamedTuple):
    """What a launch was given of the generator: its seed, and from where to where its offset went."""

    seed: int
    before: int
    after: int


@dataclass(frozen=True, slots=True)
class _State:
    """What writes the seed and the offset to where kernels read them, and by how much a launch advances the latter."""

    writes: Any
    advance: int


class GeneratorTicket:
    """A captured graph emptied of its nodes: replaying it does what PyTorch does for random numbers, and nothing else."""

    def __init__(
        self,
        graph: Graph,
        generator: Generator,
        driver: Driver,
        synchronize: Callable[[], None],
        one_stream: OneStream,
    ) -> None:
        """Take over `graph`; `synchronize` waits for what is queued on the current stream.

        `one_stream` is of all graphs that may read the same state: in torch 2.11 those of a generator, later ones have one for each capture.
        """
        self.one_stream = one_stream
        self._graph = graph
        self._generator = generator
        self._driver = driver
        self._synchronize = synchronize
        self._state: _State | None = None

    def advance(self, stream: int) -> Draw:
        """Write the generator's state for one launch on the current stream, and advance the generator; may raise DriverError."""
        state, generator = self._state, self._generator
        seed, offset = generator.initial_seed(), generator.get_offset()
        if state is None:
            self._graph.replay()
            return Draw(seed, offset, generator.get_offset())
        drawn = Draw(seed, offset, offset + state.advance)
        generator.set_offset(drawn.after)  # before the GIL is let go, and another thread draws
        try:
            self._write(state, drawn, stream)
        except DriverError:
            self.take_back(drawn)
            raise
        return drawn

    def take_back(self, drawn: Draw) -> None:
        """Put the generator back, as nothing was launched, and what is launched instead will advance it.

        If somebody has drawn since, it stays: those numbers would be drawn again.
        """
        if self._generator.get_offset() == drawn.after:
            self._generator.set_offset(drawn.before)

    def _write(self, state: _State, drawn: Draw, stream: int) -> None:
        state.writes[_SEED], state.writes[_OFFSET] = drawn.seed, drawn.before
        self._driver.write_words(stream, state.writes, _WRITES)

    def learn(self, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        """Find out where the state lies, of what kernels are given and is nothing else; if that cannot be told, go on as before.

        Return whether random numbers are drawn at all. The generator is as it was afterwards, and nobody else must draw from it meanwhile.
        Raises `UnfitError` if the state is in use on another stream.
        """
        with self.one_stream.lock:
            is_new = self.one_stream.enter(stream)
            draws = self._learn(addresses, stream)
            if is_new and not draws:
                self.one_stream.leave()
        return draws

    def _learn(self, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        began, draws = self._generator.get_offset(), False
        try:
            self._graph.replay()
            draws = self._generator.get_offset() != began
            if draws:
                with self._driver.relaxed():
                    self._state = self._find([each for each in set(addresses()) if self._is_word(each)])
                    if self._state is not None:
                        # Not every driver lets a stream write.
                        self._write(self._state, Draw(self._generator.initial_seed(), began, began), stream)
        except DriverError:
            self._state = None
        finally:
            if self._generator.get_offset() != began:
                self._generator.set_offset(began)
        return draws

    def _is_word(self, address: int) -> bool:
        aligned = address > 0 and address % _WORD == 0
        return aligned and self._driver.memory_type(address) is MemoryType.DEVICE

    def _find(self, addresses: list[int]) -> _State | None:
        generator, seeds, offsets, advance = self._generator, set(addresses), set(addresses), 0
        for _ in range(_ROUNDS):
            offset = generator.get_offset()
            self._graph.replay()
            self._synchronize()
            words = {address: self._driver.read_word(address) for address in addresses}
            seeds &= {address for address in addresses if words[address] == generator.initial_seed()}
            offsets &= {address for address in addresses if words[address] == offset}
            advance = generator.get_offset() - offset
        seeds -= offsets
        known = len(seeds) == len(offsets) == 1
        return _State(word_writes([seeds.pop(), offsets.pop()]), advance) if known else None

    def close(self) -> None:
        """Let go of PyTorch's graph."""
        self._graph.reset()
