"""Random numbers of a recording: the generator's state is handed to its kernels before each launch, and advanced.

PyTorch keeps the seed and the offset that captured kernels read in two tensors that live as long as its graph, and its `replay`
writes them by a kernel each and launches the graph: 20 to 60 us of the host's time, even if there is nothing left in the graph. Once it
is known where they lie, the driver writes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pygraphd.client.driver import DriverError, MemoryType

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from pygraphd.client.driver import Driver

_ROUNDS = 2
_WORD = 8


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


@dataclass(frozen=True, slots=True)
class _State:
    """Where kernels read the seed and the offset, and by how much a launch advances the latter."""

    seed: int
    offset: int
    advance: int


class GeneratorTicket:
    """A captured graph emptied of its nodes: replaying it does what PyTorch does for random numbers, and nothing else."""

    def __init__(
        self, graph: Graph, generator: Generator, driver: Driver, synchronize: Callable[[], None]
    ) -> None:
        """Take over `graph`; `synchronize` waits for what is queued on the current stream."""
        self._graph = graph
        self._generator = generator
        self._driver = driver
        self._synchronize = synchronize
        self._state: _State | None = None

    def advance(self, stream: int) -> None:
        """Write the generator's state for one launch on the current stream, and advance the generator; may raise DriverError."""
        state = self._state
        if state is None:
            self._graph.replay()
            return
        generator = self._generator
        offset = generator.get_offset()
        self._driver.write_word(stream, state.seed, generator.initial_seed())
        self._driver.write_word(stream, state.offset, offset)
        generator.set_offset(offset + state.advance)

    def learn(self, addresses: Collection[int], stream: int) -> None:
        """Find out where the state lies, of what kernels are given and is nothing else; if that cannot be told, go on as before.

        The generator is as it was afterwards, and nobody else must draw from it meanwhile.
        """
        began = self._generator.get_offset()
        try:
            self._graph.replay()
            if self._generator.get_offset() != began:
                with self._driver.relaxed():
                    self._state = self._find([each for each in set(addresses) if self._is_word(each)])
                    self._try_to_write(began, stream)
        except DriverError:
            self._state = None
        finally:
            self._generator.set_offset(began)

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
        return _State(seeds.pop(), offsets.pop(), advance) if known else None

    def _try_to_write(self, offset: int, stream: int) -> None:
        # Not every driver lets a stream write to memory.
        if self._state is not None:
            self._driver.write_word(stream, self._state.offset, offset)

    def close(self) -> None:
        """Let go of PyTorch's graph."""
        self._graph.reset()
