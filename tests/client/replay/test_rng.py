"""The generator's state is written by the driver where it is known where it lies, and by PyTorch where it is not."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import DisturbedError, FallbackError, LayoutMismatch, LayoutMismatchError
from pygraphd.client.replay.relocation_table import SegmentRange, Span, outside
from pygraphd.client.replay.rng import RngCursor
from pygraphd.client.replay.stream_affinity import StreamAffinity
from tests.support.generators import Default, Generator, as_signed

if TYPE_CHECKING:
    from tests.support.emulator import Emulator

pytestmark = pytest.mark.torch

SEED, OFFSET, OTHER = range(3)
ADVANCE = 8


class Graph:
    """Does for a generator what `torch.cuda.CUDAGraph.replay` does."""

    def __init__(self, generator: Generator, words: torch.Tensor, advance: int) -> None:
        self._generator = generator
        self._words = words
        self._advance = advance
        self.replays = 0
        self.is_reset = False

    def replay(self) -> None:
        self.replays += 1
        if self._advance:
            self._words[SEED] = as_signed(self._generator.seed)
            self._words[OFFSET] = self._generator.offset
            self._generator.offset += self._advance

    def reset(self) -> None:
        self.is_reset = True


class Case:
    """A cursor, and what its kernels read."""

    def __init__(self, emulator: Emulator, seed: int = 42, offset: int = 0, advance: int = ADVANCE) -> None:
        self.words = torch.full((64,), -1, dtype=torch.int64)
        self.generator = Generator(seed, offset)
        self.has_ended = False
        self.affinity = StreamAffinity(emulator.driver, lambda: lambda: self.has_ended)
        self.graph = Graph(self.generator, self.words, advance)
        self.waits = 0
        self.default = Default(self.generator)
        self.cursor = RngCursor(self.graph, self.default, emulator.driver, self._wait, self.affinity)

    def _wait(self) -> None:
        self.waits += 1

    def address(self, word: int) -> int:
        address: int = self.words[word].data_ptr()
        return address

    def learn(self, *words: int) -> None:
        """Learn from kernels that are given these words' addresses, and numbers that are none."""
        self.cursor.learn(lambda: [*map(self.address, words), 0, 7, self.address(0) + 1, -8], 0)

    @property
    def read(self) -> list[int]:
        """The seed and the offset as the kernels of a launch read them."""
        return [each % (1 << 64) for each in self.words[:2].tolist()]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    seeds=st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=4),
    offset=st.integers(0, 1 << 40).map(lambda n: 4 * n),
    knows=st.booleans(),
)
def test_each_launch_reads_what_it_would_and_the_generator_goes_on(
    emulator: Emulator, seeds: list[int], offset: int, knows: bool
) -> None:
    case = Case(emulator, seeds[0], offset)
    case.words[10:20] = torch.arange(10)
    if knows:
        case.learn(SEED, OFFSET, *range(10, 20))
    assert case.generator.offset == offset
    before = case.graph.replays

    for number, seed in enumerate(seeds):
        case.generator.seed = seed
        case.cursor.advance(0)
        assert case.read == [seed, offset + number * ADVANCE]
        assert case.generator.offset == offset + (number + 1) * ADVANCE

    if not knows:
        assert case.graph.replays == before + len(seeds)


def test_once_it_is_known_where_the_state_lies_nothing_is_replayed(emulator: Emulator) -> None:
    case = Case(emulator)
    case.learn(SEED, OFFSET, OTHER)
    before, waits = case.graph.replays, case.waits

    for _ in range(5):
        case.cursor.advance(0)

    assert case.graph.replays == before
    assert case.waits == waits == 2
    case.words[:2] = 0  # another graph of the same generator has written there
    case.cursor.advance(0)
    assert case.read == [42, 5 * ADVANCE]


@pytest.mark.parametrize(
    ("words", "advance", "other"),
    [((SEED,), ADVANCE, 0), ((OFFSET,), ADVANCE, 0), ((), ADVANCE, 0), ((SEED, OFFSET), 0, 0), ((SEED, OFFSET, OTHER), ADVANCE, 42)],
    ids=["no offset", "no seed", "neither", "draws none", "two could be the seed"],
)  # fmt: skip
def test_where_it_cannot_be_told_pytorch_does_it(
    emulator: Emulator, words: tuple[int, ...], advance: int, other: int
) -> None:
    case = Case(emulator, advance=advance)
    case.words[OTHER] = other
    case.learn(*words)
    assert case.waits == (2 if advance else 0)  # who draws none is not waited for
    before = case.graph.replays

    case.cursor.advance(0)

    assert case.graph.replays == before + 1
    assert case.generator.offset == advance


def test_any_call_of_the_driver_may_fail(emulator: Emulator) -> None:
    failed = 0
    while True:
        case = Case(emulator, offset=4)
        emulator.fail_at(failed + 1)
        case.learn(SEED, OFFSET)
        emulator.fail_at(0)
        assert case.generator.offset == 4
        before = case.graph.replays
        case.cursor.advance(0)
        assert case.read == [42, 4]
        if case.graph.replays == before:
            break
        failed += 1
    assert failed >= 5  # 2 words read twice, and one written


@pytest.mark.parametrize("fails", [False, True])
def test_what_another_thread_draws_meanwhile_stays_drawn(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    case = Case(emulator, offset=100)
    case.learn(SEED, OFFSET)
    write = emulator.driver.write_words

    def draw_and_write(*arguments: Any) -> None:
        case.generator.offset += 40
        if fails:
            raise DriverError("cuStreamBatchMemOp", 999)
        write(*arguments)

    monkeypatch.setattr(emulator.driver, "write_words", draw_and_write)
    with pytest.raises(DriverError) if fails else contextlib.nullcontext():
        case.cursor.advance(0)

    assert (
        case.generator.offset == 100 + 40 + ADVANCE
    )  # who draws next must not draw what the other thread has
    assert fails or case.read == [42, 100]


def test_the_generator_is_left_alone_where_nothing_is_drawn(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(emulator, offset=8, advance=0)
    puts = list[int]()
    monkeypatch.setattr(case.generator, "set_offset", puts.append)

    case.learn(SEED, OFFSET)

    assert puts == []


def test_a_launch_that_could_not_be_prepared_has_drawn_nothing(emulator: Emulator) -> None:
    case = Case(emulator)
    case.learn(SEED, OFFSET)
    emulator.fail_at(1)

    with pytest.raises(DriverError):
        case.cursor.advance(0)

    emulator.fail_at(0)
    assert case.generator.offset == 0
    case.cursor.close()
    assert case.graph.is_reset


@pytest.mark.parametrize("knows", [False, True])
def test_what_was_not_launched_is_taken_back_and_no_more(emulator: Emulator, knows: bool) -> None:
    case = Case(emulator, offset=100)
    if knows:
        case.learn(SEED, OFFSET)

    case.cursor.take_back(case.cursor.advance(0))
    assert case.generator.offset == 100

    advanced = case.cursor.advance(0)
    case.generator.offset += 40  # by another thread
    case.cursor.take_back(advanced)
    assert case.generator.offset == 100 + ADVANCE + 40


@pytest.mark.parametrize("gap", [0, ADVANCE, 40])
def test_the_state_is_drawn_from_that_the_default_generator_has_now(emulator: Emulator, gap: int) -> None:
    case = Case(emulator, offset=100)
    case.learn(SEED, OFFSET)
    states = [case.generator, Generator(7, 100 + gap)]
    drawn = [0, 0]

    for which in (0, 1, 1, 0, 1, 0, 0):
        case.default.state = state = states[which]
        other = states[1 - which].offset
        before = state.offset
        span = case.cursor.advance(0)
        drawn[which] += ADVANCE
        assert case.read == [state.seed, before] == [span.seed, span.before]
        assert (state.offset, states[1 - which].offset) == (before + ADVANCE, other)

    case.cursor.take_back(case.cursor.advance(0))
    assert [each.offset for each in states] == [100 + drawn[0], 100 + gap + drawn[1]]


@pytest.mark.parametrize("gap", [0, ADVANCE])
def test_pytorch_does_not_write_a_state_that_the_default_generator_has_no_more(
    emulator: Emulator, gap: int
) -> None:
    case = Case(emulator, offset=100)
    case.cursor.advance(0)
    case.default.state = other = Generator(42, case.generator.offset + gap)

    with pytest.raises(LayoutMismatchError) as raised:
        case.cursor.advance(0)

    assert raised.value.mismatch is LayoutMismatch.GENERATOR
    assert (case.generator.offset, other.offset) == (100 + ADVANCE, 100 + ADVANCE + gap)


def test_where_the_state_lies_is_not_looked_for_while_another_stream_may_read_it(emulator: Emulator) -> None:
    case = Case(emulator)
    case.affinity.enter(7)
    before = case.words.clone()

    with pytest.raises(FallbackError, match="another stream"):
        case.learn(SEED, OFFSET)

    assert torch.equal(case.words, before)
    case.has_ended = True
    case.learn(SEED, OFFSET)
    assert case.graph.replays == 5  # three find out whether it draws, and two where the state lies


@pytest.mark.parametrize("replay", [2, 3, 4])
def test_a_replay_that_fails_has_drawn_nothing(emulator: Emulator, replay: int) -> None:
    case = Case(emulator, offset=100)
    original = case.graph.replay

    def fail_then() -> None:
        original()
        if case.graph.replays == replay:
            raise RuntimeError

    case.graph.replay = fail_then  # type: ignore[method-assign]

    with pytest.raises(RuntimeError):
        case.learn(SEED, OFFSET)
    assert case.generator.offset == 100


@pytest.mark.parametrize("where", ["before a replay", "in a replay", "after the last one"])
@pytest.mark.parametrize("replay", [1, 3, 5])
def test_what_another_thread_has_drawn_meanwhile_is_not_drawn_again(
    emulator: Emulator, replay: int, where: str
) -> None:
    case = Case(emulator, offset=100)
    original, others = case.graph.replay, list[range]()

    def draw() -> None:
        others.append(range(case.generator.offset, case.generator.offset + 4))
        case.generator.offset += 4

    def beside() -> None:
        original()
        if case.graph.replays == replay and where == "in a replay":
            draw()

    def waiting() -> None:
        if case.graph.replays == 5 and where == "after the last one":
            draw()

    case.graph.replay = beside  # type: ignore[method-assign]
    case.cursor._synchronize = waiting
    if where == "before a replay":
        get, asked = case.cursor._all.get_offset, itertools.count(1)

        def draw_and_get() -> Any:
            if next(asked) == 2 * replay:
                draw()
            return get()

        case.cursor._all.get_offset = draw_and_get  # type: ignore[method-assign]

    with pytest.raises(DisturbedError):
        case.learn(SEED, OFFSET)
    assert others
    assert case.generator.offset >= max(each.stop for each in others)


@pytest.mark.parametrize("replay", [1, 2])
def test_a_graph_that_draws_nothing_takes_back_nothing_that_another_thread_draws(
    emulator: Emulator, replay: int
) -> None:
    """PyTorch's replay lets other threads run."""
    case = Case(emulator, offset=100, advance=0)
    original = case.graph.replay

    def beside() -> None:
        original()
        if case.graph.replays <= replay:
            case.generator.offset += 4

    case.graph.replay = beside  # type: ignore[method-assign]

    assert not case.cursor.learn(list, 0)
    assert case.generator.offset == 100 + 4 * replay


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("advance", [0, ADVANCE])
def test_who_draws_none_leaves_the_stream_to_whoever_does(
    emulator: Emulator, advance: int, elsewhere: bool
) -> None:
    case = Case(emulator, advance=advance)
    if not elsewhere:
        case.affinity.enter(7)  # others draw there

    assert case.cursor.learn(list, 7) is (advance > 0)

    with contextlib.nullcontext() if elsewhere and not advance else pytest.raises(FallbackError):
        case.affinity.enter(8)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), max_size=5), st.sets(st.integers(0, 50)))
def test_what_lies_outside_lies_in_no_segment(spans: list[tuple[int, int]], words: set[int]) -> None:
    segments: list[Any] = []
    for start, size in sorted(spans):
        if not segments or start > segments[-1].span.end:
            segments.append(SegmentRange(Span(start, start + size), 0))

    expected = {
        word for word in words if not any(each.span.start <= word <= each.span.end for each in segments)
    }

    assert outside(list(words), [(range(len(words)), 0)], segments) == expected
