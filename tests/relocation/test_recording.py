"""Recordings that are bound to new addresses at every call: right results, nothing written elsewhere, nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client import recording
from pygraphd.client.binding import LESS_OFTEN, PATIENCE, UnfitError
from pygraphd.client.bulk import InPython, helper
from pygraphd.client.driver import DriverError
from pygraphd.client.executables import FEW_BINDINGS, MET, ONE_LESS, STAYS_PATCHED
from pygraphd.client.parameters import OpaqueError
from pygraphd.client.recording import Built, Capture, build, input_groups
from pygraphd.client.relocation import BLOCK, Span

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from pygraphd.client.replay import Replay
    from tests.relocation.conftest import Allocator, Arena, Emulator, Graph


pytestmark = pytest.mark.torch


class Recorder:
    """Makes graphs as a capture would."""

    def __init__(self, emulator: Emulator, allocator: Allocator, arena: Arena | None = None) -> None:
        self.emulator = emulator
        self.allocator = allocator
        self.arena = arena or emulator.arena()
        self.graph: Graph = emulator.graph()
        self.notes: list[str] = []

    def floats(self, *values: float) -> torch.Tensor:
        """Return a tensor on the device."""
        return self.allocator.tensor(torch.tensor(values, dtype=torch.float32))

    def built(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        staged: dict[int, torch.Tensor] | None = None,
        together: Collection[int] = (),
    ) -> Built:
        capture = Capture(self.graph.handle, list(outputs), tuple(self.arena.allocations))
        built = build(self.emulator.driver, capture, inputs, staged or {}, self.notes.append, together)
        self.arena.let_go()
        return built


@pytest.fixture
def recorder(emulator: Emulator, allocator: Allocator) -> Recorder:
    return Recorder(emulator, allocator)


def test_inputs_and_outputs_lie_anywhere_and_outputs_are_kept(recorder: Recorder) -> None:
    a, b, out = recorder.floats(1, 2), recorder.floats(10, 20), recorder.arena.allocate(2)
    recorder.graph.add(a, b, out)
    replay = recorder.built([a, b], [out]).replay

    kept = [replay([recorder.floats(i, i), recorder.floats(5, 6)])[0] for i in range(20)]

    assert [each.tolist() for each in kept] == [[i + 5.0, i + 6.0] for i in range(20)]
    assert len({each.data_ptr() for each in kept}) == 20
    assert replay.counts.replays == 20
    assert recorder.arena.untouched()
    replay.close()


def test_what_lies_where_it_lay_is_not_written_again(recorder: Recorder) -> None:
    a, b, out = recorder.floats(1, 2), recorder.floats(10, 20), recorder.arena.allocate(2)
    recorder.graph.add(a, b, out)
    recorder.graph.scale(out, out, 2.0)
    replay = recorder.built([a, b], [out]).replay
    memory = replay.memory()

    for _ in range(3):
        replay.run([a, b], memory)
    assert (replay.counts.replays, replay.counts.relocated, replay.counts.written) == (3, 1, 2)

    other = recorder.floats(100, 200)
    assert replay.run([a, other], memory)[0].tolist() == [202, 404]
    assert (replay.counts.relocated, replay.counts.written) == (2, 3)
    replay.close()


def test_addresses_that_take_turns_are_written_until_each_set_has_an_executable(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    sets = [(recorder.floats(i, i), replay.memory()) for i in range(4)]

    written: list[int] = []
    for turn in range(24):
        values, memory = sets[turn % 4]
        values += 1
        expected = (values * 3).tolist()
        assert replay.run([values], memory)[0].tolist() == expected
        written.append(replay.counts.written - sum(written))

    assert (replay.executables, replay.made) == (4, 5)  # the first was written to, and made anew
    assert written[:4] == [1, 1, 1, 1]
    assert written[-16:] == [0] * 16
    replay.close()


def test_what_nearly_comes_back_gets_an_executable_and_costs_what_is_new(recorder: Recorder) -> None:
    """Nine inputs take turns between two places, and the tenth never lies where it lay."""
    inputs, outputs = [recorder.floats(i, i) for i in range(10)], []
    for each in inputs:
        outputs.append(recorder.arena.allocate(2))
        recorder.graph.scale(each, outputs[-1], 2.0)
    replay = recorder.built(inputs, outputs).replay
    sets = [([recorder.floats(i, turn) for i in range(9)], replay.memory()) for turn in range(2)]

    written: list[int] = []
    for turn in range(20):
        values, memory = sets[turn % 2]
        last = recorder.floats(turn, turn)
        results = replay.run([*values, last], memory)
        assert [each.tolist() for each in results] == [(each * 2).tolist() for each in (*values, last)]
        written.append(replay.counts.written - sum(written))

    assert replay.executables == 2
    assert written[-10:] == [1] * 10
    replay.close()


@pytest.mark.parametrize(("count", "most"), [(4, 0), (5, 2), (6, 3), (8, 6)])
def test_where_more_addresses_rotate_than_there_are_executables_some_stay_bound(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, count: int, most: int
) -> None:
    """Were the one written to that was not used for longest, it would be the one that is asked for next, at every call."""
    monkeypatch.setattr("pygraphd.client.executables.MAX_NODES", 1)
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    sets = [(recorder.floats(i, i), replay.memory()) for i in range(count)]

    def turn() -> int:
        before = replay.counts.written
        for values, memory in sets:
            assert replay.run([values], memory)[0].tolist() == (values * 3).tolist()
        return replay.counts.written - before

    for _ in range(12):
        turn()
    assert replay.executables == FEW_BINDINGS
    assert max(turn() for _ in range(4)) <= most
    replay.close()


def test_an_executable_that_is_not_used_any_more_is_bound_anew(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.client.executables.MAX_NODES", 1)
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    sets = [(recorder.floats(i, i), replay.memory()) for i in range(8)]

    def written_for(number: int) -> int:
        before = replay.counts.written
        values, memory = sets[number]
        assert replay.run([values], memory)[0].tolist() == (values * 3).tolist()
        return replay.counts.written - before

    for begin in (0, 4, 2):
        for turn in range(6 * FEW_BINDINGS):
            written_for(begin + turn % FEW_BINDINGS)
        assert [written_for(begin + number) for number in range(FEW_BINDINGS)] == [0] * FEW_BINDINGS
    assert replay.executables == FEW_BINDINGS
    replay.close()


def test_what_comes_back_in_part_gets_no_executable(recorder: Recorder) -> None:
    """What has moved lies where it lay before, but then the rest lay elsewhere."""
    inputs, outputs = [recorder.floats(i, i) for i in range(4)], []
    for each in inputs:
        outputs.append(recorder.arena.allocate(2))
        recorder.graph.scale(each, outputs[-1], 2.0)
    replay = recorder.built(inputs, outputs).replay
    memory = replay.memory()
    first, second = ([recorder.floats(i, turn) for i in range(4)] for turn in range(2))

    for values in (first, second, [*first[:2], *second[2:]]):
        results = replay.run([*values], memory)
        assert [each.tolist() for each in results] == [(each * 2).tolist() for each in values]

    assert (replay.executables, replay.counts.written) == (1, 4 + 4 + 2)
    replay.close()


def test_an_executable_for_each_set_where_its_inputs_together_are_half_of_the_nodes(
    recorder: Recorder,
) -> None:
    inputs, outputs = [recorder.floats(i, i) for i in range(3)], []
    for each in (*inputs, inputs[2]):
        outputs.append(recorder.arena.allocate(2))
        recorder.graph.scale(each, outputs[-1], 2.0)
    replay = recorder.built(inputs, outputs).replay
    memory, sets = replay.memory(), [[recorder.floats(i, turn) for i in range(2)] for turn in range(12)]

    for _ in range(5):
        written = replay.counts.written
        for values in sets:
            replay.run([*values, inputs[2]], memory)
    assert (replay.executables, replay.counts.written) == (len(sets), written)
    replay.close()


def test_many_executables_are_found_in_any_order_however_many_addresses_were_met(recorder: Recorder) -> None:
    a, outputs = recorder.floats(1, 2), []
    for _ in range(3):
        outputs.append(recorder.arena.allocate(2))
        recorder.graph.scale(a, outputs[-1], 2.0)
    replay = recorder.built([a], outputs).replay
    memory, sets = replay.memory(), [recorder.floats(i, i) for i in range(12)]
    for _ in range(4):
        for values in sets:
            replay.run([values], memory)
    order = random.Random(0)

    written: list[int] = []
    for turn in range(MET + 2):
        replay.run([recorder.floats(turn, turn)], memory)  # never again
        before = replay.counts.written
        for values in order.sample(sets, len(sets)):
            replay.run([values], memory)
        written.append(replay.counts.written - before)

    assert not any(written[5:])  # then what is never used again has an executable for itself
    bindings = replay._bindings
    assert bindings is not None
    assert len(bindings._met) == MET
    assert len(bindings._bound_to) <= MET
    replay.close()


def test_each_executable_knows_where_it_is_bound_itself(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    one, two = ((recorder.floats(i, i), replay.memory()) for i in (1, 2))
    for _ in range(3):
        replay.run([two[0]], two[1])
        replay.run([one[0]], one[1])
    assert replay.executables == 2

    # Each gets other memory in turn, while its input stays where it was.
    assert replay.run([two[0]], replay.memory())[0].tolist() == [6, 6]
    assert replay.run([one[0]], replay.memory())[0].tolist() == [3, 3]
    assert replay.executables == 2
    replay.close()


def test_addresses_that_never_come_back_need_one_executable(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    kept = [replay([recorder.floats(i, i)])[0] for i in range(30)]

    assert [each[0].item() for each in kept] == [3.0 * i for i in range(30)]
    assert replay.executables == 1
    replay.close()


def test_more_sets_than_executables_are_still_right(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    sets = [(recorder.floats(i, i), replay.memory()) for i in range(7)]

    for turn in range(40):
        values, memory = sets[turn * turn % 7]
        assert replay.run([values], memory)[0].tolist() == (values * 3).tolist()

    assert replay.executables == 4
    replay.close()


def test_where_another_executable_cannot_be_had_one_is_enough(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    sets = [(recorder.floats(i, i), replay.memory()) for i in range(2)]
    for values, memory in sets:
        replay.run([values], memory)
    recorder.emulator.fail_at(1)  # the first call that another executable takes

    for turn in range(6):
        values, memory = sets[turn % 2]
        assert replay.run([values], memory)[0].tolist() == (values * 3).tolist()

    assert replay.executables == 1
    assert recorder.notes == [f"{ONE_LESS}: cuGraphKernelNodeSetParams_v2 failed with CUresult 999"]
    replay.close()


def test_another_executable_is_made_where_it_is_bound_as_the_memory_of_the_capture_is_gone(
    recorder: Recorder,
) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(3)
    recorder.graph.set(out, 0)
    recorder.graph.copy(out[:2], a)
    recorder.graph.accumulate(out[1:2], a)
    replay = recorder.built([a], [out]).replay
    sets = [(recorder.floats(i, 2 * i), replay.memory()) for i in range(4)]

    for turn in range(20):
        values, memory = sets[turn % 4]
        memory[0].fill_(7)
        first, second = values.tolist()
        assert replay.run([values], memory)[0].tolist() == [first, second + first, 0]

    assert replay.executables == 4
    assert recorder.notes == []
    assert recorder.arena.untouched()
    replay.close()


def test_an_executable_that_stays_bound_is_made_anew(recorder: Recorder) -> None:
    """On a GPU, nodes that were written into an executable are launched slower."""
    emulator = recorder.emulator
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.copy(out, a)
    recorder.graph.accumulate(out, a)
    replay = recorder.built([a], [out]).replay
    alive = emulator.live()
    values, memory = recorder.floats(3, 4), replay.memory()

    def calls(count: int) -> int:
        before = emulator.patched_launches()
        for _ in range(count):
            assert replay.run([values], memory)[0].tolist() == (values * 2).tolist()
        return emulator.patched_launches() - before

    assert calls(1) == 1
    assert calls(PATIENCE - 1) == PATIENCE - 1
    assert replay.made == 1
    assert calls(5) == 0
    assert (emulator.live(), replay.made) == (alive, 2)

    memory = replay.memory()  # moved, so it is written to, and not made anew as soon as the first time
    again = LESS_OFTEN * PATIENCE
    assert calls(again) == again
    assert calls(5) == 0
    assert (replay.executables, emulator.live(), recorder.notes) == (1, alive, [])
    replay.close()


@pytest.mark.parametrize("call", range(1, 4))
def test_an_executable_that_cannot_be_made_anew_stays(recorder: Recorder, call: int) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.copy(out, a)
    recorder.graph.accumulate(out, a)
    replay = recorder.built([a], [out]).replay
    values, memory = recorder.floats(3, 4), replay.memory()
    for _ in range(PATIENCE):
        replay.run([values], memory)
    recorder.emulator.fail_at(call)

    for _ in range(3 * LESS_OFTEN * PATIENCE):
        assert replay.run([values], memory)[0].tolist() == (values * 2).tolist()

    assert [note.split(":")[0] for note in recorder.notes] == [STAYS_PATCHED]
    replay.close()


def test_inputs_that_do_not_fit_get_no_executable(recorder: Recorder) -> None:
    storage = recorder.allocator.tensor(torch.zeros(256))
    a, worse = storage[64:66], storage[67:69]
    out = recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 1.0)
    replay = recorder.built([a], [out]).replay
    memory = replay.memory()

    for _ in range(5):
        with pytest.raises(UnfitError, match="not aligned as it was"):
            replay.run([worse], memory)

    assert replay.executables == 1
    replay.close()


def test_a_replay_that_was_closed_fits_no_call(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    replay.close()

    inputs = [a]
    with pytest.raises(UnfitError, match="gone for others"):
        replay(inputs)
    assert inputs == [a]


def test_the_list_of_inputs_is_emptied_and_a_list_stays_a_list(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    capture = Capture(
        recorder.graph.handle, [out, None, 7], tuple(recorder.arena.allocations), as_tuple=False
    )
    replay = build(recorder.emulator.driver, capture, [a, 2], {}, recorder.notes.append).replay
    inputs = [recorder.floats(1, 1), 2]

    outputs = replay(inputs)

    assert inputs == []
    assert isinstance(outputs, list)
    assert outputs[0].tolist() == [3, 3]
    assert outputs[1:] == [None, 7]
    replay.close()


def test_an_output_where_a_larger_temporary_was_does_not_write_past_its_end(recorder: Recorder) -> None:
    """The published way, address by address, would write the temporary's 300 floats to where 2 were allocated."""
    arena, graph = recorder.arena, recorder.graph
    a = recorder.allocator.tensor(torch.arange(300.0))
    temporary = arena.allocate(300)
    graph.scale(a, temporary, 2.0)
    middle = arena.allocate(300)
    graph.scale(temporary, middle, 2.0)
    arena.free(temporary)
    out = arena.allocate(2)
    assert out.data_ptr() == temporary.data_ptr()
    graph.add(middle[:2], middle[1:3], out)
    replay = recorder.built([a], [out]).replay

    [result] = replay([recorder.allocator.tensor(torch.arange(300.0) + 1)])

    assert result.tolist() == [4 * (1 + 2), 4 * (2 + 3)]
    assert result.untyped_storage().nbytes() >= 300 * 4
    assert arena.untouched()
    replay.close()


def test_a_temporary_of_any_size_may_have_lain_where_an_output_lies(recorder: Recorder) -> None:
    """1001 bytes of booleans, say, which are no whole number of floats."""
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    odd = Span(out.data_ptr(), out.data_ptr() + 1001)
    capture = Capture(recorder.graph.handle, [out], (*recorder.arena.allocations, odd))
    replay = build(recorder.emulator.driver, capture, [a], {}, recorder.notes.append).replay

    assert replay([recorder.floats(1, 2)])[0].tolist() == [3, 6]
    replay.close()


def test_each_input_of_a_group_keeps_its_alignment(recorder: Recorder) -> None:
    storage = recorder.allocator.tensor(torch.arange(256.0))
    worse, better = storage[63:67], storage[64:68]
    out = recorder.arena.allocate(4)
    recorder.graph.add(worse, better, out)
    replay = recorder.built([worse, better], [out]).replay

    with pytest.raises(UnfitError, match="not aligned as it was"):
        replay([storage[64:68], storage[65:69]])
    assert replay([storage[127:131], storage[128:132]])[0].tolist() == [255, 257, 259, 261]
    replay.close()


def test_a_replay_that_nobody_keeps_leaves_nothing(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    before = recorder.emulator.live()
    built = recorder.built([a], [out])
    assert recorder.emulator.live() != before

    del built
    gc.collect()

    graphs, executables = recorder.emulator.live()
    assert (graphs, executables) == (before[0] - 1, before[1])


def test_on_another_stream_nothing_is_written_at_a_fixed_address(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, out, buffer = recorder.floats(1, 2), recorder.arena.allocate(2), recorder.floats(0, 0)
    recorder.graph.add(a, buffer, out)
    stream = [7]
    monkeypatch.setattr("pygraphd.client._torch.current_stream", lambda _device: lambda: stream[0])
    replay = recorder.built([a, buffer], [out], {1: buffer}).replay
    assert replay([a, recorder.floats(10, 20)])[0].tolist() == [11, 22]

    stream[0] = 8
    with pytest.raises(UnfitError, match="another stream"):
        replay([a, recorder.floats(0, 0)])

    assert buffer.tolist() == [10, 20]
    replay.close()


def test_outputs_that_share_memory_share_it_in_every_call(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2, 3, 4), recorder.arena.allocate(4)
    recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a], [out, out.view(2, 2).t()]).replay

    flat, turned = replay([recorder.floats(5, 6, 7, 8)])

    assert turned.tolist() == [[10, 14], [12, 16]]
    flat[0] = -1
    assert turned[0, 0] == -1
    replay.close()


def test_outputs_that_may_be_together_share_one_allocation_and_keep_apart(recorder: Recorder) -> None:
    a, arena = recorder.floats(1, 2), recorder.arena
    alone, first, second = arena.allocate(2), arena.allocate(2), arena.allocate(300)
    temporary = arena.allocate(500)
    recorder.graph.scale(a, temporary[:2], 1.0)
    arena.free(temporary)
    third = arena.allocate(2)  # where the temporary was
    for factor, out in enumerate((alone, first, second[:2], third), start=2):
        recorder.graph.scale(a, out, float(factor))
    outputs = [alone, first, second[:2], third]
    replay = recorder.built([a], outputs, together={1, 2, 3}).replay

    kept = [replay([recorder.floats(i, -i)]) for i in range(4)]

    assert [[each.tolist() for each in made] for made in kept] == [
        [[factor * i, -factor * i] for factor in (2.0, 3.0, 4.0, 5.0)] for i in range(4)
    ]
    for made in kept:
        own, *shared = (each.untyped_storage().data_ptr() for each in made)
        assert own not in shared
        assert len(set(shared)) == 1
        assert all(each.data_ptr() % BLOCK == 0 for each in made)
        assert not any(each._is_view() for each in made[1:])
    assert len([memory.bytes for memory in replay.memories]) == 2
    assert arena.untouched()
    replay.close()


def test_an_output_is_not_put_with_others_if_one_in_its_memory_must_not_be(recorder: Recorder) -> None:
    a, arena = recorder.floats(1, 2, 3, 4), recorder.arena
    block, *others = arena.allocate(4), arena.allocate(4), arena.allocate(4)
    for out in (block, *others):
        recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a], [block[:2], block[2:], *others], together={0, 2, 3}).replay

    left, right, *rest = replay([recorder.floats(1, 2, 3, 4)])

    assert [*left.tolist(), *right.tolist()] == [2, 4, 6, 8]
    assert [each.tolist() for each in rest] == [[2, 4, 6, 8]] * 2
    storages = [each.untyped_storage().data_ptr() for each in (left, right, *rest)]
    assert storages[0] == storages[1] != storages[2] == storages[3]
    replay.close()


def test_one_output_that_may_be_together_stays_as_it_is(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a], [out], together={0}).replay

    (made,) = replay([a])

    assert [memory.bytes for memory in replay.memories] == [8]
    assert made.tolist() == [2, 4]
    replay.close()


def test_outputs_of_several_types_are_together_by_type(recorder: Recorder) -> None:
    a, arena = recorder.floats(1, 2), recorder.arena
    outputs = [arena.allocate(2) for _ in range(5)]
    for out in outputs:
        recorder.graph.scale(a, out, 2.0)
    types = [torch.float32, torch.int32, torch.float32, torch.int32, torch.int64]
    captured = [out.view(dtype) for out, dtype in zip(outputs, types, strict=True)]
    replay = recorder.built([a], captured, together=set(range(5))).replay

    made = replay([a])

    assert [each.dtype for each in made] == types
    assert [each.view(torch.float32).tolist() for each in made] == [[2, 4]] * 5
    storages = [each.untyped_storage().data_ptr() for each in made]
    assert storages[0] == storages[2] != storages[1] == storages[3]
    assert len(set(storages)) == len([memory.bytes for memory in replay.memories]) == 3
    replay.close()


def all_together(recorder: Recorder, lengths: Sequence[int]) -> tuple[Replay, list[int]]:
    """Record outputs of so many floats that may all be together; return the replay, and where their storages begin in a call."""
    a, outputs = recorder.floats(1, 2), [recorder.arena.allocate(length) for length in lengths]
    for out in outputs:
        recorder.graph.scale(a, out[:2], 2.0)
    replay = recorder.built([a], outputs, together=set(range(len(outputs)))).replay
    made = replay([a])
    assert [each[:2].tolist() for each in made] == [[2, 4]] * len(outputs)
    return replay, [each.untyped_storage().data_ptr() for each in made]


def test_small_outputs_are_not_put_with_large_ones(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "SMALL_BYTES", BLOCK)
    monkeypatch.setattr(recording, "SMALL_TOGETHER_BYTES", 2 * BLOCK)
    replay, storages = all_together(recorder, [2, 200, 2, 200, 2, 2])

    assert storages[1] == storages[3]
    assert storages[0] == storages[2]
    assert storages[4] == storages[5]
    assert len(set(storages)) == 3
    replay.close()


def test_a_replay_that_cannot_be_made_leaves_no_executable(
    recorder: Recorder, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no replay")

    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 2.0)
    monkeypatch.setattr(recording, "Replay", fail)

    with pytest.raises(RuntimeError, match="no replay"):
        recorder.built([a], [out])

    assert emulator.live() == (0, 0)


def test_what_is_together_comes_in_pieces_of_bounded_size(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "TOGETHER_BYTES", 3 * BLOCK)
    monkeypatch.setattr(recording, "SMALL_TOGETHER_BYTES", 3 * BLOCK)
    monkeypatch.setattr(recording, "SMALL_BYTES", 0)
    replay, storages = all_together(recorder, [2, 200, 2, 600, 2, 2])  # in blocks: 1, 2, 1, 5, 1, 1

    assert storages[0] == storages[1]
    assert storages[4] == storages[5]
    assert len(set(storages)) == 4
    assert sorted([memory.bytes for memory in replay.memories]) == [8, 2 * BLOCK, 3 * BLOCK, 2400]
    replay.close()


def test_inputs_that_are_changed_in_place_are_changed_where_they_lie(recorder: Recorder) -> None:
    a, b = recorder.floats(1, 2), recorder.floats(10, 20)
    recorder.graph.accumulate(a, b)
    replay = recorder.built([a, b], [a]).replay
    cache = recorder.floats(0, 0)

    for _ in range(3):
        [returned] = replay([cache, recorder.floats(1, 2)])
        assert returned is cache

    assert cache.tolist() == [3, 6]
    assert a.tolist() == [1, 2]
    replay.close()


def test_a_view_of_an_input_is_a_view_of_the_callers(recorder: Recorder) -> None:
    a = recorder.allocator.tensor(torch.arange(6.0))
    out = recorder.arena.allocate(6)
    recorder.graph.scale(a, out, 1.0)
    view = a.view(2, 3)[:, 1:]
    whole = a.view(torch.int32)
    replay = recorder.built([a], [out, view, whole]).replay
    mine = recorder.allocator.tensor(torch.arange(6.0) * 2)

    _, seen, numbers = replay([mine])

    assert seen.tolist() == [[2, 4], [8, 10]]
    assert seen.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
    assert not seen._is_view()
    assert torch.equal(numbers, mine.view(torch.int32))
    replay.close()


def test_a_constant_of_the_module_and_an_empty_tensor_come_out_as_they_are(recorder: Recorder) -> None:
    a, out, constant = recorder.floats(1, 2), recorder.arena.allocate(2), recorder.floats(7)
    recorder.graph.add(a, a, out)
    replay = recorder.built([a], [out, constant, torch.empty(0, 3)]).replay

    first, second = replay([recorder.floats(1, 1)]), replay([recorder.floats(1, 1)])

    assert first[1] is second[1] is constant
    assert first[2].shape == (0, 3)
    assert first[2] is not second[2]
    replay.close()


def test_inputs_that_overlap_move_as_one_and_others_of_the_same_storage_do_not(recorder: Recorder) -> None:
    base = recorder.allocator.tensor(torch.arange(10.0))
    a, b, apart = base[0:3], base[1:4], base[6:9]
    assert [len(group.members) for group, _ in input_groups([a, b, apart], {})] == [2, 1]
    out, far = recorder.arena.allocate(3), recorder.arena.allocate(3)
    recorder.graph.add(a, b, out)
    recorder.graph.scale(apart, far, 2.0)
    replay = recorder.built([a, b, apart], [out, far]).replay

    moved = recorder.allocator.tensor(torch.arange(100.0, 300.0))
    outputs = replay([moved[64:67], moved[65:68], torch.arange(3.0)])

    assert [each.tolist() for each in outputs] == [[329, 331, 333], [0, 2, 4]]
    with pytest.raises(UnfitError, match="lie otherwise"):
        replay([moved[64:67], moved[66:69], apart])
    assert [each.tolist() for each in replay([a, b, apart])] == [[1, 3, 5], [12, 14, 16]]
    replay.close()


def test_inputs_that_start_to_share_memory_are_bound_as_they_lie(recorder: Recorder) -> None:
    a, b, out = recorder.floats(1, 2), recorder.floats(10, 20), recorder.arena.allocate(2)
    recorder.graph.add(a, b, out)
    replay = recorder.built([a, b], [out]).replay

    same = recorder.floats(3, 4)

    assert replay([same, same])[0].tolist() == [6, 8]
    replay.close()


def test_a_kernel_may_find_its_input_from_the_beginning_of_the_storage(recorder: Recorder) -> None:
    base = recorder.allocator.tensor(torch.arange(6.0))
    view = base[4:]
    out = recorder.arena.allocate(2)
    recorder.graph.scale(base[2:4], out, 1.0)  # the kernel was handed an address before its input
    replay = recorder.built([view], [out]).replay

    moved = recorder.allocator.tensor(torch.arange(10.0, 16.0))

    assert replay([moved[4:]])[0].tolist() == [12, 13]
    replay.close()


def test_an_input_that_is_aligned_worse_does_not_fit_and_changes_nothing(recorder: Recorder) -> None:
    storage = recorder.allocator.tensor(torch.zeros(256))
    a = storage[64:66]
    out = recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 1.0)
    replay = recorder.built([a], [out]).replay
    worse = storage[67:69]

    inputs = [worse]
    with pytest.raises(UnfitError, match="not aligned as it was"):
        replay(inputs)

    assert inputs == [worse]
    assert replay([a])[0].tolist() == [0, 0]
    replay.close()


def test_an_input_that_no_node_shows_is_named_and_can_be_staged(recorder: Recorder) -> None:
    a, hidden = recorder.floats(1, 2), recorder.floats(3, 4)
    table = (ctypes.c_void_p * 1)(hidden.data_ptr())
    out, seen = recorder.arena.allocate(2), recorder.arena.allocate(2)
    recorder.graph.through_table(table, out)
    recorder.graph.scale(a, seen, 1.0)
    built = recorder.built([a, hidden], [out, seen])
    assert built.unseen == {1}
    built.replay.close()

    again = Recorder(recorder.emulator, recorder.allocator)
    buffer = recorder.floats(0, 0)
    table[0] = buffer.data_ptr()
    out, seen = again.arena.allocate(2), again.arena.allocate(2)
    again.graph.through_table(table, out)
    again.graph.scale(a, seen, 1.0)
    built = again.built([a, hidden], [out, seen], {1: buffer})

    assert built.unseen == frozenset()
    outputs = built.replay([recorder.floats(5, 6), recorder.floats(7, 8)])
    assert [each.tolist() for each in outputs] == [[7, 8], [5, 6]]
    built.replay.close()


def test_memory_that_must_stay_in_place_stays(recorder: Recorder) -> None:
    """A generator's state, allocated in the capture and read at every replay."""
    a, out, state = (
        recorder.floats(1, 2),
        recorder.arena.allocate(2),
        recorder.allocator.tensor(torch.zeros(BLOCK // 4)),
    )
    held = Span(state.data_ptr(), state.data_ptr() + BLOCK)
    recorder.graph.add(a, state[:2], out)
    capture = Capture(recorder.graph.handle, [out], tuple(recorder.arena.allocations), held=(held,))
    replay = build(recorder.emulator.driver, capture, [a], {}, recorder.notes.append).replay
    state[:2] = recorder.floats(100, 200)

    assert replay([recorder.floats(1, 1)])[0].tolist() == [101, 201]
    replay.close()


def test_an_output_in_memory_that_must_stay_is_refused(recorder: Recorder) -> None:
    out = recorder.arena.allocate(2)
    held = tuple(recorder.arena.allocations)

    with pytest.raises(OpaqueError, match="must stay in place"):
        build(
            recorder.emulator.driver,
            Capture(recorder.graph.handle, [out], held, held),
            [recorder.floats(1)],
            {},
            recorder.notes.append,
        )


def test_memory_that_must_stay_but_was_something_else_before_is_refused(recorder: Recorder) -> None:
    big = recorder.arena.allocate(200)
    recorder.arena.free(big)
    recorder.arena.allocate(2)
    held = (recorder.arena.allocations[-1],)

    with pytest.raises(OpaqueError, match="used for something else"):
        build(
            recorder.emulator.driver,
            Capture(recorder.graph.handle, [recorder.floats(1)], tuple(recorder.arena.allocations), held),
            [recorder.floats(1)],
            {},
            recorder.notes.append,
        )


def test_two_devices_are_refused(recorder: Recorder) -> None:
    with pytest.raises(OpaqueError, match="works on 2 devices"):
        recorder.built([recorder.floats(1)], [torch.empty(1, device="meta")])


def test_every_driver_call_may_fail_and_nothing_is_left_behind(recorder: Recorder) -> None:
    """Also while it is recorded; and inputs that a call could not take are there for a plain launch."""
    emulator = recorder.emulator

    def attempt(fail_at: int) -> int:
        emulator.fail_at(0)
        each = Recorder(emulator, recorder.allocator)
        a, b, out = recorder.floats(1, 2), recorder.floats(3, 4), each.arena.allocate(2)
        each.graph.add(a, b, out)
        each.graph.set(out[:1], 0)
        each.graph.copy(out[:1], b[:1])
        inputs = [recorder.floats(5, 6), recorder.floats(7, 8)]
        replay = None
        emulator.fail_at(fail_at)
        try:
            replay = each.built([a, b], [out]).replay
            assert replay(inputs)[0].tolist() == [7, 14]
        except DriverError:
            assert [each.tolist() for each in inputs] == [[5, 6], [7, 8]]
        calls = emulator.calls()
        emulator.fail_at(0)
        if replay is not None:
            replay.close()
            replay.close()
        return calls

    before = emulator.live()
    needed = attempt(0)
    assert needed == 15
    for call in range(1, needed + 1):
        attempt(call)
        assert emulator.live() == before, f"call {call}"
    emulator.driver.destroy_graph(recorder.graph.handle)


# --- any program ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One kernel: which values it reads (by number, modulo how many there are), how long its result is, what dies after it."""

    kind: str
    reads: tuple[int, int, int]
    length: int
    dies: int | None


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["add", "scale", "gather", "copy", "in place"]),
        st.tuples(*[st.integers(0, 30)] * 3),
        st.sampled_from([4, 8, 100, 130, 300]),
        st.one_of(st.none(), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=12,
)
SIZE = 400


def plain(steps: Sequence[Step], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the value of every step, each in memory of its own."""
    values = list(inputs)
    for step in steps:
        x, y, z = (values[read % len(values)] for read in step.reads)
        if step.kind == "in place":
            n = min(len(x), len(y), step.length)
            if x.data_ptr() != y.data_ptr():
                x[:n] += y[:n]
            continue
        values.append(result(step, x, y, z))
    return values


def result(step: Step, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    if step.kind == "gather":
        return torch.cat([each[:4] for each in (x, y, z)])
    n = min(len(x), len(y), step.length)
    return {"add": x[:n] + y[:n], "scale": x[:n] * 0.5, "copy": x[:n].clone()}[step.kind]


def record(
    recorder: Recorder, steps: Sequence[Step], inputs: Sequence[torch.Tensor], together: Collection[int] = ()
) -> tuple[Built, list[int]]:
    """Record a program whose temporaries die early; return it and the numbers of the values that it returns."""
    arena, graph, values = recorder.arena, recorder.graph, list(inputs)
    alive = set[int]()
    for step in steps:
        readable = [number for number in range(len(values)) if number < len(inputs) or number in alive]
        x, y, z = (values[read % len(values)] for read in step.reads)
        assert all(read % len(values) in readable for read in step.reads)
        if step.kind == "in place":
            if x.data_ptr() != y.data_ptr():
                graph.accumulate(x[: min(len(x), len(y), step.length)], y)
            continue
        n = 12 if step.kind == "gather" else min(len(x), len(y), step.length)
        out = arena.allocate(n)
        if step.kind == "add":
            graph.add(x, y, out)
        elif step.kind == "scale":
            graph.scale(x, out, 0.5)
        elif step.kind == "copy":
            graph.copy(out, x)
        else:
            graph.gather([each[:4] for each in (x, y, z)], out, magic=x.data_ptr() ^ 0xFFFF)
        values.append(out)
        alive.add(len(values) - 1)
        if step.dies is not None and alive and (dying := sorted(alive)[step.dies % len(alive)]) in alive:
            arena.free(values[dying])
            alive.remove(dying)
    returned = sorted(alive)
    outputs = [values[number] for number in returned]
    return recorder.built(inputs, outputs, together=together), returned


def readable(steps: list[Step], inputs: int) -> list[Step]:
    """Return the steps with each read turned to a value that is still alive then."""
    kept, alive, count = [], list(range(inputs)), inputs
    for step in steps:
        reads = tuple(alive[read % len(alive)] for read in step.reads)
        kept.append(Step(step.kind, (reads[0], reads[1], reads[2]), step.length, step.dies))
        if step.kind == "in place":
            continue
        alive.append(count)
        count += 1
        temporaries = [number for number in alive if number >= inputs]
        if step.dies is not None and temporaries:
            alive.remove(temporaries[step.dies % len(temporaries)])
    return kept


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.parametrize("by", ["the helper", "Python"])
@given(
    steps=STEPS,
    moves=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=5
    ),
    together=st.frozensets(st.integers(0, 5)),
)
def test_any_program_gives_what_it_gives_when_launched(
    emulator: Emulator,
    allocator: Allocator,
    steps: list[Step],
    moves: list[tuple[int, int, int]],
    together: frozenset[int],
    by: str,
    compiled_helper: Path,
) -> None:
    """Temporaries share memory with outputs, outputs an allocation, inputs stay or move, all old memory is poisoned."""
    helper.forget()
    if by == "the helper":
        assert helper.prepare(compiled_helper) is None
    steps = readable(steps, 3)
    inputs = [allocator.tensor(torch.rand(SIZE)) for _ in range(3)]
    recorder = Recorder(emulator, allocator, emulator.arena(256))
    built, returned = record(recorder, steps, inputs, together)
    for move in moves:
        inputs = [
            allocator.tensor(torch.rand(SIZE)) if moved else each
            for each, moved in zip(inputs, move, strict=True)
        ]
        mine = [each.clone() for each in inputs]
        expected = plain(steps, mine)

        outputs = built.replay(list(inputs))

        for output, number in zip(outputs, returned, strict=True):
            assert torch.equal(output, expected[number])
        assert all(map(torch.equal, inputs, mine))
        assert recorder.arena.untouched()
    assert isinstance(helper.bulk(recorder.notes.append), InPython) is (by == "Python")
    assert recorder.notes == []
    helper.forget()
    built.replay.close()
    allocator.check()
