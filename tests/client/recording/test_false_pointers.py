"""Words that only look like addresses: a number with half of an address beside it, in a gap of a structure."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from pygraphd.client.backend.errors import FallbackError
from pygraphd.client.recording import budget, pipeline, recordings, stand_ins
from pygraphd.client.recording.alias_sets import input_groups
from pygraphd.client.recording.capture import Capture
from pygraphd.client.recording.false_pointers import (
    CAPTURES_DIFFER,
    UNDECIDABLE,
    CapturedCall,
    MovedSpan,
    false_addresses,
    moved_spans,
)
from pygraphd.client.replay.node_params import Parameters
from pygraphd.client.replay.relocation_table import SegmentRange, Span, find, scan
from pygraphd.client.replay.segments import InputGroup
from tests.support.recording_case import Case, add
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.emulator import Allocator, Emulator
    from tests.support.recording_case import Operations

pytestmark = pytest.mark.torch

HALF = 1 << 32
_ROOM = 1 << 16
_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS_FIXED_NOREPLACE = 0x100022


class Edges:
    """Memory that begins where 4 GiB do, so that small numbers are the lower halves of its addresses."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._next = 0x1000 * HALF
        self._mapped: list[int] = []

    def room(self) -> torch.Tensor:
        """Return bytes."""
        while True:
            self._next += HALF
            wanted = ctypes.c_void_p(self._next)
            protection, flags = _PROT_READ_WRITE, _MAP_PRIVATE_ANONYMOUS_FIXED_NOREPLACE
            given_at = self._libc.mmap(
                wanted, ctypes.c_size_t(_ROOM), protection, flags, -1, ctypes.c_long(0)
            )
            if given_at == self._next:
                break
        self._mapped.append(self._next)
        bytes_there = (ctypes.c_uint8 * _ROOM).from_address(self._next)
        return torch.frombuffer(bytes_there, dtype=torch.uint8)

    def close(self) -> None:
        for each in self._mapped:
            self._libc.munmap(ctypes.c_void_p(each), ctypes.c_size_t(_ROOM))


@pytest.fixture
def edges() -> Iterator[Edges]:
    edges = Edges()
    yield edges
    edges.close()


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Iterator[Case]:
    case = Case(emulator, allocator)
    yield case
    case.close()


def first_two(operations: Operations, inputs: list[Any]) -> Any:
    return (operations.first(inputs[0], 2),)


def put_stand_ins(monkeypatch: pytest.MonkeyPatch, edges: Edges, count: int) -> None:
    """Have so many of the next stand-ins, of the first capture and then of the second one, lie at an edge."""
    left, usual = [count], stand_ins._allocated

    def room_for(index: int, member: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, int]:
        left[0] -= 1
        return (edges.room(), 0) if left[0] >= 0 else usual(index, member, *rest)

    monkeypatch.setattr(stand_ins, "_allocated", room_for)


def call(run: Any, case: Case, value: float) -> None:
    assert run([case.floats(value, 2, 3, 4)])[0].tolist() == [value, 2]


# --- what is left alone ------------------------------------------------------------------------------------------


def test_a_number_beside_half_an_address_is_left_alone(
    case: Case, edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_stand_ins(monkeypatch, edges, 1)
    run = case.make(first_two)

    for value in range(20):
        call(run, case, value)

    case.expect(captured=1)
    assert case.recorder.captures == 2
    assert run.replays[0].counts.replays == 19


def test_it_would_be_taken_for_an_address(emulator: Emulator, edges: Edges) -> None:
    """The test before this one has something to find."""
    graph, arena = emulator.graph(), emulator.arena()
    at_edge, out = edges.room().view(torch.float32), arena.allocate(2)
    graph.first(at_edge, out, at_edge.data_ptr() >> 32)
    parameters = Parameters(emulator.driver, graph.handle)

    start = at_edge.data_ptr()
    segments = [SegmentRange(Span(start, start + _ROOM), 0)]
    table = scan(parameters.words, parameters.candidates, segments, 1)

    assert [offset for _, offset in table.words[0]] == [0, out.numel()]
    assert table.ambiguous == tuple(index for index, _ in table.words[0])
    emulator.driver.destroy_graph(graph.handle)


def test_where_there_are_no_structures_it_is_captured_once(case: Case) -> None:
    run = case.make(add)

    for _ in range(3):
        run([case.floats(1, 2), case.floats(3, 4)])

    case.expect(captured=1)
    assert case.recorder.captures == 1


def test_where_it_cannot_be_told_it_is_tried_elsewhere(
    case: Case, edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both captures have their memory at an edge, and what lies in the gap is half of an address of it."""
    put_stand_ins(monkeypatch, edges, 2)
    run = case.make(first_two)

    for value in range(4):
        call(run, case, value)

    case.expect(captured=1)
    assert case.report.fallbacks[UNDECIDABLE] == 1
    assert (case.recorder.captures, run._pipeline.captures) == (4, 2)


def test_half_an_address_of_other_memory_of_the_second_capture_is_told_from_one_that_has_moved(
    case: Case, edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in large models, whose memory is where any small number beside half of an address points to."""
    put_stand_ins(monkeypatch, edges, 3)

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return operations.add(inputs[0], inputs[0]), operations.first(inputs[1], 2)

    run = case.make(body)

    for value in range(4):
        # In the second capture the first of them is where the number beside half of the second one's address points to.
        given_inputs = [case.floats(value, 2, 3, 4) for _ in range(2)]
        given_inputs.sort(key=torch.Tensor.data_ptr)
        assert [each.tolist() for each in run(given_inputs)] == [[2 * value, 4, 6, 8], [value, 2]]

    case.expect(captured=1)
    assert set(case.report.fallbacks) == {recordings.NOT_YET}
    assert case.recorder.captures == 2


def test_where_it_can_never_be_told_it_runs_as_kernels(
    case: Case, edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_stand_ins(monkeypatch, edges, 200)
    run = case.make(first_two)

    for value in range(12):
        call(run, case, value)

    case.expect(captured=0)
    assert refusal_of(run) == UNDECIDABLE
    assert run._pipeline.captures == pipeline.MAX_RETRIES + 1


def test_what_is_another_graph_when_it_is_captured_again_is_tried_again(case: Case) -> None:
    """As what fills a cache of its own when it is captured first."""
    seen: list[torch.Tensor] = []

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if operations is not case.recorder.as_kernels and not seen:
            seen.append(operations.add(inputs[0], inputs[0]))
        return (operations.first(inputs[0], 2),)

    run = case.make(body)

    for value in range(4):
        call(run, case, value)

    case.expect(captured=1)
    assert case.report.fallbacks[CAPTURES_DIFFER] == 1


def test_a_graph_of_as_many_nodes_is_another_one_if_a_kernel_is(case: Case) -> None:
    """Also one that no word is asked of."""
    captured = 0

    def body(operations: Operations, inputs: list[Any]) -> Any:
        nonlocal captured
        captured += operations is not case.recorder.as_kernels
        twice = operations.until(inputs[0]) if captured == 1 else operations.add(inputs[0], inputs[0])
        return operations.first(inputs[0], 2), twice

    run = case.make(body)

    for value in range(4):
        results = run([case.floats(value, 2, 3, 4)])
        assert [each.tolist() for each in results] == [[value, 2], [2 * value, 4, 6, 8]]

    case.expect(captured=1)
    assert case.report.fallbacks[CAPTURES_DIFFER] == 1


def test_what_is_captured_once_more_needs_room(case: Case) -> None:
    """For what stands in for its input, and its output twice: as much may be free in the pool of the first capture, and for nobody else."""
    run = case.make(first_two)
    call(run, case, 0)
    enough = stand_ins.bytes_to_copy(input_groups([case.floats(0, 2, 3, 4)])) + 2 * 2 * 4
    case.recorder.free = enough - 1

    call(run, case, 1)
    assert case.recorder.captures == 1
    assert case.report.fallbacks[budget.NO_MEMORY_TO_VERIFY] == 1

    case.recorder.free = enough
    for value in range(2, 40):
        call(run, case, value)
    case.expect(captured=1)


def test_what_both_captures_allocate_a_multiple_of_4_gib_apart_is_told(
    case: Case, edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with expandable segments, where each pool begins at such an address."""
    usual = case.emulator.arena

    def at_edge(blocks: int = 64, base: int = 0) -> Any:
        made = usual(blocks)
        made._memory = edges.room().view(torch.float32).fill_(float("nan"))
        made._base = made._memory.data_ptr()
        return made

    def first_two_of_a_sum(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.first(operations.add(inputs[0], inputs[0]), 2),)

    monkeypatch.setattr(case.emulator, "arena", at_edge)
    run = case.make(first_two_of_a_sum)

    for value in range(6):
        assert run([case.floats(value, 2, 3, 4)])[0].tolist() == [2 * value, 4]

    case.expect(captured=1)
    assert set(case.report.fallbacks) == {recordings.NOT_YET}
    assert case.recorder.captures == 2


def test_every_driver_call_may_fail_while_it_is_captured_twice(case: Case) -> None:
    """And nothing is left, which the fixtures see to."""
    failed_at_once = failed_in_the_second = 0
    for fail_at in range(1, 200):
        run = case.make(first_two)
        call(run, case, 0)
        before = case.recorder.captures
        case.emulator.fail_at(fail_at)
        call(run, case, 1)
        was_called = case.emulator.calls()
        case.emulator.fail_at(0)
        if was_called < fail_at:
            break
        if refusal_of(run) is not None:
            failed_at_once += case.recorder.captures == before + 1
            failed_in_the_second += case.recorder.captures == before + 2
        call(run, case, 2)

    assert failed_at_once > 3
    assert failed_in_the_second > 3
    assert refusal_of(run) is None


# --- telling -----------------------------------------------------------------------------------------------------

ADDRESSES = st.integers(0, 63)


@given(
    words=st.lists(st.tuples(st.booleans(), st.integers(0, 255), st.integers(0, 3)), max_size=20),
    here=st.integers(0, 2).map(lambda window: window * HALF),
    there=st.integers(0, 2).map(lambda window: window * HALF),
    shift=st.integers(256, 1 << 20),
)
def test_exactly_what_has_not_moved_is_false(
    words: list[tuple[bool, int, int]], here: int, there: int, shift: int
) -> None:
    """Real words lie at an offset into 256 bytes; others are a number below half of any address, the same in both captures."""
    spans = [Span(there + shift, there + shift + 256)]
    first = [here + offset if real else window * HALF + offset for real, offset, window in words]
    again = [there + shift + offset if real else window * HALF + offset for real, offset, window in words]
    assume(here + 256 <= spans[0].start or spans[0].end <= here)
    doubtful = [index for index, value in enumerate(first) if here <= value <= here + 256]

    found = false_addresses(
        doubtful,
        first,
        dict(enumerate(again)),
        spans,
        lambda: [MovedSpan(Span(here, here + 256), there + shift)],
    )

    assert found == {index for index in doubtful if not words[index][0]}


@given(
    low=st.integers(1, 1 << 20),
    windows=st.integers(1, 5),
    moved_by=st.integers(1, 5).map(lambda count: count * HALF) | st.integers(1, 1 << 40),
)
def test_what_has_moved_by_half_a_word_alone_is_false_unless_all_there_has(
    low: int, windows: int, moved_by: int
) -> None:
    """Another piece of memory, which has moved so, says nothing of it."""
    first, size = Span(0, 1 << 20), 1 << 45
    moved = [MovedSpan(first, moved_by), MovedSpan(Span(HALF, 2 * HALF), (1 + windows) * HALF)]

    def found() -> frozenset[int]:
        return false_addresses([0], [low], {0: windows * HALF + low}, [Span(HALF, size)], lambda: moved)

    if moved_by == windows * HALF:
        with pytest.raises(FallbackError, match=UNDECIDABLE):
            found()
    else:
        assert found() == {0}


def nothing_asked() -> NoReturn:
    raise AssertionError


def test_where_something_has_moved_is_not_told_of_captures_that_allocate_otherwise() -> None:
    first = CapturedCall(Capture(0, [], (Span(0, 512), Span(512, 1024))), [])
    alike = CapturedCall(Capture(0, [], (Span(8192, 8704), Span(9216, 9728))), [], [])
    otherwise = CapturedCall(Capture(0, [], (Span(8192, 8704), Span(9216, 9720))), [], [])

    assert moved_spans(first, alike, []) == [MovedSpan(Span(0, 512), 8192), MovedSpan(Span(512, 1024), 9216)]
    with pytest.raises(FallbackError, match=CAPTURES_DIFFER):
        moved_spans(first, otherwise, [])


class Placed:
    """A tensor, as far as where it and its storage begin."""

    def __init__(self, address: int, storage: int) -> None:
        self._address, self._storage = address, storage

    def data_ptr(self) -> int:
        return self._address

    def untyped_storage(self) -> Placed:
        return Placed(self._storage, self._storage)


def test_where_an_input_and_its_storage_have_moved_otherwise_both_are_told() -> None:
    """A kernel may be given the one or the other."""
    span, group = Span(HALF, HALF + 512), InputGroup(((0, 0),), 256, HALF)
    first = CapturedCall(Capture(0, [], ()), [Placed(HALF, HALF)])
    second = CapturedCall(Capture(0, [], ()), [Placed(3 * HALF + 1024, 3 * HALF)], [])

    def found(word: int, again: int) -> frozenset[int]:
        return false_addresses(
            [0],
            [word],
            {0: again},
            [Span(3 * HALF, 4 * HALF)],
            lambda: moved_spans(first, second, [(group, span)]),
        )

    with pytest.raises(FallbackError, match=UNDECIDABLE):
        found(HALF, 3 * HALF)
    assert found(HALF, 3 * HALF + 1024) == frozenset()
    assert found(HALF + 8, 3 * HALF + 8) == {0}


def test_the_end_of_what_a_kernel_is_given_is_an_address_of_it() -> None:
    spans = [Span(1000, 2000)]

    assert find(spans, 2000) is None
    assert false_addresses([0], [500], {0: 2000}, spans, nothing_asked) == frozenset()
    assert false_addresses([0], [500], {0: 2001}, spans, nothing_asked) == {0}
