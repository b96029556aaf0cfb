"""A whole call is done by the compiled helper in one go, wherever it lies; one that does not fit is told step by step."""

from __future__ import annotations

import shutil
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import FallbackError
from pygraphd.client.replay.relocation_table import BLOCK
from pygraphd.client.replay.rng import PhiloxRange
from tests.support.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.client.replay.replay import Replay
    from tests.support.emulator import Emulator

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]

FLOATS = 8
CPU = torch.device("cpu")


class Blocks:
    """Gives out the first block that nobody holds, as an allocator does, so that calls get the memory of those before."""

    def __init__(self, count: int = 64) -> None:
        self._memory = torch.zeros(count * BLOCK, dtype=torch.uint8)
        self._begin = self._memory.data_ptr() + -self._memory.data_ptr() % BLOCK
        self._held: list[weakref.ref[torch.Tensor] | None] = [None] * (count - 1)
        self.fails_at = -1
        """So many allocations from now on one fails."""

    def __call__(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise torch.OutOfMemoryError("as said")
        free = next(index for index, held in enumerate(self._held) if held is None or held() is None)
        made = (
            torch_private.memory_at(self._begin + free * BLOCK, BLOCK, CPU)
            .view(dtype)
            .as_strided(size, stride)
        )
        self._held[free] = weakref.ref(made)
        return made

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return self(tuple(values.size()), tuple(values.stride()), values.dtype).copy_(values)

    @property
    def held(self) -> int:
        return sum(each is not None and each() is not None for each in self._held)


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    blocks = Blocks()
    monkeypatch.setattr(torch_private, "allocator", lambda _device: blocks)
    return blocks


class Case:
    """A graph of two inputs that doubles each, and the calls of its replay."""

    def __init__(self, emulator: Emulator, blocks: Blocks) -> None:
        self.blocks = blocks
        self.emulator = emulator
        recorder: Any = Recorder(emulator, blocks)  # type: ignore[arg-type] # it gives out memory, too
        self.inputs = [blocks.tensor(torch.arange(FLOATS) + 10.0 * number) for number in (1, 2)]
        self.replay: Replay = recorder.doubling(self.inputs)
        self.notes: list[str] = recorder.notes

    def call(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Call it, on the inputs that it was recorded with if none are given."""
        outputs: tuple[torch.Tensor, ...] = self.replay.serve(list(inputs or self.inputs))[0]
        return outputs

    def expect(self, *, fused: int) -> None:
        """Run four calls, whose outputs are let go of at once, and hold how many were done in one go against what is given."""
        before = self.replay.counts.fused
        for number in range(4):
            self.inputs[0].fill_(number)
            first, second = self.call()
            assert first.tolist() == [2.0 * number] * FLOATS
            assert torch.equal(second, 2 * self.inputs[1])
            del first, second
        assert self.replay.counts.fused - before == fused

    def warm_up(self) -> None:
        """Run it until it is bound where outputs lie that are let go of at once."""
        for _ in range(2):
            self.call()


@pytest.fixture
def case(emulator: Emulator, blocks: Blocks) -> Iterator[Case]:
    case = Case(emulator, blocks)
    case.warm_up()
    yield case
    assert case.notes == []
    case.replay.close()


def test_calls_are_done_in_one_go(case: Case) -> None:
    case.expect(fused=4)
    assert case.replay.counts.written == 2  # what was allocated did not lie where it was recorded


def test_inputs_that_have_moved_are_bound_to_in_one_go(case: Case) -> None:
    moved = case.blocks.tensor(torch.full((FLOATS,), 3.0))
    before, written = case.replay.counts.fused, case.replay.counts.written

    assert case.call(moved, case.inputs[1])[0].tolist() == [6.0] * FLOATS

    assert case.replay.counts.fused == before + 1
    assert case.replay.counts.written > written


def test_outputs_that_are_kept_are_not_written_to(case: Case) -> None:
    kept = [case.call() for _ in range(3)]
    expected = [2 * each for each in case.inputs]
    case.inputs[0].fill_(-1)

    later = case.call()

    assert later[0].tolist() == [-2.0] * FLOATS
    for outputs in kept:
        assert all(map(torch.equal, outputs, expected))


@pytest.mark.parametrize("wrong", [None, 5, "a word"])
def test_inputs_that_are_no_tensors_are_told_as_ever(case: Case, wrong: Any) -> None:
    inputs = [case.inputs[0], wrong]

    with pytest.raises(FallbackError, match=r"a replay failed: \w+Error"):
        case.replay.serve(inputs)

    assert inputs == [case.inputs[0], wrong]
    case.expect(fused=4)


def test_a_list_that_is_too_short_is_told_as_ever(case: Case) -> None:
    with pytest.raises(FallbackError, match="a replay failed: IndexError"):
        case.replay.serve(case.inputs[:1])


@pytest.mark.parametrize("allocation", [1, 2])
def test_without_memory_nothing_is_kept_and_nothing_launched(case: Case, allocation: int) -> None:
    held, replays = case.blocks.held, case.replay.counts.replays
    inputs = list(case.inputs)
    case.blocks.fails_at = allocation

    with pytest.raises(torch.OutOfMemoryError, match="as said"):
        case.replay.serve(inputs)

    assert len(inputs) == 2  # the call can run as KERNELS
    assert (case.blocks.held, case.replay.counts.replays) == (held, replays)
    case.expect(fused=4)


def test_a_launch_that_fails_is_told_and_leaves_nothing(case: Case) -> None:
    held, inputs = case.blocks.held, list(case.inputs)
    case.emulator.fail_at(1)

    with pytest.raises(DriverError, match="cuGraphLaunch"):
        case.replay.serve(inputs)

    case.emulator.fail_at(0)
    assert len(inputs) == 2
    assert case.blocks.held == held


def test_what_it_takes_is_given_back(case: Case) -> None:
    inputs = list(case.inputs)
    outputs = case.call(*inputs)
    died = [weakref.ref(each) for each in outputs]

    del outputs

    assert [each() for each in died] == [None, None]
    assert case.blocks.held == 2
    assert inputs[0] is case.inputs[0]


def test_a_closed_replay_does_not_fit(case: Case) -> None:
    case.replay.close()

    with pytest.raises(FallbackError, match="was evicted meanwhile"):
        case.call()


class RngCursor:
    """Stands in for the cursor of that name, and counts draws."""

    def __init__(self) -> None:
        from pygraphd.client.replay.stream_affinity import StreamAffinity

        driver: Any = None
        self.affinity = StreamAffinity(driver, lambda: bool)
        self.drawn = self.taken_back = 0

    def advance(self, stream: int) -> PhiloxRange:
        self.drawn += 1
        return PhiloxRange(7, self.drawn - 1, self.drawn)

    def take_back(self, drawn: PhiloxRange) -> None:
        self.taken_back += 1

    def learn(self, addresses: object, stream: int) -> bool:
        return True

    def close(self) -> None:
        pass


def drawing(case: Case) -> RngCursor:
    """Have its graph draw random numbers."""
    from pygraphd.client.replay.replay import drawing_launch

    cursor = RngCursor()
    launch = drawing_launch(cursor, case.replay._launch_executable)  # type: ignore[arg-type] # it stands in for one
    case.replay._start = launch
    assert case.replay.fused is not None
    case.replay.fused.launch, case.replay.fused.expect = launch, cursor.affinity.expect
    return cursor


def test_the_driver_launches_without_python(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(case.emulator.driver, "_launch", lambda *_: pytest.fail("by Python"))

    case.expect(fused=4)


def test_what_draws_random_numbers_is_launched_by_what_advances_them(
    emulator: Emulator, blocks: Blocks
) -> None:
    """Until it is known to draw none."""
    cursor, recorder = RngCursor(), Recorder(emulator, blocks)  # type: ignore[arg-type] # it gives out memory, too
    a, out = blocks.tensor(torch.ones(FLOATS)), recorder.arena.allocate(FLOATS)
    recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a], [out], cursor=cursor).replay  # type: ignore[arg-type] # it stands in for one
    for _ in range(8):
        replay.serve([a])
    before = replay.counts.fused

    replay.serve([a])

    assert replay.counts.fused == before + 1
    assert cursor.drawn == replay.counts.replays == 9
    replay.forget_random_numbers()
    replay.serve([a])
    assert replay.counts.fused == before + 2
    assert cursor.drawn == 9
    replay.close()


def test_a_launch_that_fails_is_told_with_its_code(case: Case) -> None:
    case.emulator.fail_at(1)

    with pytest.raises(DriverError, match="cuGraphLaunch") as raised:
        case.call()

    case.emulator.fail_at(0)
    assert raised.value.code > 0


def test_what_was_drawn_is_returned(case: Case) -> None:
    cursor, before = drawing(case), case.replay.counts.fused

    _, drawn = case.replay.serve(list(case.inputs))

    assert drawn == PhiloxRange(7, 0, 1)
    assert case.replay.counts.fused == before + 1
    assert (cursor.drawn, cursor.taken_back) == (1, 0)


def test_what_was_drawn_for_a_launch_that_failed_is_taken_back(case: Case) -> None:
    cursor = drawing(case)
    case.emulator.fail_at(1)

    with pytest.raises(DriverError, match="cuGraphLaunch"):
        case.replay.serve(list(case.inputs))

    case.emulator.fail_at(0)
    assert (cursor.drawn, cursor.taken_back) == (1, 1)


def test_a_stream_that_may_not_be_left_is_told(case: Case) -> None:
    cursor = drawing(case)
    cursor.affinity.move(5)
    inputs = list(case.inputs)

    with pytest.raises(FallbackError, match="on another stream"):
        case.replay.serve(inputs)

    assert (len(inputs), cursor.drawn) == (2, 0)


CALLS = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 3), st.sampled_from(["dropped", "dropped", "kept", "all dropped"])
    ),
    min_size=5,
    max_size=40,
)
"""Which memory each input lies in, and what becomes of the outputs."""


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(calls=CALLS)
def test_any_calls_give_what_they_give_step_by_step(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    blocks = Blocks(256)
    monkeypatch.setattr(torch_private, "allocator", lambda _device: blocks)
    case = Case(emulator, blocks)
    places = [blocks.tensor(torch.zeros(FLOATS)) for _ in range(4)]
    kept: list[tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]] = []
    for number, (first, second, fate) in enumerate(calls * 2):
        places[first].fill_(number)
        inputs = [places[first], places[second]]

        outputs = case.call(*inputs)

        assert all(map(torch.equal, outputs, [2 * each for each in inputs]))
        if fate == "kept" and len(kept) < 20:
            kept.append((outputs, [each.clone() for each in outputs]))
        elif fate == "all dropped":
            kept.clear()
        for were, expected in kept:
            assert all(map(torch.equal, were, expected))
        del outputs
    case.replay.close()
