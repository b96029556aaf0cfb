"""A compiled callable as relocatable graphs: recorded when it comes back, verified before it serves, launched otherwise."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import torch

from pygraphd.client.analysis.attention_rng import State
from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend import torch_private
from pygraphd.client.common.report import Report
from pygraphd.client.recording import attention_host, builder, comparison, pipeline, recordings, verification
from pygraphd.client.recording.builder import Capture
from pygraphd.client.recording.output_reserves import Room, Rooms
from pygraphd.client.recording.refusals import Persistence
from pygraphd.client.replay.node_params import OpaqueError, Parameters, PassingError
from pygraphd.client.replay.relocation_table import BLOCK, Share, Span
from pygraphd.client.replay.rng import Draw
from pygraphd.client.replay.stream_affinity import OTHER_STREAM, OneStream

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from pygraphd.client.recording.recordings import Recordings
    from tests.support.emulator import Allocator, Emulator

pytestmark = pytest.mark.torch


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


class Generator:
    """Counts the random numbers that were drawn."""

    def __init__(self) -> None:
        self.seed = self.offset = 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


class Launching:
    """Runs at once, with results in fresh memory."""

    def __init__(self, allocator: Allocator, generator: Generator) -> None:
        self._allocator = allocator
        self._generator = generator

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


class ArenaRooms(Rooms):
    """Rooms in the memory of a recording."""

    def __init__(self, rooms: Sequence[Room], recording: Recording) -> None:
        self._recording = recording
        self.places: set[int] = set()
        super().__init__(rooms, torch.device("cpu"))

    def storage(self, size: int) -> torch.UntypedStorage:
        place = self._recording.arena.allocate(size // 4)
        self.places.add(place.data_ptr())
        return place.untyped_storage()

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self._recording.graph.copy(to, source)


class Recording:
    """Records, as a capture does: results lie in the arena, and are not computed."""

    def __init__(self, emulator: Emulator, state: torch.Tensor) -> None:
        self.graph = emulator.graph()
        self.arena = emulator.arena()
        self._state = state
        self.drawn = 0
        self.attentions = 0
        self.tables: list[Any] = []
        self.rooms = ArenaRooms((), self)
        """`add` allocates as Inductor's code does; other operations are a library's."""
        self.released = False

    def release(self) -> None:
        self.released = True

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = self.rooms.allocate(
            lambda size, *_: self.arena.allocate(size[0]), (a.numel(),), (1,), torch.float32
        )
        self.graph.add(a, b, out)
        return out

    def accumulate(self, a: torch.Tensor, b: torch.Tensor) -> None:
        self.graph.accumulate(a, b)

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
        if self.arena.has(tensor) and tensor.data_ptr() not in self.rooms.places:
            self.arena.free(tensor)


class Ticket:
    """Writes the generator's state to where recorded kernels read it."""

    def __init__(
        self, generator: Generator, state: torch.Tensor, recording: Recording, one_stream: OneStream
    ) -> None:
        self.one_stream = one_stream
        self._generator = generator
        self._state = state
        self._drawn, self._attentions = recording.drawn, recording.attentions
        self.closed = False

    def advance(self, stream: int) -> Draw:
        assert stream == 0
        seed, began = self._generator.seed, self._generator.offset
        self._state.fill_(began + 4)
        if self._attentions:
            words = [seed, *(began + 4 + 8 * i for i in range(self._attentions))]
            self._state.view(torch.int64)[: len(words)] = torch.tensor(words, device="cpu")
        self._generator.offset += self._drawn
        return Draw(seed % (1 << 64), began, self._generator.offset)

    def take_back(self, drawn: Draw) -> None:
        self._generator.offset = drawn.before

    def learn(self, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        assert stream == 0
        assert (self._state.data_ptr() in addresses()) == (self._drawn > 0)
        return self._drawn > 0

    def close(self) -> None:
        self.closed = True


class HostRecorder:
    """Records callables that are made of `Operations`."""

    def __init__(self, emulator: Emulator, allocator: Allocator) -> None:
        self.driver = emulator.driver
        self.device = torch.device("cpu")
        self.generator = Generator()
        self.random_numbers = OneStream(emulator.driver, lambda: bool)
        self.launching = Launching(allocator, self.generator)
        self.operations: Operations = self.launching
        self.tickets: list[Ticket] = []
        self.recordings: list[Recording] = []
        self.captures = 0
        self.rooms: list[Sequence[Room]] = []
        self.grounds: list[int] = []
        self.free = 1 << 40
        self.refuses: str | None = None
        self.capturing = False
        self.current_device = 0
        self.between: Callable[[], None] = lambda: None
        self._emulator = emulator
        self._allocator = allocator

    def compiled(self, body: Callable[[Operations, list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return a callable as Inductor makes them: it clears its list of inputs."""

        def launch(inputs: list[Any]) -> Any:
            mine = list(inputs)
            inputs.clear()
            return body(self.operations, mine)

        return launch

    def capture(
        self,
        launch: Callable[[list[Any]], Any],
        inputs: list[Any],
        rooms: Sequence[Room] = (),
        *,
        ground: int = 0,
        is_shifted: bool = False,
    ) -> Capture:
        self.captures += 1
        self.rooms.append(rooms)
        self.grounds.append(ground)
        self.between()
        if self.refuses is not None:
            raise PassingError(self.refuses)
        state = self._allocator.tensor(torch.zeros(BLOCK // 4))
        recording = Recording(self._emulator, state)
        self.operations = recording
        if is_shifted:
            recording.arena.allocate(1)
            recording.arena.allocations.clear()
        try:
            recording.rooms = ArenaRooms(rooms, recording)
            outputs = recording.rooms.settle(launch(inputs))
        except BaseException:
            self.driver.destroy_graph(recording.graph.handle)
            raise
        finally:
            self.operations = self.launching
        ticket = Ticket(self.generator, state, recording, self.random_numbers)
        self.tickets.append(ticket)
        self.recordings.append(recording)
        held = (Span(state.data_ptr(), state.data_ptr() + BLOCK),)
        spans = tuple(recording.arena.allocations)
        return Capture(
            recording.graph.handle,
            list(outputs),
            spans,
            held,
            ticket=ticket,
            pool=recording,
            rooms=tuple(rooms),
            ground=ground,
            made=tuple(recording.rooms.made),
        )

    def why_not(self) -> str | None:
        return self.refuses

    def trim(self) -> None:
        pass

    def room(self) -> int:
        return self.free

    def in_capture(self) -> bool:
        assert self.current_device == 0
        return self.capturing or self.operations is not self.launching

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

    def make(
        self,
        body: Callable[[Operations, list[Any]], Any],
        undefined: frozenset[int] = frozenset(),
        max_recordings: int = recordings.MAX_RECORDINGS,
        state: State = State(),  # noqa: B008 - it is frozen
    ) -> Recordings:
        return self.made(body, GraphFacts(undefined, state=state), max_recordings)

    def made(
        self,
        body: Callable[[Operations, list[Any]], Any],
        facts: GraphFacts,
        max_recordings: int = recordings.MAX_RECORDINGS,
        recheck_s: float = 0.0,
    ) -> Recordings:
        launch = self.recorder.compiled(body)
        made = attention_host.make_recordings(
            launch, self.recorder, self.report, facts, max_recordings, recheck_s
        )
        self._made.append(made)
        return made

    def floats(self, *values: float) -> torch.Tensor:
        return self.allocator.tensor(torch.tensor(values, dtype=torch.float32))

    def expect(self, **counts: int) -> None:
        assert {name: self.report.counts[name] for name in counts} == counts

    def close(self) -> None:
        for made in self._made:
            made.close()
        assert self.report.summary()["nodes_in_graphs"] == 0
        assert all(ticket.closed for ticket in self.recorder.tickets)
        assert all(recording.released for recording in self.recorder.recordings)


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Any:
    case = Case(emulator, allocator)
    yield case
    case.close()


def is_transient(run: Recordings) -> bool:
    refusal = run.refusal_of()
    return refusal is not None and refusal.persistence is Persistence.TRANSIENT


def add(operations: Operations, inputs: list[Any]) -> Any:
    return (operations.add(inputs[0], inputs[1]),)


def accumulate(operations: Operations, inputs: list[Any]) -> Any:
    operations.accumulate(inputs[0], inputs[1])
    return ()


def test_it_is_recorded_when_it_comes_back_and_then_replayed(case: Case) -> None:
    run = case.make(add)

    results = [run([case.floats(i, i), case.floats(1, 2)])[0] for i in range(10)]

    assert [each.tolist() for each in results] == [[i + 1.0, i + 2.0] for i in range(10)]
    case.expect(captured=1, staged=0)
    assert case.report.summary()["nodes_in_graphs"] == 1
    assert case.report.fallbacks == {recordings.NOT_YET: 1}
    assert case.recorder.captures == run.recordings == 1
    assert run.refusal is None


def test_it_is_not_recorded_while_the_helper_is_coming(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the calls meanwhile are told from such that are what later ones will be."""
    left = 3

    def is_coming() -> bool:
        nonlocal left
        left -= 1
        return left >= 0

    monkeypatch.setattr("pygraphd.client.replay.native.ffi.helper.is_coming", is_coming)
    run, prepared = case.make(add), []
    for _ in range(6):
        before = run.prepared
        assert run([case.floats(1, 2), case.floats(3, 4)])[0].tolist() == [4, 6]
        prepared.append(run.prepared - before)

    assert prepared == [0, 1, 1, 1, 2, 0]  # at last a capture and its executable
    assert case.report.fallbacks == {recordings.NOT_YET: 1, recordings.HELPER_IS_COMING: 3}
    case.expect(captured=1, staged=0)


def test_what_recording_takes_is_counted_once_and_not_the_call_that_is_launched_meanwhile(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        time.sleep(0.03 if operations is case.recorder.launching else 0.02)
        return (operations.add(inputs[0], inputs[1]),)

    monkeypatch.setattr(case.recorder, "trim", lambda: time.sleep(0.01))
    run = case.make(body)
    run([case.floats(0), case.floats(1)])
    assert case.report.recording_ms == 0

    began = time.perf_counter()
    run([case.floats(1), case.floats(1)])
    whole_ms = (time.perf_counter() - began) * 1e3
    counted_ms = case.report.recording_ms
    run([case.floats(2), case.floats(1)])

    assert 20 + 2 * 10 <= counted_ms <= whole_ms - 30
    assert case.report.recording_ms == counted_ms


def test_another_device_may_be_the_current_one(case: Case) -> None:
    run = case.make(add)
    case.recorder.current_device = 1

    for i in range(4):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]

    assert case.recorder.current_device == 1
    case.expect(captured=1)


def test_a_call_that_is_recorded_changes_its_inputs_once(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0], inputs[1])
        return (inputs[0],)

    run = case.make(body)
    total = case.floats(0, 0)

    for count in range(1, 6):
        assert run([total, case.floats(1, 2)])[0] is total
        assert total.tolist() == [count, 2 * count]

    case.expect(captured=1)


def test_random_numbers_go_on_as_if_launched(case: Case) -> None:
    def body(operations: Operations, _: list[Any]) -> Any:
        return (operations.random(),)

    run = case.make(body)

    drawn = [run([case.floats(0)])[0].tolist()[0] for _ in range(6)]

    assert drawn == [4, 8, 12, 16, 20, 24]
    case.expect(captured=1)
    assert [ticket.closed for ticket in case.recorder.tickets] == [False]


def test_who_draws_no_random_numbers_pays_for_none(case: Case) -> None:
    run = case.make(add)

    for _ in range(2):
        run([case.floats(1), case.floats(2)])

    assert [ticket.closed for ticket in case.recorder.tickets] == [True]


def test_who_draws_no_random_numbers_is_tried_while_another_stream_does(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Ticket.learn

    def learn(ticket: Ticket, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        draws = original(ticket, addresses, stream)
        ticket.one_stream.move(7)
        return draws

    monkeypatch.setattr(Ticket, "learn", learn)
    run = case.make(add)

    for _ in range(3):
        run([case.floats(1), case.floats(2)])

    case.expect(captured=1)
    assert set(case.report.fallbacks) == {recordings.NOT_YET}


def test_after_an_interrupt_while_addresses_are_written_calls_are_right(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    run = case.make(add)
    for i in range(3):
        run([case.floats(i), case.floats(1)])
    with monkeypatch.context() as patch:
        patch.setattr(Parameters, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run([case.floats(7), case.floats(1)])

    for i in range(3):
        (result,) = run([case.floats(i), case.floats(2)])
        assert result.tolist() == [i + 2.0]
    case.expect(captured=1)


def test_an_input_that_no_node_shows_is_staged(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        return operations.look_up(inputs[1]), operations.add(inputs[0], inputs[0])

    run = case.make(body)
    results = []
    for i in range(5):
        first, second = run([case.floats(i, i), case.floats(10 * i, 1)])
        results.append((first.tolist(), second.tolist()))

    assert results == [([10.0 * i, 1.0], [2.0 * i] * 2) for i in range(5)]
    case.expect(captured=1, staged=1)
    assert case.recorder.captures == 3  # it might have been chance
    told = "verification: output 0 differs in what are numbers"
    assert case.report.fallbacks == {recordings.NOT_YET: 1, told: 2}


def test_an_input_that_is_not_used_is_not_staged(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for i in range(4):
        assert run([case.floats(i), case.floats(7)])[0].tolist() == [2 * i]

    case.expect(captured=1, staged=0)
    assert case.recorder.captures == 1


def test_sizes_are_recorded_when_they_come_back_and_never_without_end(case: Case) -> None:
    run = case.make(add)

    def call(n: int) -> None:
        a, b = (case.allocator.tensor(torch.rand(n)) for _ in range(2))
        expected = a + b
        assert torch.equal(run([a, b, n])[0], expected)

    for n in range(1, 101):
        call(n)
    case.expect(captured=0)
    assert case.report.fallbacks == {
        recordings.NOT_YET: recordings.MAX_SIZES,
        recordings.TOO_MANY_SIZES: 100 - recordings.MAX_SIZES,
    }

    for _ in range(10):
        for n in range(1, 21):
            call(n)

    case.expect(captured=recordings.CAPTURES_OF_EACH * recordings.MAX_RECORDINGS)
    assert run.recordings == recordings.MAX_RECORDINGS
    assert case.report.fallbacks[recordings.TOO_MANY_CAPTURES] > 0
    _, executables = case.emulator.live()
    assert executables <= recordings.MAX_RECORDINGS


def test_the_recording_that_was_not_used_for_longest_goes(case: Case) -> None:
    run = case.make(add)

    def call(n: int) -> None:
        run([case.allocator.tensor(torch.ones(n)), case.allocator.tensor(torch.ones(n)), n])

    for n in range(recordings.MAX_RECORDINGS):
        call(n + 1)
        call(n + 1)
    call(1)
    call(100)
    call(100)
    captured = case.recorder.captures

    call(1)
    assert case.recorder.captures == captured
    call(2)
    assert case.recorder.captures == captured + 1


def test_each_size_has_its_part_which_can_be_let_go_of(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        extra = case.floats(1, 1) if operations is case.recorder.launching else case.floats(1, 2)
        return (operations.add(inputs[0], extra if inputs[1] == 3 else inputs[0]),)

    run = case.make(body)
    parts = {n: run.at((n,)) for n in (1, 2, 3)}

    for _ in range(3):
        for n, part in parts.items():
            part([case.floats(n, n), n])

    assert {n: part.refusal for n, part in parts.items()} == {
        1: None, 2: None, 3: "verification: output 0 differs by 25 % of its largest value",
    }  # fmt: skip
    assert [part.refused_for_good for part in parts.values()] == [False, False, True]
    assert parts[1].at((3,)) == parts[3]
    assert run.recordings == 2
    first, second = run.replays
    parts[1]([case.floats(5, 6), 1])
    assert run.replays == (second, first)  # in the order of use
    assert run.replays[-1] is run._slots[(1,)].replay
    parts[1].close()
    parts[3].close()
    assert run.recordings == 1
    assert case.emulator.live()[1] == 1
    captures = case.recorder.captures
    assert parts[2]([case.floats(5, 6), 2])[0].tolist() == [10, 12]
    for _ in range(3):
        assert parts[1]([case.floats(5, 6), 1])[0].tolist() == [10, 12]
    assert case.recorder.captures == captures + 1


def test_a_size_that_will_not_be_recorded_any_more_is_refused_for_now(case: Case) -> None:
    """Else launched calls would be measured as relocated ones."""
    run = case.make(add, max_recordings=1)

    def call(n: int) -> None:
        run([case.allocator.tensor(torch.ones(n)), case.allocator.tensor(torch.ones(n)), n])

    for n in range(1, 10):
        call(n)
        call(n)

    assert run.at((recordings.CAPTURES_OF_EACH,)).refusal is None  # the last that was recorded
    late = run.at((20,))
    assert (late.refusal, late.refused_for_good) == (recordings.TOO_MANY_CAPTURES, False)


def test_sizes_that_are_let_go_of_make_room_among_those_that_are_remembered(case: Case) -> None:
    run = case.make(add)

    def call(n: int) -> None:
        run([case.allocator.tensor(torch.ones(n)), case.allocator.tensor(torch.ones(n)), n])

    for n in range(1, recordings.MAX_SIZES + 1):
        call(n)
    assert run.at((1000,)).refusal == recordings.TOO_MANY_SIZES

    run.at((1,)).close()

    assert run.at((1000,)).refusal is None


def test_memory_that_cannot_be_given_back_is_no_matter_of_the_call(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trim() -> None:
        raise RuntimeError("an error of the user's kernels, which CUDA tells whoever comes next")

    run = case.make(add)
    monkeypatch.setattr(case.recorder, "trim", trim)
    a, b = (case.allocator.tensor(torch.ones(4)) for _ in range(2))

    results = [run([a, b, 4])[0].tolist() for _ in range(4)]

    assert results == [[2.0] * 4] * 4
    assert case.report.counts["captured"] == 1
    assert case.report.failures == {"giving memory back: RuntimeError": 2}


def test_it_says_which_calls_have_prepared_what_later_ones_have(case: Case) -> None:
    run = case.make(add)
    a, b = (case.allocator.tensor(torch.ones(4)) for _ in range(2))

    prepared = []
    for _ in range(8):
        before = run.prepared
        run([a, b, 4])
        prepared.append(run.prepared != before)

    assert prepared == [False, True] + [False] * 6
    assert run.at((4,)).prepared == run.prepared


def test_how_many_recordings_there_are_can_be_set(case: Case) -> None:
    run = case.make(add, max_recordings=2)

    for _ in range(20):
        for n in range(1, 6):
            run([case.allocator.tensor(torch.ones(n)), case.allocator.tensor(torch.ones(n)), n])

    assert run.recordings == 2
    case.expect(captured=2 * recordings.CAPTURES_OF_EACH)


def test_an_output_that_differs_is_told_and_the_call_returns_the_right_one(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        extra = case.floats(1, 1) if operations is case.recorder.launching else case.floats(1, 2)
        return operations.add(inputs[0], inputs[0]), operations.add(inputs[0], extra)

    run = case.make(body)

    results = [run([case.floats(i, i)])[1].tolist() for i in range(4)]

    assert results == [[i + 1.0] * 2 for i in range(4)]
    case.expect(captured=0)
    assert run.refusal is not None
    assert run.refusal.startswith("verification: output 1 differs")
    assert run.refused_for_good
    told = {each: n for each, n in case.report.fallbacks.items() if each.startswith("verification")}
    assert sum(told.values()) == 3
    assert case.recorder.captures == 2


def looking_up(operations: Operations, inputs: list[Any]) -> Any:
    return operations.look_up(inputs[1]), operations.add(inputs[0], inputs[0])


def test_a_recording_that_disagrees_by_chance_is_made_once_more(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a kernel that adds in an order of its own decides which of two is the largest."""
    run, compare = case.make(add), comparison.compare
    verdicts = [comparison.Disagreement("output 0 differs", in_values=True)]
    monkeypatch.setattr(verification, "compare", lambda *each: verdicts.pop() if verdicts else compare(*each))

    for i in range(5):
        assert run([case.floats(i), case.floats(1), case.floats(7)])[0].tolist() == [i + 1]

    case.expect(captured=1, staged=0)  # the third input, which is not used, has no buffer
    assert run.refusal is None


def test_what_has_agreed_may_disagree_by_chance_when_it_is_recorded_again(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, compare = case.make(add), comparison.compare
    verdicts: list[comparison.Disagreement] = []
    monkeypatch.setattr(verification, "compare", lambda *each: verdicts.pop() if verdicts else compare(*each))

    for _ in range(3):
        verdicts.append(comparison.Disagreement("output 0 differs", in_values=True))
        for i in range(5):
            assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]
        run.let_go_at(())

    case.expect(captured=3)


def test_what_stands_in_for_an_index_holds_other_indices(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run, index, others = case.make(add), torch.arange(8), verification.other_indices
    given: list[torch.Tensor] = []

    def noted(indices: torch.Tensor) -> torch.Tensor:
        given.append(indices)
        return others(indices)

    monkeypatch.setattr(verification, "other_indices", noted)
    for i in range(3):
        assert run([case.floats(i), case.floats(1), index])[0].tolist() == [i + 1]

    assert [each is index for each in given] == [True]
    case.expect(captured=1)


def test_what_disagrees_otherwise_each_time_may_agree_in_the_next_process(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = case.make(add)
    outputs = iter(range(100))
    differs = lambda *_: comparison.Disagreement(f"output {next(outputs)} differs", in_values=True)  # noqa: E731
    monkeypatch.setattr(verification, "compare", differs)

    for i in range(6):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]

    assert (run.refusal, run.refused_for_good) == ("verification: output 1 differs", False)
    assert case.recorder.captures == 2


def test_what_is_staged_in_vain_is_not_counted(case: Case) -> None:
    values = itertools.count()

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return operations.look_up(inputs[1]), operations.add(inputs[0], case.floats(next(values)))

    run = case.make(body)
    for i in range(8):
        run([case.floats(i), case.floats(i)])

    case.expect(captured=0, staged=0)
    assert case.recorder.captures == 3
    assert run.refused_for_good


def test_memory_that_is_short_while_results_are_compared_refuses_nothing_for_good(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    run = case.make(looking_up)
    with monkeypatch.context() as patch:
        patch.setattr(verification, "compare", full)
        for i in range(3):
            assert run([case.floats(1), case.floats(i)])[0].tolist() == [i]

    assert (run.refusal, run.refused_for_good) == ("verification failed: CUDA out of memory", False)
    assert is_transient(run)
    case.expect(captured=0, staged=0)


@pytest.mark.parametrize("values", [itertools.count(), itertools.cycle([1.0, -1.0])], ids=["counter", "mask"])
def test_what_the_host_hands_in_at_each_call_is_not_frozen(case: Case, values: Iterator[float]) -> None:
    """A recording would go on with the value that it was made with, as of a seed of the host's."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.add(inputs[0], case.floats(next(values))),)

    run = case.make(body)
    results = [run([case.floats(10)])[0].item() for _ in range(12)]

    assert len(set(results[-4:])) > 1
    case.expect(captured=0)
    assert run.refused_for_good


@pytest.mark.parametrize("undefined", [frozenset({1}), frozenset[int](), frozenset({0})])
def test_an_output_that_holds_nothing_needs_not_agree(case: Case, undefined: frozenset[int]) -> None:
    """Attention's seed may lie where a temporary lay: a recording leaves that there, a launched call what lay there before."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        used = operations.add(inputs[0], inputs[0])
        if isinstance(operations, Recording):
            temporary = operations.arena.allocate(4)
            operations.graph.set(temporary, 7)
            operations.arena.free(temporary)
            return used, operations.arena.allocate(4).view(torch.int64)
        return used, torch.tensor([12345, 8])

    run = case.make(body, undefined)
    for _ in range(4):
        run([case.floats(1, 1)])

    case.expect(captured=1 in undefined)
    assert run.refusal == (
        None if 1 in undefined else "verification: output 1 differs in 100 % of its elements"
    )


def test_an_output_that_holds_nothing_has_its_form_all_the_same(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        used = operations.add(inputs[0], inputs[0])
        if isinstance(operations, Recording):
            return used, operations.arena.allocate(4)
        return used, case.floats(1, 2, 3)

    run = case.make(body, frozenset({1}))
    for _ in range(4):
        run([case.floats(1, 1)])

    assert (run.refusal or "").startswith("verification: output 1 differs")


def test_a_seed_that_is_written_unseen_must_agree(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        used = operations.add(inputs[0], inputs[0])
        if not isinstance(operations, Recording):
            return used, torch.ones(1, dtype=torch.int64)
        seed = operations.arena.allocate(2)
        operations.hide(seed)
        operations.accumulate(seed, inputs[0])
        return used, seed.view(torch.int64)

    run = case.make(body)
    for _ in range(4):
        run([case.floats(1, 1)])

    assert run.refusal == "verification: it writes to where it was recorded"


def test_an_input_that_is_read_unseen_beside_a_node_that_shows_it_is_told(case: Case) -> None:
    """The recorded addresses still hold what the inputs held: only poison there shows it."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return operations.look_up(inputs[0]), operations.add(inputs[0], inputs[0])

    run = case.make(body)
    results = [run([case.floats(i, i)])[0].tolist() for i in range(4)]

    assert results == [[float(i)] * 2 for i in range(4)]
    assert (run.refusal or "").startswith("verification: output 0 differs")


def test_a_write_that_is_unseen_is_told_and_does_not_reach_the_users_tensor(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if isinstance(operations, Recording):
            operations.hide(inputs[0])
        operations.accumulate(inputs[0], inputs[1])
        return (operations.add(inputs[0], inputs[1]),)

    run = case.make(body)
    total = case.floats(0, 0)
    for count in range(1, 5):
        run([total, case.floats(1, 2)])
        assert total.tolist() == [count, 2 * count]

    assert run.refusal == "verification: it writes to where it was recorded"


def test_a_temporary_that_is_written_and_read_unseen_is_told(case: Case) -> None:
    """Every result is right until its memory belongs to somebody else."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if not isinstance(operations, Recording):
            return case.floats(2, 2), operations.add(inputs[0], inputs[0])
        temporary = operations.arena.allocate(2)
        operations.hide(temporary)
        return operations.look_up(temporary), operations.add(inputs[0], inputs[0])

    run = case.make(body)
    for _ in range(4):
        assert run([case.floats(1, 1)])[0].tolist() == [2, 2]

    assert run.refusal == "verification: it writes to where it was recorded"


def test_an_output_that_is_written_where_nobody_looks_is_told(case: Case) -> None:
    """Memory that is zero already does not make up for it."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        used = operations.add(inputs[0], inputs[0])
        if isinstance(operations, Recording):
            return used, operations.arena.allocate(2)
        return used, case.floats(0, 0)

    run = case.make(body)
    for _ in range(4):
        run([case.floats(1, 1)])

    assert (run.refusal or "").startswith("verification: output 1 differs")


def test_an_input_that_is_changed_otherwise_is_told(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0], inputs[1])
        if operations is case.recorder.launching:
            operations.accumulate(inputs[0], inputs[1])
        return (operations.add(inputs[1], inputs[1]),)

    run = case.make(body)
    total = case.floats(0, 0)

    for _ in range(4):
        run([total, case.floats(1, 1)])

    assert total.tolist() == [8, 8]
    assert (run.refusal or "").startswith("verification: input 0 differs")


def test_other_random_numbers_are_told(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is case.recorder.launching:
            case.recorder.generator.offset += 4
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for _ in range(4):
        run([case.floats(1, 1)])

    assert run.refusal == "verification: it draws another number of random numbers"
    assert case.recorder.generator.offset == 16


def test_an_output_in_memory_that_each_call_would_overwrite_is_told(case: Case) -> None:
    memory = case.floats(5, 5)

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return operations.foreign(memory), operations.add(inputs[0], inputs[0])

    run = case.make(body)
    for _ in range(4):
        assert run([case.floats(1, 1)])[0].tolist() == [5, 5]

    assert run.refusal == "verification: output 0 lies in memory that relocation does not know"


def test_a_not_a_number_is_as_good_as_another(case: Case) -> None:
    run = case.make(add)

    for _ in range(3):
        run([case.floats(float("nan"), float("inf")), case.floats(1, 2)])

    case.expect(captured=1)


def test_what_cannot_be_captured_is_launched_with_its_reason(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.launching:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for _ in range(4):
        assert run([case.floats(1, 1)])[0].tolist() == [2, 2]

    reason = "it cannot be captured: operation not permitted when stream is capturing"
    assert case.report.fallbacks == {recordings.NOT_YET: 1, reason: 3}
    assert case.recorder.captures == 1
    assert case.report.recording_ms > 0


@pytest.mark.parametrize("times", [1, pipeline.MAX_DISTURBED, 50])
def test_a_capture_that_another_thread_has_ended_is_tried_again_a_few_times(case: Case, times: int) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.launching and case.recorder.captures <= times:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture\nand more"
            )
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for _ in range(60):
        assert run([case.floats(1, 1)])[0].tolist() == [2, 2]

    lasts = times > pipeline.MAX_DISTURBED
    failed = pipeline.MAX_DISTURBED + 1 if lasts else times
    assert case.recorder.captures == (failed if lasts else failed + 1)
    assert case.report.fallbacks == {recordings.NOT_YET: 1, pipeline.INTERRUPTED: 59 if lasts else times}
    assert (run.refusal, run.refused_for_good) == (pipeline.INTERRUPTED if lasts else None, False)


def test_what_cannot_be_captured_in_a_new_thread_is_tried_again_there(case: Case) -> None:
    """As what a library makes at its first call in a thread cannot be made within a capture."""
    warm = set[int]()

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.launching and threading.get_ident() not in warm:
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")
        warm.add(threading.get_ident())
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    run([case.floats(1)])
    results: list[list[float]] = []
    thread = threading.Thread(
        target=lambda: results.extend(run([case.floats(each)])[0].tolist() for each in (2, 3, 4))
    )
    thread.start()
    thread.join()

    assert results == [[4], [6], [8]]
    assert case.report.fallbacks == {recordings.NOT_YET: 1, pipeline.NEW_THREAD: 1}
    assert (case.report.counts["captured"], run.refusal) == (1, None)


def test_what_new_threads_cannot_capture_is_not_tried_in_each_of_them(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.launching:
            raise RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED")
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    run([case.floats(1)])
    for _ in range(20):
        thread = threading.Thread(target=run, args=([case.floats(1)],))
        thread.start()
        thread.join()

    assert case.recorder.captures == pipeline.MAX_DISTURBED + 1
    assert (run.refusal, run.refused_for_good) == (pipeline.NEW_THREAD, False)


def doubled_up_to_the_end(operations: Operations, inputs: list[Any]) -> Any:
    """Two temporaries of a block each, side by side, and an output."""
    temporary = operations.until(inputs[0])
    return (operations.add(operations.add(temporary, temporary), inputs[0]),)


def test_where_memory_ends_is_found_if_what_follows_it_moves_along(case: Case) -> None:
    run = case.make(doubled_up_to_the_end)

    for value in range(4):
        assert run([case.floats(*[value] * 128)])[0].tolist() == [5 * value] * 128

    case.expect(captured=1)


def test_where_memory_ends_is_not_taken_for_where_other_memory_begins(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even in the trial, where it might end just there."""
    monkeypatch.setattr(builder, "SCRATCH", Share(1000, BLOCK))
    run = case.make(doubled_up_to_the_end)

    for value in range(4):
        assert run([case.floats(*[value] * 128)])[0].tolist() == [5 * value] * 128

    case.expect(captured=0)
    assert str(run.refusal).startswith("verification: output 0 differs")


def beyond(operations: Operations, inputs: list[Any]) -> Any:
    """A block of an output, and what a kernel writes behind it if there are more of its input."""
    out = operations.add(inputs[0][:128], inputs[0][:128])
    if isinstance(operations, Recording):
        wider = torch_private.memory_at(out.data_ptr(), 640, out.device).view(torch.float32)
        operations.graph.add(inputs[0], inputs[0], wider)
    return (out,)


def test_what_writes_beyond_its_memory_is_launched(case: Case) -> None:
    run = case.make(beyond)

    for value in range(4):
        assert run([case.floats(*[value] * 160)])[0].tolist() == [2 * value] * 128

    case.expect(captured=0)
    assert run.refusal == "verification: it writes beyond its memory"


def test_an_error_of_the_users_while_it_is_recorded_is_the_users(case: Case) -> None:
    fail = False

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if fail and operations is case.recorder.launching:
            raise ValueError("mine")
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    run([case.floats(1)])
    fail = True
    with pytest.raises(ValueError, match="mine"):
        run([case.floats(1)])
    fail = False

    assert run([case.floats(1)])[0].tolist() == [2]
    case.expect(captured=1)


@pytest.mark.parametrize("value", [1.5, "text"])
def test_an_input_of_another_kind_is_named(case: Case, value: object) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for _ in range(3):
        run([case.floats(1), value])

    assert run.refusal == f"input 1 is a {type(value).__name__}"
    assert case.recorder.captures == 0


def test_no_room_for_copies_is_a_reason(case: Case) -> None:
    run = case.make(add)
    case.recorder.free = 3 * BLOCK

    for _ in range(3):
        run([case.floats(1), case.floats(2)])

    assert run.refusal == pipeline.NO_ROOM
    assert not run.refused_for_good
    assert case.recorder.captures == 0


def test_no_room_for_the_launched_call_beside_a_trial_is_a_reason(case: Case) -> None:
    """Known only when it is recorded: what a call takes beside its inputs."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return tuple(operations.add(inputs[0], inputs[0]) for _ in range(20))

    run = case.make(body)
    case.recorder.free = 8 * BLOCK

    for _ in range(3):
        assert run([case.floats(*[1] * 100)])[19].tolist() == [2] * 100

    assert run.refusal == pipeline.NO_ROOM
    assert case.recorder.captures == 1


def test_within_a_capture_of_the_users_it_is_launched(case: Case) -> None:
    run = case.make(add)
    for _ in range(2):
        run([case.floats(1), case.floats(2)])
    case.recorder.capturing = True

    assert run([case.floats(3), case.floats(4)])[0].tolist() == [7]

    assert case.report.fallbacks[recordings.IN_A_CAPTURE] == 1
    case.recorder.capturing = False
    assert run([case.floats(3), case.floats(4)])[0].tolist() == [7]
    case.expect(captured=1)


def test_a_driver_call_that_fails_costs_the_recording_and_not_the_call(case: Case) -> None:
    run = case.make(add)
    for _ in range(2):
        run([case.floats(1), case.floats(2)])
    inputs = [case.floats(3), case.floats(4)]
    case.emulator.fail_at(1)

    assert run(inputs)[0].tolist() == [7]

    case.emulator.fail_at(0)
    assert run.recordings == 0
    assert run.refusal is not None
    assert "CUresult 999" in run.refusal
    assert not run.refused_for_good
    assert run([case.floats(5), case.floats(6)])[0].tolist() == [11]


def test_every_driver_call_of_a_recording_may_fail(case: Case) -> None:
    def calls_until(fail_at: int) -> int:
        run = case.make(add)
        run([case.floats(1), case.floats(2)])
        case.emulator.fail_at(fail_at)
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
        assert run([case.floats(2), case.floats(2)])[0].tolist() == [4]
        calls = case.emulator.calls()
        case.emulator.fail_at(0)
        assert (run.refusal is None) is (not 0 < fail_at <= calls)
        run.close()
        return calls

    before = case.emulator.live()
    for call in range(1, calls_until(0) + 1):
        calls_until(call)
        assert case.emulator.live() == before, f"call {call}"


def accumulate_and_draw(operations: Operations, inputs: list[Any]) -> Any:
    operations.accumulate(inputs[0], inputs[1])
    return operations.add(inputs[0], inputs[1]), operations.random()


def test_whichever_driver_call_of_a_replay_fails_what_is_drawn_and_changed_is_so_once(case: Case) -> None:
    failed = 0
    while True:
        run, total = case.make(accumulate_and_draw), case.floats(0, 0)
        for step in range(1, 6):
            began = case.recorder.generator.offset
            if step == 4:
                case.emulator.fail_at(failed + 1)
            added, drawn = run([total, case.floats(1, 2)])
            if step == 4:
                calls = case.emulator.calls()
                case.emulator.fail_at(0)
            assert total.tolist() == [step, 2 * step]
            assert added.tolist() == [step + 1, 2 * step + 2]
            assert drawn.tolist() == [began + 4] * 2
            assert case.recorder.generator.offset == began + 4
        if calls <= failed:
            break
        assert run.refusal is not None
        failed += 1
    assert failed >= 2  # at least one write, and the launch


def test_an_error_of_ours_costs_the_recording_and_not_the_call(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.client.recording.verification.copies_of", lambda *inputs: 1 // 0)
    run = case.make(add)

    for _ in range(3):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    assert run.refusal == "recording failed: integer division or modulo by zero"
    assert not run.refused_for_good


def test_an_error_of_ours_in_a_replay_is_launched(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = case.make(add)
    for _ in range(2):
        run([case.floats(1), case.floats(2)])
    with monkeypatch.context() as patch:
        patch.setattr("pygraphd.client.replay.exec_cache.Executables.bind", lambda *_: 1 // 0)
        assert run([case.floats(3), case.floats(4)])[0].tolist() == [7]

    assert case.report.fallbacks["a replay failed: ZeroDivisionError"] == 1
    assert run([case.floats(3), case.floats(4)])[0].tolist() == [7]
    case.expect(captured=1)


def test_out_of_memory_is_a_reason(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = case.make(add)
    for _ in range(2):
        run([case.floats(1), case.floats(2)])

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(type(case.allocator), "__call__", full)
    monkeypatch.setattr(type(case.recorder.launching), "add", lambda _self, a, b: a + b)

    inputs = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert run(inputs)[0].tolist() == [7]

    assert case.report.fallbacks[recordings.NO_MEMORY] == 1
    monkeypatch.undo()
    assert run([case.floats(3), case.floats(4)])[0].tolist() == [7]
    case.expect(captured=1)


def test_what_the_recorder_refuses_is_recorded_once_that_is_over(case: Case) -> None:
    """As while somebody records the history of the GPU's memory."""
    run = case.make(add)
    case.recorder.refuses = "the history is being recorded"
    for i in range(4):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]
    assert (run.refusal, run.refused_for_good) == ("the history is being recorded", False)
    assert is_transient(run)
    assert case.recorder.captures == 1  # it is only asked whether that is over

    case.recorder.refuses = None
    for i in range(3):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]

    assert run.refusal is None
    case.expect(captured=1)
    assert case.report.fallbacks == {recordings.NOT_YET: 1, "the history is being recorded": 3}


def test_what_is_refused_for_now_uses_up_no_captures(case: Case) -> None:
    run = case.make(add)
    case.recorder.refuses = "the history is being recorded"
    for size in range(40):
        for _ in range(2):
            run([case.floats(1), case.floats(2), size])
    case.recorder.refuses = None

    for _ in range(3):
        run([case.floats(1), case.floats(2), 3])

    case.expect(captured=1)


def test_room_that_is_there_again_is_found_after_some_calls(case: Case) -> None:
    run = case.make(add)
    case.recorder.free = 0
    for i in range(3):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]
    assert run.refusal == pipeline.NO_ROOM
    assert is_transient(run)
    case.recorder.free = 1 << 40

    for i in range(20):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]

    case.expect(captured=1)
    assert run.refusal is None


def draws_elsewhere(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have another stream draw random numbers, and never come to an end."""

    def learn(ticket: Ticket, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        ticket.one_stream.enter(stream)
        return True

    case.recorder.random_numbers.enter(7)
    monkeypatch.setattr(Ticket, "learn", learn)


def draw(operations: Operations, _: list[Any]) -> Any:
    return (operations.random(),)


def test_while_another_stream_draws_random_numbers_few_recordings_are_tried(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws_elsewhere(case, monkeypatch)
    run = case.make(draw)

    for _ in range(50):
        run([case.floats(1)])

    assert case.recorder.captures == pipeline.MAX_DISTURBED + 1
    assert (run.refusal, run.refused_for_good) == (OTHER_STREAM, False)


def test_once_another_stream_has_ended_it_is_recorded(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    draws_elsewhere(case, monkeypatch)
    run = case.make(draw)
    for _ in range(3):
        run([case.floats(1)])
    case.expect(captured=0)
    case.recorder.random_numbers.move(0)

    for _ in range(3):
        run([case.floats(1)])

    case.expect(captured=1)


def test_what_was_captured_too_often_says_so(case: Case) -> None:
    run = case.make(add, max_recordings=1)
    for _ in range(6):
        for size in range(3):
            run([case.floats(1), case.floats(2), size])
    run.close()

    assert (run.refusal, run.refused_for_good) == (recordings.TOO_MANY_CAPTURES, False)


def test_another_thread_launches_while_one_records(case: Case) -> None:
    run = case.make(add)
    run([case.floats(1), case.floats(2)])
    seen: list[Any] = []

    def other() -> None:
        # The recorder's own operations are what this thread would record with: it must launch.
        case.recorder.operations = case.recorder.launching
        seen.append(run([case.floats(5), case.floats(6)])[0].tolist())

    def between() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    case.recorder.between = between
    assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    assert seen == [[11]]
    assert case.report.fallbacks[recordings.BEING_RECORDED] == 1
    case.expect(captured=1)


def test_a_recorder_that_refuses_gives_the_reason(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OpaqueError("not today")

    monkeypatch.setattr(case.recorder, "capture", refuse)
    run = case.make(add)
    for _ in range(3):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    assert run.refusal == "not today"


def test_many_threads_take_turns(case: Case) -> None:
    run = case.make(add)
    for _ in range(2):
        run([case.floats(0), case.floats(0)])
    wrong: list[Any] = []

    def work(number: int) -> None:
        got = [run([case.floats(number), case.floats(i)])[0].item() for i in range(200)]
        wrong.extend(set(got) ^ {float(number + i) for i in range(200)})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    case.expect(captured=1)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_call_is_recorded(case: Case, *, enabled: bool) -> None:
    seen: list[bool] = []

    def body(operations: Operations, inputs: list[Any]) -> Any:
        seen.append(gc.isenabled())
        return (operations.add(inputs[0], inputs[1]),)

    run = case.make(body)
    (gc.enable if enabled else gc.disable)()
    try:
        for _ in range(3):
            run([case.floats(1), case.floats(2)])
        after = gc.isenabled()
    finally:
        gc.enable()

    assert seen == [enabled, False, enabled]  # launched, recorded, launched to compare; then replayed
    assert after is enabled
