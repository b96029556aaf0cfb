"""A call that is recorded and replayed without a GPU: operations, a recorder that emulates a capture of them, and a case of both."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch

from pygraphd.client.analysis.attention_rng import RngState
from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend.errors import TransientError
from pygraphd.client.common.report import Report
from pygraphd.client.recording import attention_host, recordings
from pygraphd.client.recording.capture import Capture
from pygraphd.client.recording.output_reserves import OutputReserve, OutputReserves
from pygraphd.client.recording.size_slot import Persistence
from pygraphd.client.replay.relocation_table import BLOCK, Span
from pygraphd.client.replay.rng import PhiloxRange
from pygraphd.client.replay.stream_affinity import StreamAffinity

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pygraphd.client.recording.aliased_memory import AliasedMemory
    from pygraphd.client.recording.recordings import Recordings
    from pygraphd.client.recording.size_slot import Size
    from pygraphd.client.replay.scratch import SharedScratch
    from pygraphd.schema.reasons import Reason
    from tests.support.emulator import Allocator, Emulator


class Operations(Protocol):
    """What a callable is made of: run at once, or recorded."""

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor: ...
    def accumulate(self, a: torch.Tensor, b: torch.Tensor) -> None: ...
    def first(self, a: torch.Tensor, n: int) -> torch.Tensor: ...
    def until(self, a: torch.Tensor) -> torch.Tensor: ...
    def look_up(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def random(self) -> torch.Tensor: ...
    def attention(self) -> tuple[torch.Tensor, torch.Tensor]: ...
    def number(self, scalar: torch.Tensor) -> torch.Tensor: ...
    def foreign(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def done(self, tensor: torch.Tensor) -> None: ...
    def reduce(self, a: torch.Tensor) -> torch.Tensor: ...


class Generator:
    """Counts the random numbers that were drawn."""

    def __init__(self) -> None:
        self.seed = self.offset = 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


class AsKernels:
    """Runs at once, with results in fresh memory."""

    def __init__(self, allocator: Allocator, generator: Generator) -> None:
        self._allocator = allocator
        self._generator = generator
        self.comm = ctypes.c_int64()
        """Counts how often collectives have run, as KERNELS or in replays."""

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self._allocator.tensor(a + b)

    def accumulate(self, a: torch.Tensor, b: torch.Tensor) -> None:
        a += b

    def first(self, a: torch.Tensor, n: int) -> torch.Tensor:
        return self._allocator.tensor(a[:n])

    def until(self, a: torch.Tensor) -> torch.Tensor:
        return self._allocator.tensor(2 * a)

    def look_up(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._allocator.tensor(tensor)

    def random(self) -> torch.Tensor:
        self._generator.offset += 4
        return self._allocator.tensor(torch.full((2,), float(self._generator.offset)))

    def attention(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return seed and offset of a second draw within the call, on the host."""
        began = self._generator.offset
        self._generator.offset += 8
        return torch.tensor(self._generator.seed), torch.tensor(began + 4)

    def number(self, scalar: torch.Tensor) -> torch.Tensor:
        """Return a copy of an integer that is given on the host."""
        return self._allocator.tensor(torch.tensor(int(scalar)))

    def foreign(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def done(self, tensor: torch.Tensor) -> None:
        """Let go of a tensor."""

    def reduce(self, a: torch.Tensor) -> torch.Tensor:
        """Return the sum over two ranks that hold the same."""
        self.comm.value += 1
        return self._allocator.tensor(2 * a)


class ArenaReserves(OutputReserves):
    """Output reserves in the memory of a recording."""

    def __init__(self, reserves: Sequence[OutputReserve], recording: Recording) -> None:
        self._recording = recording
        self.places: set[int] = set()
        super().__init__(reserves, torch.device("cpu"))
        self.begin()

    def storage(self, size: int) -> torch.UntypedStorage:
        place = self._recording.arena.allocate(size // 4)
        self.places.add(place.data_ptr())
        return place.untyped_storage()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._recording.graph.copy(to, source)


class Recording:
    """Records, as a capture does: results lie in the arena, and are not computed."""

    def __init__(self, emulator: Emulator, state: torch.Tensor, comm: ctypes.c_int64, base: int = 0) -> None:
        self.graph = emulator.graph()
        self._comm = comm
        self.arena = emulator.arena(base=base)
        self._state = state
        self.drawn = 0
        self.attentions = 0
        self.tables: list[Any] = []
        self.reserves = ArenaReserves((), self)
        """`add` allocates as Inductor's code does; other operations are a library's."""
        self.released = False

    def release(self) -> None:
        self.released = True

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = self.reserves.allocate(
            lambda size, *_: self.arena.allocate(size[0]), (a.numel(),), (1,), torch.float32
        )
        self.graph.add(a, b, out)
        return out

    def accumulate(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.graph.accumulate(a, b)

    def reduce(self, a: torch.Tensor) -> torch.Tensor:
        out = self.arena.allocate(a.numel())
        self.graph.reduce(self._comm, a, out)
        return out

    def first(self, a: torch.Tensor, n: int) -> torch.Tensor:
        """Hand a kernel a structure in whose gap half of its own address has been left."""
        out = self.arena.allocate(n)
        self.graph.first(a, out, a.data_ptr() >> 32)
        return out

    def until(self, a: torch.Tensor) -> torch.Tensor:
        """Hand a kernel the address where its output ends."""
        out = self.arena.allocate(a.numel())
        self.graph.until(a, out)
        return out

    def look_up(self, tensor: torch.Tensor) -> torch.Tensor:
        out = self.arena.allocate(tensor.numel())
        self.tables.append((ctypes.c_void_p * 1)(tensor.data_ptr()))
        self.graph.through_table(self.tables[-1], out)
        return out

    def hide(self, tensor: torch.Tensor) -> None:
        """Write to a tensor by an address that no node shows."""
        self.tables.append((ctypes.c_void_p * 1)(tensor.data_ptr()))
        self.graph.into_table(self.tables[-1], tensor.numel())

    def random(self) -> torch.Tensor:
        self.drawn += 4
        out, zero = self.arena.allocate(2), self.arena.allocate(2)
        self.graph.set(zero, 0)
        self.graph.add(self._state, zero, out)
        return out

    def attention(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return seed and offset in memory of the device, where kernels write them."""
        self.drawn += 8
        self.attentions += 1
        seed, offset = (self.arena.allocate(2).view(torch.int64)[0] for _ in range(2))
        self.graph.copy(seed, self._state.view(torch.int64)[0])
        self.graph.copy(offset, self._state.view(torch.int64)[self.attentions])
        return seed, offset

    def number(self, scalar: torch.Tensor) -> torch.Tensor:
        """Return a copy of an integer that kernels find at its address."""
        out = self.arena.allocate(2).view(torch.int64)[0]
        self.graph.copy(out, scalar)
        return out

    def foreign(self, tensor: torch.Tensor) -> torch.Tensor:
        self.graph.copy(tensor, tensor)
        return tensor

    def done(self, tensor: torch.Tensor) -> None:
        """Have its memory be used again, if it lies in the capture's; what stands in for other inputs stays."""
        if self.arena.has(tensor) and tensor.data_ptr() not in self.reserves.places:
            self.arena.free(tensor)


class RngCursor:
    """Writes the generator's state to where recorded kernels read it."""

    def __init__(
        self, generator: Generator, state: torch.Tensor, recording: Recording, affinity: StreamAffinity
    ) -> None:
        self.affinity = affinity
        self._generator = generator
        self._state = state
        self._drawn, self._attentions = recording.drawn, recording.attentions
        self.closed = False

    def advance(self, stream: int) -> PhiloxRange:
        assert stream == 0
        seed, began = self._generator.seed, self._generator.offset
        self._state.fill_(began + 4)
        if self._attentions:
            words = [seed, *(began + 4 + 8 * i for i in range(self._attentions))]
            self._state.view(torch.int64)[: len(words)] = torch.tensor(words, device="cpu")
        self._generator.offset += self._drawn
        return PhiloxRange(seed % (1 << 64), began, self._generator.offset)

    def take_back(self, drawn: PhiloxRange) -> None:
        self._generator.offset = drawn.before

    def learn(self, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        assert stream == 0
        assert (self._state.data_ptr() in addresses()) == (self._drawn > 0)
        return self._drawn > 0

    def close(self) -> None:
        self.closed = True


class HostRecorder:
    """Records callables that are made of `Operations`."""

    def __init__(self, emulator: Emulator, allocator: Allocator, memory_bytes: int = 0) -> None:
        self.driver = emulator.driver
        self.memory_bytes = memory_bytes
        self.peak_of_a_call = 0
        self.device = torch.device("cpu")
        self.generator = Generator()
        self.random_numbers = StreamAffinity(emulator.driver, lambda: bool)
        self.as_kernels = AsKernels(allocator, self.generator)
        self.operations: Operations = self.as_kernels
        self.cursors: list[RngCursor] = []
        self.recordings: list[Recording] = []
        self.captures = 0
        self.emptied_before: list[int] = []
        self.cleared_before: list[int] = []
        self.beside: Callable[[], int] = int
        """Returns how many bytes a test has seen allocated."""
        self.workspaces_beside: list[int] = []
        """How many captures there had been each time that the allocator's cache was emptied before one."""
        self.reserves: list[Sequence[OutputReserve]] = []
        self.backings: list[int] = []
        self.free = self.peak = 1 << 40
        """Bytes that may be allocated, in all and without reserving more than ever before."""
        self.addresses = 0
        self.refuses: str | None = None
        self._capturing = False
        self.current_device = 0
        self.between: Callable[[], None] = lambda: None
        self.next_check_at = 0.0
        self.marks_apart_ms = 0.0
        self.noted = 0
        self.watch = SimpleNamespace(begin=lambda _: None, note=self._note)
        self.idle: list[bool] = []
        self.may_wait_next: list[bool] = []
        """Whether the GPU is idle in time, when that is asked next."""
        self._emulator = emulator
        self._allocator = allocator

    def compiled(self, body: Callable[[Operations, list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a callable as Inductor makes them: it clears its list of inputs."""

        def run_kernels(inputs: list[Any]) -> Any:
            mine = list(inputs)
            inputs.clear()
            return body(self.operations, mine)

        return run_kernels

    def capture(
        self,
        run_kernels: Callable[[list[Any]], Any],
        inputs: list[Any],
        reserves: Sequence[OutputReserve] = (),
        *,
        backing: int = 0,
        addresses: AliasedMemory | None = None,
        is_shifted: bool = False,
        may_draw: bool = True,
    ) -> Capture:
        self.captures += 1
        self.reserves.append(reserves)
        self.backings.append(backing)
        self.between()
        if self.refuses is not None:
            raise TransientError(self.refuses)
        state = self._allocator.tensor(torch.zeros(BLOCK // 4))
        base = addresses.free.start if addresses is not None else 0
        recording = Recording(self._emulator, state, self.as_kernels.comm, base)
        self.operations = recording
        if is_shifted:
            recording.arena.allocate(1)
            recording.arena.allocations.clear()
        try:
            recording.reserves = ArenaReserves(reserves, recording)
            outputs = recording.reserves.place(run_kernels(inputs))
        except BaseException:
            self.driver.destroy_graph(recording.graph.handle)
            raise
        finally:
            self.operations = self.as_kernels
        cursor = RngCursor(self.generator, state, recording, self.random_numbers)
        self.cursors.append(cursor)
        self.recordings.append(recording)
        held = (Span(state.data_ptr(), state.data_ptr() + BLOCK),)
        spans = tuple(recording.arena.allocations)
        return Capture(
            recording.graph.handle,
            list(outputs),
            spans,
            held,
            cursor=cursor,  # type: ignore[arg-type] # it stands in for one
            pool=recording,
            reserves=tuple(reserves),
            backing=backing,
            addresses=addresses,
            allocated=tuple(recording.reserves.allocated),
        )

    def addresses_for_capture(self) -> int:
        return self.addresses

    def why_not(self) -> str | None:
        return self.refuses

    def make_ready(self) -> None:
        self.empty_cache(with_workspaces=True)

    def empty_cache(self, *, with_workspaces: bool = False) -> None:
        self.emptied_before.append(self.captures)
        if with_workspaces:
            self.cleared_before.append(self.captures)

    def trim(self) -> None:
        pass

    def allocate_workspace(self) -> None:
        self.workspaces_beside.append(self.beside())

    def _note(self, timeout_s: float | None) -> None:
        self.noted += timeout_s is not None

    def is_idle_within(self, limit_s: float) -> bool:
        return self.idle.pop(0) if self.idle else True

    def may_wait(self) -> bool:
        return self.may_wait_next.pop(0) if self.may_wait_next else True

    def mark(self) -> Any:
        return SimpleNamespace(elapsed_time=lambda _: self.marks_apart_ms, synchronize=lambda: None)

    def free_bytes(self) -> int:
        return min(self.free, self.memory_bytes or self.free)

    def bytes_of_a_call(self) -> int:
        return self.peak_of_a_call

    def below_peak(self) -> int:
        return self.peak

    @property
    def capturing(self) -> bool:
        """Whether the user captures the current stream."""
        return self._capturing

    @capturing.setter
    def capturing(self, capturing: bool) -> None:
        self._capturing = capturing
        self._emulator.capturing(capturing)

    def in_capture(self) -> bool:
        assert self.current_device == 0
        return self.capturing or self.operations is not self.as_kernels

    @property
    def conditions(self) -> tuple[tuple[Callable[[], object], object], ...]:
        return ((lambda: self.current_device, 0),)

    def on_device(self) -> contextlib.AbstractContextManager[object] | None:
        return None if self.current_device == 0 else self._switch()

    @contextlib.contextmanager
    def _switch(self) -> Iterator[None]:
        before, self.current_device = self.current_device, 0
        yield
        self.current_device = before


class Case:
    """A callable under test, its report, and what is needed to call it."""

    def __init__(self, emulator: Emulator, allocator: Allocator) -> None:
        self.emulator = emulator
        self.allocator = allocator
        self.recorder = HostRecorder(emulator, allocator)
        self.report = Report()
        self._made: list[Recordings] = []
        self._nodes_gone = 0
        self.wrong: list[tuple[Size, Reason]] = []

    def make(
        self,
        body: Callable[[Operations, list[Any]], Any],
        undefined: frozenset[int] = frozenset(),
        max_recordings: int = recordings.MAX_RECORDINGS,
        state: RngState = RngState(),  # noqa: B008 - it is frozen
    ) -> Recordings:
        return self.made(body, GraphFacts(undefined, state=state), max_recordings)

    def made(
        self,
        body: Callable[[Operations, list[Any]], Any],
        facts: GraphFacts,
        max_recordings: int = recordings.MAX_RECORDINGS,
        recheck_s: float = 0.0,
        groups: Any = None,
        scratch: SharedScratch | None = None,
    ) -> Recordings:
        run_kernels = self.recorder.compiled(body)
        recorder: Any = self.recorder
        more = max_recordings, recheck_s, lambda *failed: self.wrong.append(failed), scratch
        made = attention_host.make_recordings(run_kernels, recorder, self.report, facts, *more, groups=groups)
        self._made.append(made)
        return made

    def floats(self, *values: float) -> torch.Tensor:
        return self.allocator.tensor(torch.tensor(values, dtype=torch.float32))

    def expect(self, **counts: int) -> None:
        assert {name: self.report.counts[name] for name in counts} == counts

    def forget(self, made: Recordings) -> None:
        self._made.remove(made)  # nobody closes them: their nodes stay in the summary
        self._nodes_gone += sum(slot.nodes for slot in made._slots.values())

    def close(self) -> None:
        for made in self._made:
            made.close()
        assert self.report.summary()["nodes_in_graphs"] == self._nodes_gone
        assert all(cursor.closed for cursor in self.recorder.cursors)
        assert all(recording.released for recording in self.recorder.recordings)


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Any:
    case = Case(emulator, allocator)
    yield case
    case.close()


def is_transient(run: Recordings) -> bool:
    refusal = run._refusal()
    return refusal is not None and refusal.persistence is Persistence.TRANSIENT


def add(operations: Operations, inputs: list[Any]) -> Any:
    return (operations.add(inputs[0], inputs[1]),)


def accumulate(operations: Operations, inputs: list[Any]) -> Any:
    operations.accumulate(inputs[0], inputs[1])
    return ()
