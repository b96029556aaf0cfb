"""Inputs of a backward that its recording lays other memory over: which may be, what comes of it, and when it ends."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client import _torch, donation, relocatable
from pygraphd.client.binding import MisfitError
from pygraphd.client.donation import (
    LEAST_BYTES,
    NONE,
    Donation,
    StandIns,
    Stretch,
    donation_of,
    joined,
    occupied,
)
from pygraphd.client.graph_facts import GraphFacts, PartitionMap
from pygraphd.client.misfits import Misfit
from pygraphd.client.recording import Capture, input_groups
from pygraphd.client.recycling import Link, Watched
from pygraphd.client.relocatable import LOOKS
from pygraphd.client.relocation import BLOCK, Span
from pygraphd.client.witness import OTHERWISE
from tests.relocation.test_relocatable import Case

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pygraphd.client.relocatable import Relocatable
    from tests.relocation.conftest import Allocator, Emulator
    from tests.relocation.test_relocatable import Operations

pytestmark = pytest.mark.torch

FLOATS = BLOCK // 4
"""A block of the allocator's."""


# --- which may be ------------------------------------------------------------------------------------------------


def block(size: int = LEAST_BYTES, at: int = 0) -> torch.Tensor:
    """Return bytes as floats that begin so many bytes behind where blocks do."""
    memory = torch.zeros(size + 2 * BLOCK, dtype=torch.uint8)
    start = -memory.data_ptr() % BLOCK + at
    return memory[start : start + size].view(torch.float32)


def side_by_side(*sizes: int) -> list[torch.Tensor]:
    """Return tensors of so many bytes, side by side."""
    return list(block(sum(sizes)).split([size // 4 for size in sizes]))


@pytest.fixture
def worth_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(donation, "WORTH_BYTES", 1)
    monkeypatch.setattr(donation, "STRETCH_BYTES", 1)


def found(*inputs: Any) -> Donation:
    return donation_of(inputs, range(len(inputs)))


@pytest.mark.usefixtures("worth_anything")
@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(block(LEAST_BYTES - BLOCK), id="small"),
        pytest.param(block(LEAST_BYTES + BLOCK // 2), id="part of a block"),
        pytest.param(block(at=128), id="not aligned"),
        pytest.param(block(2 * LEAST_BYTES)[::2], id="with gaps"),
        pytest.param(block().view(torch.int32), id="what may be indices"),
        pytest.param(None, id="none"),
        pytest.param(7, id="a size"),
    ],
)
def test_an_input_that_is_not_whole_blocks_is_left_as_it_is(tensor: Any) -> None:
    assert found(tensor, block()).members == {1}


@pytest.mark.usefixtures("worth_anything")
def test_inputs_side_by_side_are_a_stretch() -> None:
    size = LEAST_BYTES
    first, second, third, small, last = side_by_side(size, size, 2 * size, BLOCK, size)

    donation = found(third, block(), first, last, second)

    stretches = {each.members: each.size for each in donation.stretches}
    assert stretches == {
        ((2, 0), (4, size), (0, 2 * size)): 4 * size,
        ((3, 0),): size,
        ((1, 0),): size,
    }
    assert donation_of([third, block(), first, last, second, small], {2, 4}).members == {2, 4}


@pytest.mark.usefixtures("worth_anything")
def test_what_shares_memory_with_another_input_is_left_as_it_is() -> None:
    first, second = side_by_side(LEAST_BYTES, LEAST_BYTES)

    assert found(first, second, first[10:20]) == NONE
    assert donation_of([first, second, first[10:20]], {1}).members == {1}


@pytest.mark.usefixtures("worth_anything")
def test_named_inputs_that_share_memory_are_left_as_they_are() -> None:
    """PyTorch does not hold saved tensors against each other: a view may be saved beside what it is of."""
    whole = block(4 * LEAST_BYTES)
    first, second = whole.split(whole.numel() // 2)

    assert found(whole, whole.view(4, -1)) == NONE
    assert found(whole, first, second) == NONE
    assert found(first, second).members == {0, 1}


def test_it_must_be_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [*side_by_side(LEAST_BYTES, LEAST_BYTES), block()]
    monkeypatch.setattr(donation, "STRETCH_BYTES", 2 * LEAST_BYTES)
    monkeypatch.setattr(donation, "WORTH_BYTES", 2 * LEAST_BYTES)
    assert found(*inputs).members == {0, 1}

    monkeypatch.setattr(donation, "WORTH_BYTES", 2 * LEAST_BYTES + 1)
    assert found(*inputs) == NONE


def test_a_part_of_a_graph_is_told_which_of_its_inputs_are_meant() -> None:
    whole = GraphFacts(is_backward=True, returned=frozenset({0, 2}))
    only = PartitionMap((3, None, 1), ((0,), (2,)))
    of_two = [PartitionMap((3,), ((0,),)), PartitionMap((None, 1), ((2,),))]

    assert whole.own_inputs({1, 3}) == {1, 3}
    assert whole.of_partition([only], 0).own_inputs({1, 4}) == {2}
    assert whole.of_partition([PartitionMap((3, 1), ((0,),))], 0).own_inputs({1, 3}) == frozenset()
    assert [whole.of_partition(of_two, part).own_inputs({1, 3}) for part in range(2)] == [frozenset()] * 2
    unknown = GraphFacts(is_backward=True)
    assert unknown.of_partition([only], 0).own_inputs({1}) == frozenset()


# --- what a capture has put there --------------------------------------------------------------------------------


class Captured:
    """A capture of two stretches, of two inputs and one, of four blocks each."""

    def __init__(self) -> None:
        self.inputs = [*side_by_side(4 * BLOCK, 4 * BLOCK), block(4 * BLOCK)]
        stretches = (Stretch(((0, 0), (1, 4 * BLOCK)), 8 * BLOCK), Stretch(((2, 0),), 4 * BLOCK))
        self.donation = Donation(stretches)

    def at(self, index: int, begin: int, blocks: int) -> Span:
        """Return so many blocks of an input, from one on."""
        start = self.inputs[index].data_ptr() + begin * BLOCK
        return Span(start, start + blocks * BLOCK)

    def occupied(
        self, allocations: list[Span], outputs: Sequence[Any] = (), held: tuple[Span, ...] = ()
    ) -> set[int]:
        places = dict(enumerate(self.inputs))
        capture = Capture(0, list(outputs), tuple(allocations), held, donation=self.donation, donated=places)
        return {*occupied(capture)}


def test_temporaries_may_lie_anywhere_in_a_stretch() -> None:
    captured = Captured()

    within = [captured.at(0, 0, 2), captured.at(0, 3, 2), captured.at(1, 0, 4), captured.at(2, 0, 4)]
    assert captured.occupied(within, [None, 3]) == set()


def test_an_input_is_occupied_by_what_stays() -> None:
    captured = Captured()
    output, held = captured.at(0, 2, 1), captured.at(2, 3, 1)

    assert captured.occupied([output, held], [captured.inputs[0][2 * FLOATS : 3 * FLOATS]]) == {0}
    assert captured.occupied([output, held], held=(held,)) == {2}
    whole = captured.inputs[0].as_strided((6 * FLOATS,), (1,))
    assert captured.occupied([], [whole]) == {0, 1}


def test_an_input_is_occupied_by_what_reaches_beyond_its_stretch() -> None:
    captured = Captured()

    assert captured.occupied([captured.at(1, 2, 3)]) == {1}
    assert captured.occupied([captured.at(0, -1, 9)]) == {0, 1}


def test_a_stretch_that_the_allocator_tore_is_left_as_it_is() -> None:
    captured = Captured()
    captured.inputs[1] = block(4 * BLOCK)

    assert captured.occupied([]) == {0, 1}


def test_the_next_capture_keeps_what_was_occupied_and_has_room_for_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(donation, "LEAST_BYTES", BLOCK)
    monkeypatch.setattr(donation, "WORTH_BYTES", 4 * BLOCK)
    captured = Captured()
    outputs = [torch.zeros(2 * FLOATS + 1), None, torch.zeros(1), torch.zeros(FLOATS // 2)]
    capture = Capture(0, outputs, ())

    one = captured.donation.keeping(frozenset({1}), capture)
    assert one == Donation(captured.donation.stretches, frozenset({1}), (BLOCK, BLOCK, 3 * BLOCK))
    assert one.overwritten == {0, 2}
    assert one.is_worth_it
    assert one.keeping(frozenset({2}), capture).members == {0, 1}
    misplaced = captured.inputs[0][FLOATS : 3 * FLOATS]
    again = Capture(0, [misplaced, *outputs], (), donation=one, donated=dict(enumerate(captured.inputs)))
    assert one.keeping(frozenset({0}), again).rooms == (*one.rooms, 2 * BLOCK)
    none = one.keeping(frozenset({0, 2}), capture)
    assert (none.stretches, none.is_worth_it) == ((), False)


def test_stand_ins_are_held_by_whoever_takes_the_inputs_alone_but_for_kept_ones() -> None:
    inputs = [torch.zeros(3), torch.zeros(8, 4, dtype=torch.bfloat16).t(), 5, torch.zeros(16)]
    given = list(inputs)
    stand_ins = StandIns(Donation((Stretch(((1, 0), (3, 64)), 128),), frozenset({3}), (BLOCK,)), (BLOCK,))

    stand_ins.put(given, torch.device("cpu"))

    assert given[0] is inputs[0]
    assert given[2] == 5
    assert stand_ins.allocations == 1 + 1 + 2 + 1 + 2
    held = {each.data_ptr() for each in stand_ins._held}
    for index in (1, 3):
        made, like, place = given[index], inputs[index], stand_ins.places[index]
        assert (made.size(), made.stride(), made.dtype) == (like.size(), like.stride(), like.dtype)
        assert (place.size(), place.stride(), place.dtype) == (like.size(), like.stride(), like.dtype)
        assert made.data_ptr() == place.data_ptr() != like.data_ptr()
        assert (made.data_ptr() in held) == (index == 3)


def test_inputs_of_a_stretch_move_as_one() -> None:
    captured = Captured()
    others = [block(), torch.zeros(0)]
    inputs = [*captured.inputs, *others]

    groups = joined(input_groups(inputs, ()), captured.donation.stretches, inputs)

    assert [[index for index, _ in group.members] for group, _ in groups] == [[3], [0, 1], [2]]
    assert [span for _, span in groups[1:]] == [captured.at(0, 0, 8), captured.at(2, 0, 4)]
    places = [each.data_ptr() for each in captured.inputs[:2]]
    assert groups[1][0].base(places) == places[0]
    with pytest.raises(MisfitError):
        groups[1][0].base([places[0], places[1] + BLOCK])


# --- a recording that overwrites ---------------------------------------------------------------------------------


class Backward:
    """A backward under test, and its link to a forward."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        self.named, self.is_kept = frozenset({0, 1}), False
        monkeypatch.setattr(donation, "LEAST_BYTES", BLOCK)
        monkeypatch.setattr(donation, "WORTH_BYTES", BLOCK)
        monkeypatch.setattr(donation, "STRETCH_BYTES", BLOCK)
        monkeypatch.setattr(_torch, "donated_inputs", lambda: self.named)
        monkeypatch.setattr(_torch, "graph_is_kept", lambda: lambda: self.is_kept)
        self.case = case
        self.link = Link()
        self.made: list[torch.Tensor] = []

    def make(self, body: Callable[[Operations, list[Any]], Any]) -> Relocatable:
        return self.case.made(body, self.link, GraphFacts(is_backward=True))

    def made_of_sizes(self) -> Relocatable:
        """Return a backward whose last input is a size."""
        return self.make(of_size)

    def inputs(self, *values: float) -> list[Any]:
        """Return inputs side by side that lie where none was before."""
        whole = self.case.allocator((len(values) * 4 * FLOATS,), (1,), torch.float32)
        self.made.append(whole)
        for part, value in zip(whole.split(4 * FLOATS), values, strict=True):
            part.fill_(value)
        return list(whole.split(4 * FLOATS))


@pytest.fixture
def backward(emulator: Emulator, allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backward]:
    case = Case(emulator, allocator)
    yield Backward(case, monkeypatch)
    case.close()


def chain(operations: Operations, inputs: list[Any]) -> Any:
    """Return `4 * first + 6 * second`, by temporaries of which the later ones lie where inputs lay."""
    first, second = inputs
    inputs.clear()
    total = operations.add(first, second)
    operations.done(first)
    twice = operations.add(total, total)
    other = operations.add(second, second)
    operations.done(second)
    operations.done(total)
    four = operations.add(twice, twice)
    operations.done(twice)
    out = operations.add(four, other)
    operations.done(four)
    operations.done(other)
    return (out,)


def overwriting(operations: Operations, inputs: list[Any]) -> Any:
    """Return a result that lies in no input, of temporaries that do."""
    first, second = inputs
    out = operations.add(first, second)
    operations.done(first)
    twice = operations.add(second, second)
    operations.accumulate(out, twice)
    operations.done(twice)
    operations.done(second)
    return (out,)


def call(backward: Backward, run: Relocatable, first: float, second: float) -> torch.Tensor:
    result: torch.Tensor = run(backward.inputs(first, second))[0]
    return result


def run_often(backward: Backward, run: Relocatable, calls: int = 4) -> None:
    for number in range(calls):
        assert call(backward, run, number, 10).unique().tolist() == [number + 30]


def test_an_offer_has_a_backward_be_recorded_anew_with_less_memory(backward: Backward) -> None:
    run = backward.make(overwriting)
    run_often(backward, run)
    backward.case.expect(captured=1, donated=0)
    before = sum(memory.bytes for memory in run.replays[0]._layout.memories)

    backward.link.note_alone({0, 1})
    run_often(backward, run)

    backward.case.expect(captured=2, donated=2, staged=0)
    assert backward.case.report.fallbacks == {relocatable.NOT_YET: 1}
    assert before - sum(memory.bytes for memory in run.replays[0]._layout.memories) == 4 * BLOCK
    assert run.replays[0].overwritten
    assert run.replays[0].counts.replays >= 3


def test_inputs_are_overwritten_and_all_else_is_left_alone(backward: Backward) -> None:
    backward.link.note_alone({0, 1})
    run = backward.make(overwriting)
    run_often(backward, run)

    first, second = backward.inputs(1, 2)
    beside = backward.inputs(3)[0]
    run([first, second])

    assert first.unique().tolist() == [4]
    assert (second.unique().tolist(), beside.unique().tolist()) == ([2], [3])


def test_an_input_in_which_an_output_would_lie_is_left_as_it_is(backward: Backward) -> None:
    backward.link.note_alone({0, 1})
    run = backward.make(chain)

    for number in range(4):
        assert call(backward, run, number, 10).unique().tolist() == [4 * number + 60]

    recorder = backward.case.recorder
    assert recorder.donations[0].overwritten == {0, 1}
    kept = [each.kept for each in recorder.donations]
    assert all(before < after for before, after in itertools.pairwise(kept))
    assert backward.case.report.counts["donated"] == len(recorder.donations[-1].overwritten)
    results = [call(backward, run, number, 0) for number in range(5)]
    assert [each.unique().tolist() for each in results] == [[4 * number] for number in range(5)]


def test_what_is_not_named_by_pytorch_is_not_overwritten(backward: Backward) -> None:
    backward.link.note_alone({0, 1})
    backward.named = frozenset({1})
    run = backward.make(overwriting)

    run_often(backward, run)

    assert {each.overwritten for each in backward.case.recorder.donations} == {frozenset({1})}


def test_an_offer_that_is_not_worth_it_changes_nothing(
    backward: Backward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donation, "WORTH_BYTES", 8 * BLOCK + 1)
    run = backward.make(overwriting)
    run_often(backward, run)
    backward.link.note_alone({0, 1})

    run_often(backward, run)

    backward.case.expect(captured=1, donated=0)
    assert backward.case.recorder.captures == 1


_CALLER = """
def call(run, inputs, keeps):
    kept = inputs[1] if keeps else None
    return run(inputs), kept

def _backward_impl(run, inputs, keeps):
    return call(run, inputs, keeps)
"""


@pytest.mark.parametrize("keeps", [False, True])
def test_what_a_caller_needs_afterwards_is_not_overwritten(backward: Backward, keeps: bool) -> None:
    """As generated code may that calls one captured part, and then does something else with an input of it."""
    names: dict[str, Any] = {}
    exec(compile(_CALLER, "torch/runtime_wrappers.py", "exec"), names)
    backward.link.note_alone({0, 1})
    run = backward.make(overwriting)

    for number in range(4):
        inputs = backward.inputs(number, 10)
        (result,), _ = names["_backward_impl"](run, list(inputs), keeps)
        assert result.unique().tolist() == [number + 30]

    assert run.replays[0].overwritten == ({0} if keeps else {0, 1})


class Given(list[Any]):
    """Inputs of which it can be seen whether anybody has them still."""


@pytest.mark.parametrize("ask", [_torch.donated_inputs, _torch.held_in_backward])
def test_nothing_is_kept_of_a_backward_that_has_been_asked(ask: Callable[[], frozenset[int]]) -> None:
    """Not until garbage is collected either: what it returns are gradients."""
    names: dict[str, Any] = {}
    exec(compile(_CALLER, "torch/runtime_wrappers.py", "exec"), names)
    given = Given([torch.zeros(1), torch.zeros(1)])
    seen = weakref.ref(given)
    gc.disable()
    try:
        (asked, kept) = names["_backward_impl"](lambda _: ask(), given, keeps=True)
        assert asked == ({id(kept)} if ask is _torch.held_in_backward else set())
        del given
        assert seen() is None
    finally:
        gc.enable()


def test_nobody_is_asked_what_a_caller_holds_if_there_is_too_little(
    backward: Backward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked may keep memory until it returns."""
    monkeypatch.setattr(donation, "WORTH_BYTES", 1 << 60)
    monkeypatch.setattr(_torch, "held_in_backward", lambda: pytest.fail("asked"))
    run = backward.make(overwriting)
    run_often(backward, run)
    backward.link.note_alone({0, 1})

    run_often(backward, run)

    assert run.replays[0].overwritten == frozenset()


def test_what_cannot_be_told_is_not_overwritten(backward: Backward, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "donated_inputs", lambda: 1 / 0)
    run = backward.make(overwriting)
    run_often(backward, run)
    backward.link.note_alone({0, 1})

    run_often(backward, run)

    backward.case.expect(captured=1, donated=0)
    assert [text for text in backward.case.report.failures if "ZeroDivisionError" in text]


def test_a_view_that_is_donated_too_is_not_overwritten_with_what_it_is_of(backward: Backward) -> None:
    backward.link.note_alone({0, 1})
    run = backward.make(overwriting)

    for number in range(5):
        (first,) = backward.inputs(number)
        assert run([first, first.view(-1)])[0].unique().tolist() == [4 * number]

    backward.case.expect(captured=1, donated=0)


def of_size(operations: Operations, inputs: list[Any]) -> Any:
    return overwriting(operations, inputs[:2])


def test_offers_that_come_again_have_nothing_be_recorded_again(
    backward: Backward, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each recording of a forward, as of another dynamic size, is observed, and the offer is the same each time."""
    monkeypatch.setattr(donation, "STRETCH_BYTES", 8 * BLOCK)
    run = backward.made_of_sizes()

    for latest in range(4):
        for number in range(3):
            # What the launched forward of a size that is new has saved lies apart.
            assert run([*backward.inputs(number), *backward.inputs(10), latest])[0].unique() == number + 30
        backward.link.note_alone({0, 1})
        for size in range(latest + 1):
            assert run([*backward.inputs(size, 10), size])[0].unique().tolist() == [size + 30]

    assert run.recordings == 4
    assert all(replay.overwritten == {0, 1} for replay in run.replays)
    backward.case.expect(captured=8, donated=8)


def test_a_smaller_offer_has_only_what_overwrites_more_be_recorded_again(backward: Backward) -> None:
    backward.link.note_alone({0, 1})
    backward.named = frozenset({1})
    run = backward.make(overwriting)
    run_often(backward, run)
    assert run.replays[0].overwritten == {1}

    backward.link.note_alone({1, 2})
    run_often(backward, run)

    assert run.replays[0].overwritten == {1}
    backward.case.expect(captured=1)
    backward.link.note_alone({0})
    run_often(backward, run)
    assert not run.replays[0].overwritten
    backward.case.expect(captured=2)


def test_what_is_recorded_while_an_offer_ends_does_not_overwrite(backward: Backward) -> None:
    """Another thread's forward runs under hooks, and its backward, while one is recorded; here it is the same thread."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        launches = operations is backward.case.recorder.launching
        if launches and backward.link.offer and backward.case.recorder.captures > 1:
            end_by_hooks(backward)
            assert call(backward, run, 5, 10).unique().tolist() == [35]
        return overwriting(operations, inputs)

    run = backward.make(body)
    run_often(backward, run)
    backward.link.note_alone({0, 1})

    for number in range(4):
        first, second = backward.inputs(number, 10)
        assert run([first, second])[0].unique().tolist() == [number + 30]
        assert first.unique().tolist() == [number]

    assert backward.case.report.counts["donated"] == 2
    assert not run.replays[0].overwritten


def end_by_hooks(backward: Backward) -> None:
    forward = Watched(lambda inputs: (), backward.link, is_backward=False)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        forward([])


def end_by_the_plan(backward: Backward) -> None:
    backward.link.withdraw()


def end_by_keeping_the_graph(backward: Backward) -> None:
    backward.is_kept = True


@pytest.mark.parametrize("end", [end_by_hooks, end_by_the_plan, end_by_keeping_the_graph])
def test_from_when_others_may_see_what_is_saved_nothing_is_overwritten(
    backward: Backward, end: Callable[[Backward], None]
) -> None:
    backward.link.note_alone({0, 1})
    run = backward.make(overwriting)
    run_often(backward, run)
    (before,) = run.replays
    assert before.overwritten

    end(backward)
    for number in range(3):
        first, second = backward.inputs(number, 2)
        assert run([first, second])[0].unique().tolist() == [number + 6]
        assert first.unique().tolist() == [number]

    backward.is_kept = False
    run_often(backward, run)
    assert backward.case.report.counts["captured"] == 2
    assert not run.replays[0].overwritten
    assert run.replays[0].counts.replays > 1


class Renewed(Link):
    """A link in which another thread's step is observed whenever an offer is withdrawn."""

    def withdraw(self) -> None:
        super().withdraw()
        self.note_alone({0, 1})


def test_a_graph_that_is_kept_is_left_as_it_is_also_if_the_offer_is_renewed_at_once(
    backward: Backward,
) -> None:
    backward.link = Renewed()
    backward.link.note_alone({0, 1})
    run = backward.make(overwriting)
    run_often(backward, run)
    assert run.replays[0].overwritten

    backward.is_kept, backward.named = True, frozenset()
    for number in range(3):
        first, second = backward.inputs(number, 10)
        assert run([first, second])[0].unique().tolist() == [number + 30]
        assert first.unique().tolist() == [number]


def test_once_hooks_were_on_nothing_is_offered(backward: Backward) -> None:
    end_by_hooks(backward)

    backward.link.note_alone({0})

    assert backward.link.offer is None


def test_a_recording_that_disagrees_is_made_without(backward: Backward) -> None:
    """What is hidden is read after it was overwritten: no node shows that it is needed."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        first, second = inputs
        operations.done(first)
        twice = operations.add(second, second)
        out = operations.add(first, twice)
        operations.done(twice)
        return (out,)

    backward.link.note_alone({0, 1})
    run = backward.make(body)

    for number in range(5):
        assert call(backward, run, number, 10).unique().tolist() == [number + 20]

    assert not backward.link.offer
    assert [reason for reason in backward.case.report.fallbacks if "output 0 differs" in reason]
    backward.case.expect(captured=1, donated=0)
    assert run.refusal is None
    assert run.replays[0].counts.replays > 1


def structured(operations: Operations, inputs: list[Any]) -> Any:
    """Return the beginning of `2 * first + second`, of which a kernel is given the second in a structure."""
    first, second = inputs
    out = operations.first(second, 64)
    operations.done(second)
    twice = operations.add(first, first)
    operations.accumulate(out, twice[:64])
    operations.done(twice)
    return (out,)


def test_a_structure_s_addresses_are_told_by_a_second_capture_that_donates_too(backward: Backward) -> None:
    backward.link.note_alone({0, 1})
    run = backward.make(structured)

    for number in range(4):
        assert call(backward, run, number, 10).unique().tolist() == [2 * number + 10]

    assert [each.overwritten for each in backward.case.recorder.donations] == [{0, 1}] * 2
    backward.case.expect(captured=1, donated=2)


def test_inputs_that_do_not_lie_side_by_side_get_a_recording_that_leaves_them_as_they_are(
    backward: Backward,
) -> None:
    """As of a forward that had to take memory of the allocator's, since others wait for their backward."""
    backward.link.note_alone({0, 1})
    run = backward.make(overwriting)
    run_often(backward, run)

    for number in range(6):
        (first,), (second,) = backward.inputs(number), backward.inputs(10)
        assert run([first, second])[0].unique().tolist() == [number + 30]
        assert first.unique().tolist() == [number]

    assert backward.case.report.fallbacks[Misfit.OVERLAP.value] == 1
    assert not run.replays[0].overwritten
    run_often(backward, run)
    backward.case.expect(captured=2)


@pytest.mark.parametrize("apart", [LOOKS - 1, LOOKS])
def test_an_offer_is_looked_at_until_inputs_lie_side_by_side_but_not_for_ever(
    backward: Backward, apart: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(donation, "STRETCH_BYTES", 8 * BLOCK)
    run = backward.make(overwriting)
    run_often(backward, run)
    backward.link.note_alone({0, 1})

    for number in range(apart):
        (first,), (second,) = backward.inputs(number), backward.inputs(10)
        assert run([first, second])[0].unique().tolist() == [number + 30]
    run_often(backward, run)

    assert bool(run.replays[0].overwritten) == (apart < LOOKS)


def test_where_the_second_capture_has_inputs_apart_nothing_is_donated(backward: Backward) -> None:
    backward.case.recorder.tears = True
    backward.link.note_alone({0, 1})
    run = backward.make(structured)

    for number in range(5):
        assert call(backward, run, number, 10).unique().tolist() == [2 * number + 10]

    assert backward.case.report.fallbacks[OTHERWISE] == 1
    backward.case.expect(captured=1, donated=0)


# --- any backward ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Program:
    """Steps over values, of which the first four are inputs: each adds two into a new one, or (`into`) the second to a temporary."""

    steps: tuple[tuple[int, int, bool], ...]
    returned: tuple[int, ...]

    def run(self, operations: Operations, inputs: list[Any]) -> Any:
        """Run it, letting go of each value after its last use, as compiled code does."""
        values = list(inputs)
        inputs.clear()
        last = {value: step for step, (one, other, _) in enumerate(self.steps) for value in (one, other)}
        for step, (one, other, into) in enumerate(self.steps):
            if into:
                operations.accumulate(values[one], values[other])
            else:
                values.append(operations.add(values[one], values[other]))
            for value in {one, other} - {*self.returned}:
                if last[value] == step:
                    operations.done(values[value])
        return tuple(values[value] for value in self.returned)

    def results(self, inputs: Sequence[float]) -> list[list[float]]:
        """Return what it is to return, of inputs that are filled with these."""
        values = list(inputs)
        for one, other, into in self.steps:
            if into:
                values[one] += values[other]
            else:
                values.append(values[one] + values[other])
        return [[values[value]] for value in self.returned]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    values, steps = 4, []
    for _ in range(draw(st.integers(1, 12))):
        one, other = draw(st.integers(0, values - 1)), draw(st.integers(0, values - 1))
        into = one >= 4 and draw(st.booleans())
        steps.append((one, other, into))
        values += not into
    made = range(4, values)
    chosen = draw(st.lists(st.sampled_from(made), unique=True, min_size=1, max_size=4)) if made else []
    return Program(tuple(steps), tuple(chosen))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(programs(), st.sets(st.integers(0, 2), min_size=1))
def test_any_backward_gives_what_it_gives_when_launched(
    backward: Backward, program: Program, named: set[int]
) -> None:
    """Inputs lie elsewhere at every call, outputs of earlier ones stay as they are, and so does what is not donated."""
    backward.named = frozenset(named)
    backward.link = Link()
    backward.link.note_alone(named)
    run = backward.make(program.run)
    kept = []
    for number in range(1, 6):
        given_values = [number, 10 * number, 100 * number, 1000 * number]
        inputs = [*backward.inputs(*given_values[:3]), *backward.inputs(given_values[3])]

        outputs = run(list(inputs))

        kept.append((outputs, program.results(given_values)))
        overwritten = run.replays[0].overwritten if run.replays else frozenset()
        assert overwritten <= named
        for index in {*range(4)} - overwritten:
            assert inputs[index].unique().tolist() == [given_values[index]]
    assert run.replays
    for outputs, right in kept:
        assert [each.unique().tolist() for each in outputs] == right
    run.close()


# --- what is offered ---------------------------------------------------------------------------------------------


@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=4))
def test_what_is_offered_was_the_backward_s_alone_in_every_step(steps: list[set[int]]) -> None:
    link = Link()

    for each in steps:
        link.note_alone(each)

    assert link.offer == frozenset.intersection(*map(frozenset, steps))
    before = link.offer
    link.note_alone(range(6))
    assert link.offer is before


class Told:
    """What compiled backwards were told that they may overwrite, and what they were given."""

    def __init__(self) -> None:
        self.donated: list[tuple[frozenset[int], int]] = []
        self.held: list[set[int]] = []


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    """Ask within each real compiled backward, on the CPU."""
    import torch._inductor.output_code

    told = Told()
    original = torch._inductor.output_code.CompiledFxGraph.post_compile

    def post_compile(self: Any, examples: Any, constants: Any, graph_kwargs: Any) -> None:
        original(self, examples, constants, graph_kwargs)
        inner, is_backward = self.current_callable, graph_kwargs["is_backward"]

        def run(inputs: list[Any]) -> Any:
            if is_backward:
                told.donated.append((_torch.donated_inputs(), len(inputs)))
                held = _torch.held_in_backward()
                told.held.append({index for index, each in enumerate(inputs) if id(each) in held})
            else:
                assert _torch.donated_inputs() == frozenset()
            return inner(inputs)

        self.current_callable = run

    monkeypatch.setattr(torch._inductor.output_code.CompiledFxGraph, "post_compile", post_compile)
    torch._dynamo.reset()
    yield told
    torch._dynamo.reset()


def model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x @ weight).relu().matmul(weight).sigmoid().sum()


def arguments() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 8), torch.randn(8, 8, requires_grad=True)


def test_a_compiled_backward_is_told_what_it_may_overwrite(told: Told) -> None:
    compiled = torch.compile(model)

    for _ in range(2):
        compiled(*arguments()).backward()

    (first, inputs), second = told.donated
    assert second == (first, inputs)
    assert 0 < len(first) < inputs
    assert max(first) < inputs
    assert told.held == [set(), set()]


def test_a_backward_that_is_to_run_again_may_overwrite_nothing(told: Told) -> None:
    """Also where PyTorch was told only after it had compiled the backward: then it names what it may overwrite."""
    from torch._functorch import config

    compiled = torch.compile(model)
    compiled(*arguments()).backward()

    with config.patch(donated_buffer=False):
        loss = compiled(*arguments())
        loss.backward(retain_graph=True)
        loss.backward()

    (first, _), (kept, _), (last, _) = told.donated
    assert kept == frozenset()
    assert first == last != kept


def test_who_tells_pytorch_not_to_overwrite_tells_us(told: Told) -> None:
    from torch._functorch import config

    with config.patch(donated_buffer=False):
        compiled = torch.compile(model)
        compiled(*arguments()).backward()

    assert [donated for donated, _ in told.donated] == [frozenset()]
