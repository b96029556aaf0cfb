"""Generators that a call is given: PyTorch has checkpoints draw the numbers of their forward again from such ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import DisturbedError, LayoutMismatch
from pygraphd.client.replay.rng import Generators, RngCursor
from pygraphd.client.replay.stream_affinity import StreamAffinity
from tests.support.generators import Default, Generator, as_signed
from tests.support.recording_case import Case
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.support.emulator import Allocator, Emulator
    from tests.support.recording_case import Operations

pytestmark = pytest.mark.torch


class Graph:
    """Does for several generators what `torch.cuda.CUDAGraph.replay` does: it writes of those alone that are drawn from."""

    def __init__(self, drawn: Sequence[tuple[Generator, int]], words: torch.Tensor) -> None:
        self._drawn, self._words = drawn, words
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        for number, (generator, by) in enumerate(self._drawn):
            if by:
                self._words[2 * number] = as_signed(generator.seed)
                self._words[2 * number + 1] = generator.offset
                generator.offset += by

    def reset(self) -> None:
        pass


class Drawing:
    """A recording that draws from the device's generator and from two more, which have come equally far."""

    def __init__(self, emulator: Emulator, advances: Sequence[int], seeds: Sequence[int] = (5, 6, 7)) -> None:
        self.words = torch.full((64,), -1, dtype=torch.int64)
        self.generators = [Generator(seed, 400) for seed in seeds]
        self.advances = advances
        drawn = [*zip(self.generators, advances, strict=True)]
        self.graph = Graph(drawn, self.words)
        self.cursor = RngCursor(
            self.graph,
            Default(self.generators[0]),
            emulator.driver,
            lambda: None,
            StreamAffinity(emulator.driver, lambda: bool),
            self.generators[1:],
        )

    def learn(self) -> bool:
        return self.cursor.learn(lambda: [each.data_ptr() for each in self.words], 0)

    def check_launch(self) -> None:
        """Launch, and see that kernels read each generator as it was, and that each has gone on."""
        before = [each.offset for each in self.generators]
        drawn = self.cursor.advance(0)
        for number, (each, by, offset) in enumerate(zip(self.generators, self.advances, before, strict=True)):
            assert each.offset == offset + by
            if by:
                assert self.words[2 * number : 2 * number + 2].tolist() == [each.seed, offset]
        spans = [(offset, offset + by) for offset, by in zip(before, self.advances, strict=True)]
        assert (drawn.seed, (drawn.before, drawn.after)) == (self.generators[0].seed, spans[0])
        assert [*drawn.further] == spans[1:]


ADVANCES = [(4, 8, 12), (0, 4, 4), (4, 0, 0), (0, 0, 4)]


@pytest.mark.parametrize("advances", ADVANCES)
def test_where_the_state_of_each_lies_is_found_though_they_have_come_equally_far(
    emulator: Emulator, advances: tuple[int, ...]
) -> None:
    drawing = Drawing(emulator, advances)

    assert drawing.learn()
    assert [each.offset for each in drawing.generators] == [400] * 3
    before = drawing.graph.replays
    for number in range(4):
        drawing.generators[1].seed = 60 + number  # a backward is given the state of another forward
        drawing.check_launch()
    assert drawing.graph.replays == before


@pytest.mark.parametrize("which", range(3))
def test_what_another_thread_draws_while_addresses_are_found_is_not_drawn_again(
    emulator: Emulator, which: int
) -> None:
    drawing = Drawing(emulator, (4, 8, 12))
    ends: list[int] = []

    def addresses() -> list[int]:
        drawing.generators[which].offset += 40
        ends.append(drawing.generators[which].offset)
        return [each.data_ptr() for each in drawing.words]

    with pytest.raises(DisturbedError):
        drawing.cursor.learn(addresses, 0)
    assert drawing.generators[which].offset >= ends[0]


def test_two_of_one_seed_cannot_be_told_apart_and_pytorch_hands_them_out(emulator: Emulator) -> None:
    drawing = Drawing(emulator, (4, 4, 4), seeds=(5, 6, 6))

    assert drawing.learn()
    before = drawing.graph.replays
    drawing.check_launch()
    assert drawing.graph.replays == before + 1


def test_what_draws_nothing_needs_no_ticket(emulator: Emulator) -> None:
    assert not Drawing(emulator, (0, 0, 0)).learn()


@pytest.mark.parametrize("knows", [True, False])
def test_all_of_them_are_taken_back_but_for_what_others_have_drawn(emulator: Emulator, knows: bool) -> None:
    drawing = Drawing(emulator, (4, 8, 0))
    if knows:
        drawing.learn()

    drawing.cursor.take_back(drawing.cursor.advance(0))
    assert [each.offset for each in drawing.generators] == [400] * 3

    drawn = drawing.cursor.advance(0)
    drawing.generators[1].offset += 40
    drawing.cursor.take_back(drawn)
    assert [each.offset for each in drawing.generators] == [400, 448, 400]


def test_any_call_of_the_driver_may_fail_and_none_of_them_moves(emulator: Emulator) -> None:
    failed = 0
    while True:
        drawing = Drawing(emulator, (4, 8, 12))
        emulator.fail_at(failed + 1)
        drawing.learn()
        emulator.fail_at(0)
        assert [each.offset for each in drawing.generators] == [400] * 3
        before = drawing.graph.replays
        drawing.check_launch()
        if drawing.graph.replays == before:
            break
        failed += 1
    assert failed >= 5
    emulator.fail_at(1)
    offsets = [each.offset for each in drawing.generators]
    with pytest.raises(DriverError):
        drawing.cursor.advance(0)
    emulator.fail_at(0)
    assert [each.offset for each in drawing.generators] == offsets


def test_several_are_set_as_one_and_none_is_touched_without_need() -> None:
    one, other = Generator(1, 8), Generator(2, 16)
    both = Generators([one, other])
    other.set_offset = None  # type: ignore[assignment,method-assign]

    began = both.get_offset()
    one.offset = 12
    assert both.get_offset() != began
    both.set_offset(began)

    assert (one.offset, other.offset) == (8, 16)


class OnTheDevice(torch.Generator):  # type: ignore[misc]
    """A generator that has an offset, as those of a GPU have."""

    offset = 0

    def get_offset(self) -> int:
        return self.offset

    def set_offset(self, offset: int) -> None:
        self.offset = offset


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Iterator[Case]:
    case = Case(emulator, allocator)
    yield case
    case.close()


def twice(operations: Operations, inputs: list[Any]) -> Any:
    return (operations.add(inputs[0], inputs[0]),)


def test_a_call_that_is_given_generators_is_recorded_and_serves_these_alone(case: Case) -> None:
    run = case.make(twice)
    mine, other = OnTheDevice(), OnTheDevice()

    for number, generator in enumerate([mine] * 4 + [other] + [mine]):
        assert run([case.floats(number), generator])[0].tolist() == [2 * number]

    assert case.report.fallbacks[LayoutMismatch.GENERATOR.value] == 1
    case.expect(captured=1)
    (replay,) = run.replays
    assert replay.counts.replays == 1 + 2 + 1  # when it was tried, and then


def test_a_generator_that_stays_has_it_recorded_anew(case: Case) -> None:
    run = case.make(twice)
    mine, other = OnTheDevice(), OnTheDevice()

    for number, generator in enumerate([mine] * 4 + [other] * 5):
        assert run([case.floats(number), generator])[0].tolist() == [2 * number]

    assert case.report.fallbacks[LayoutMismatch.GENERATOR.value] == 1
    case.expect(captured=2)
    (replay,) = run.replays
    assert [each for _, each in replay.layout.generators] == [other]
    assert replay.counts.replays == 1 + 3


def test_a_generator_of_another_device_is_named(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.recorder.device = torch.device("meta")
    run = case.make(twice)
    for _ in range(3):
        run([case.floats(1), OnTheDevice()])

    assert refusal_of(run) == "input 1 is a Generator of another device"
    assert case.recorder.captures == 0


def test_a_generator_beside_a_custom_operator_is_refused(case: Case) -> None:
    """The operator may fail to be captured, and the generator would be left as if it still were captured (up to torch 2.12)."""
    run = case.made(twice, GraphFacts(is_repeatable=False))
    for _ in range(3):
        run([case.floats(1), OnTheDevice()])

    assert refusal_of(run) == "input 1 is a Generator, and it holds a custom operator"
    assert case.recorder.captures == 0
