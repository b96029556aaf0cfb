"""Addresses that take turns, come back or never do: which executables there are, what is written, and right results."""

from __future__ import annotations

import contextlib
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.binding import Binding, UnfitError
from pygraphd.client.bulk import InPython, helper
from pygraphd.client.driver import DriverError
from pygraphd.client.executables import (
    FEW_BINDINGS,
    IDLE_CALLS,
    MAX_BINDINGS,
    MET,
    NODES_OF_A_WRITE,
    ONE_LESS,
    WRITES_OF_ONE,
    Bindings,
)
from pygraphd.client.parameters import Parameters
from tests.relocation.interrupts import interrupting
from tests.relocation.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from pygraphd.client.replay import Replay
    from tests.relocation.conftest import Allocator, Emulator

pytestmark = pytest.mark.torch


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

    assert (replay.executables, replay.made) == (4, 4)
    assert written[:4] == [1, 1, 1, 1]
    assert written[-16:] == [0] * 16
    replay.close()


def test_an_interrupt_while_an_executable_comes_first_loses_none(recorder: Recorder) -> None:
    """Before any instruction of what has it come first."""
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    sets = [(recorder.floats(i, i), replay.memory()) for i in range(3)]

    def call(turn: int) -> list[float]:
        values, memory = sets[turn % 3]
        result: list[float] = replay.run([values], memory)[0].tolist()
        return result

    for turn in range(30):
        call(turn)
    interrupts = 0
    for turn in range(60):
        try:
            with interrupting(Bindings._to_front.__code__, turn + 1):
                call(turn)
        except KeyboardInterrupt:
            interrupts += 1
        assert replay.executables == 3
        assert [call(each) for each in range(3)] == [[3.0 * each] * 2 for each in range(3)]

    assert interrupts > 10
    replay.close()


def test_what_nearly_comes_back_gets_an_executable_and_costs_what_is_new(recorder: Recorder) -> None:
    """Nine inputs take turns between two places, and the tenth never lies where it lay."""
    inputs = [recorder.floats(i, i) for i in range(10)]
    replay = recorder.doubling(inputs)
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
    inputs = [recorder.floats(i, i) for i in range(4)]
    replay = recorder.doubling(inputs)
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
    inputs = [recorder.floats(i, i) for i in range(3)]
    replay = recorder.doubling(inputs, [*inputs, inputs[2]])
    memory, sets = replay.memory(), [[recorder.floats(i, turn) for i in range(2)] for turn in range(12)]

    for _ in range(5):
        written = replay.counts.written
        for values in sets:
            replay.run([*values, inputs[2]], memory)
    assert (replay.executables, replay.counts.written) == (len(sets), written)
    replay.close()


def test_many_executables_are_found_in_any_order_however_many_addresses_were_met(recorder: Recorder) -> None:
    a = recorder.floats(1, 2)
    replay = recorder.doubling([a], [a] * 3)
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


@pytest.mark.parametrize("again", [0, 1, 2])
def test_an_executable_that_was_interrupted_while_it_was_written_to_is_not_used_any_more(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """Its nodes are those of neither set of addresses: the one before, the one it was to be bound to, or a third."""
    sets = [[recorder.floats(i, i), recorder.floats(-i, i)] for i in range(3)]
    replay = recorder.doubling(sets[0])
    memory = replay.memory()
    replay.run(list(sets[0]), memory)

    def interrupted(parameters: Parameters, executable: int, nodes: Iterable[int]) -> None:
        write(parameters, executable, [min(nodes)])
        raise KeyboardInterrupt

    write = Parameters.write
    monkeypatch.setattr(Parameters, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replay.run(list(sets[1]), memory)
    monkeypatch.setattr(Parameters, "write", write)

    for _ in range(2):
        with pytest.raises(DriverError, match="came in between"):
            replay.run(list(sets[again]), memory)
    replay.close()


def test_one_of_many_that_was_interrupted_is_not_found_by_the_addresses_that_it_had(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes before it is noted where the executable is bound now."""
    replay = recorder.doubling([recorder.floats(1, 2)])
    memory = replay.memory()
    sets = [recorder.floats(i, i) for i in range(FEW_BINDINGS + 2)]
    for values in sets * (4 * WRITES_OF_ONE):
        replay.run([values], memory)
    assert replay.executables == len(sets)
    move = Binding._move_to

    def interrupted(binding: Binding, *arguments: Any) -> None:
        before = binding.addresses, binding.pointers[:], binding.memory[:]
        move(binding, *arguments)
        binding._parameters.write(binding.executable, range(binding.nodes))
        binding.addresses, binding.pointers, binding.memory = before
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Binding, "_move_to", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replay.run([recorder.floats(7, 7)], memory)

    for values in sets:
        with contextlib.suppress(DriverError):
            assert replay.run([values], memory)[0].tolist() == (values * 2).tolist()
    replay.close()


def test_addresses_that_are_half_of_one_call_find_no_other_executable(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupt comes when it is noted where the inputs are, and not yet in the list by which one of many is found."""
    stays, new = recorder.floats(100, 100), recorder.floats(1000, 1000)
    sets = [recorder.floats(i, i) for i in range(FEW_BINDINGS + 2)]
    replay = recorder.doubling([stays, sets[0]])
    memory = replay.memory()
    for each in sets * (4 * WRITES_OF_ONE):
        replay.run([stays, each], memory)
    assert replay.executables == len(sets)

    def interrupted(binding: Binding, addresses: list[int], moved: Iterable[int], _: Any) -> None:
        for position in moved:
            binding.pointers[binding._indices[position]] = addresses[position]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Binding, "_move_to", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replay.run([new, sets[-1]], memory)

    for each in sets:
        with contextlib.suppress(DriverError):
            assert replay.run([new, each], memory)[0].tolist() == [2000, 2000]
    replay.close()


@pytest.mark.parametrize("others", [0, 2])
def test_addresses_that_never_come_back_are_written_without_asking_who_is_nearest(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, others: int
) -> None:
    """Nor does it make a difference to what is done: `_bind_any` would write as much."""
    (a,) = inputs = [recorder.floats(1, 2)]
    replay = recorder.doubling(inputs)
    memory = replay.memory()
    stay = [a, *(recorder.floats(i, i) for i in range(others))]
    for values in stay * 12 * others:
        replay.run([values], memory)
    asked = 0
    ask = Bindings._bind_any

    def count(*arguments: Any) -> Binding:
        nonlocal asked
        asked += 1
        return ask(*arguments)

    monkeypatch.setattr(Bindings, "_bind_any", count)
    before = replay.counts.written

    for turn in range(40):
        values = recorder.floats(turn, turn)
        assert replay.run([values], memory)[0].tolist() == [2 * turn] * 2

    assert replay.counts.written == before + 40
    assert (replay.executables, asked) == (1 + others, 1 if others else 0)
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


def test_inputs_that_do_not_fit_get_no_executable_however_often_they_come(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = recorder.allocator.tensor(torch.zeros(256))
    a, worse = storage[64:66], [storage[67 + 4 * number :][:2] for number in range(6)]
    out = recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 1.0)
    replay = recorder.built([a], [out]).replay
    memory = replay.memory()
    # Nothing may be prepared for them, either: they cost what a look at them costs.
    monkeypatch.setattr(Parameters, "again", lambda _: 1 // 0)

    for each in worse * 2 * WRITES_OF_ONE:
        with pytest.raises(UnfitError, match="not aligned as it was"):
            replay.run([each], memory)

    assert replay.executables == 1
    replay.close()


@pytest.mark.parametrize("count", [80, 200])
def test_what_no_node_reads_and_what_comes_too_seldom_get_no_executable(
    recorder: Recorder, count: int
) -> None:
    """Of 200 addresses in turn, an executable would go to others before its own come again."""
    a, unused, out = recorder.floats(1, 2), recorder.floats(0, 0), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a, unused], [out]).replay
    memory, places = replay.memory(), [recorder.floats(i, i) for i in range(count)]

    for values in places * 2 * WRITES_OF_ONE:
        inputs = [a, values] if count < 2 * MAX_BINDINGS else [values, unused]
        replay.run(inputs, memory)

    assert replay.executables == 1
    replay.close()


def test_what_comes_every_few_calls_gets_an_executable_among_what_never_comes_again(
    recorder: Recorder,
) -> None:
    a, b = recorder.floats(1, 2), recorder.floats(3, 4)
    replay = recorder.doubling([a, b], [a, a, *[b] * 58])
    memory, often = replay.memory(), recorder.floats(5, 6)

    written: list[int] = []
    for turn in range(WRITES_OF_ONE + 60 // NODES_OF_A_WRITE + 10):
        for number in range(15):
            replay.run([recorder.floats(turn, number), b], memory)
        before = replay.counts.written
        replay.run([often, b], memory)
        written.append(replay.counts.written - before)

    assert written.index(60) * 15 > MET  # an executable was made, and no node is written any more
    assert not any(written[-5:])
    assert replay.executables <= FEW_BINDINGS
    replay.close()


@pytest.mark.parametrize("nodes", [300, 4])
def test_what_never_comes_again_costs_no_executable_of_what_takes_turns(
    recorder: Recorder, nodes: int
) -> None:
    """Three inputs take turns, and each fifth call comes with one that was never seen."""
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    for _ in range(nodes):
        recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a], [out]).replay
    memory, sets = replay.memory(), [recorder.floats(i, i) for i in range(3)]

    written = []
    for turn in range(60):
        before = replay.counts.written
        values = sets[turn % 3] if turn % 5 else recorder.floats(turn, turn)
        assert replay.run([values], memory)[0].tolist() == (values * 2).tolist()
        written.append(replay.counts.written - before)

    assert written[30:] == [0 if turn % 5 else nodes for turn in range(30, 60)]
    assert replay.executables == len(sets) + 1
    replay.close()


def test_what_never_came_again_gives_way_only_if_it_is_as_near(recorder: Recorder) -> None:
    inputs = [recorder.floats(i, i) for i in range(10)]
    replay = recorder.doubling(inputs)
    memory, others = replay.memory(), [recorder.floats(i, i) for i in range(10)]

    for values in (inputs, inputs, others, inputs):  # has two executables now, one of them for the others
        replay.run([*values], memory)
    before = replay.counts.written
    replay.run([recorder.floats(0, 0), *inputs[1:]], memory)

    assert (replay.executables, replay.counts.written - before) == (2, 1)
    replay.close()


def test_the_latest_new_addresses_give_way_wherever_they_are_bound(recorder: Recorder) -> None:
    a = recorder.floats(1, 2)
    replay = recorder.doubling([a])
    memory, often, twice, once, new = replay.memory(), *(recorder.floats(i, i) for i in range(4))

    # The first executable comes to be of what has come twice, and another one of what has come once.
    for values in (often, twice, often, twice, often, once, often, new):
        replay.run([values], memory)
    before = replay.counts.written
    for values in (often, twice, new):
        replay.run([values], memory)

    assert (replay.executables, replay.counts.written - before) == (3, 0)
    replay.close()


def test_what_was_new_and_has_stayed_is_kept_while_others_are_idle(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    memory, one, two, stays = replay.memory(), *(recorder.floats(i, i) for i in range(3))
    for values in [one, two] * 3 + [stays] * 3 * IDLE_CALLS:
        replay.run([values], memory)

    replay.run([recorder.floats(4, 4)], memory)
    before = replay.counts.written

    assert replay.run([stays], memory)[0].tolist() == [6, 6]
    assert replay.counts.written == before
    replay.close()


CALL = st.tuples(
    *[st.integers(0, 6)] * 3, st.integers(0, 2), st.sampled_from(["fits"] * 6 + ["apart", "misaligned"])
)
"""Where each of three inputs lies, which memory the call has, and whether it fits."""


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.parametrize("by", ["the helper", "Python"])
@given(calls=st.lists(CALL, min_size=1, max_size=40), times=st.integers(1, 8), few=st.booleans())
def test_every_executable_is_bound_to_what_it_says(
    emulator: Emulator,
    allocator: Allocator,
    compiled_helper: Path,
    by: str,
    calls: list[Any],
    times: int,
    few: bool,
) -> None:
    """The second input and the third overlap; a graph of few nodes and one of many, which may have other numbers of executables."""
    helper.forget()
    if by == "the helper":
        assert helper.prepare(compiled_helper) is None
    recorder = Recorder(emulator, allocator, emulator.arena(1024))
    singles = [allocator.tensor(torch.rand(8)) for _ in range(7)]
    pairs = [allocator.tensor(torch.rand(16)) for _ in range(7)]
    graph, count = recorder.graph, 2 if few else 260
    outputs = recorder.arena.allocate(8 * count).split(8)
    recorded = [singles[0].clone(), *_overlapping(allocator.tensor(torch.rand(16)))]
    recorded[0] = allocator.tensor(recorded[0])
    for number, out in enumerate(outputs):
        graph.add(recorded[number % 2], recorded[2], out)
    replay = recorder.built(recorded, outputs).replay
    memories = [replay.memory() for _ in range(3)]

    for first, second, third, memory, kind in calls * times:
        inputs = [singles[first], *_overlapping(pairs[second])]
        if kind == "apart":
            inputs[2] = _overlapping(pairs[(second + 1 + third % 6) % 7])[1]
        if kind == "misaligned":
            inputs[0] = pairs[third][1:9]
        if kind != "fits":
            with pytest.raises(UnfitError):
                replay.run(list(inputs), memories[memory])
            continue
        results = replay.run(list(inputs), memories[memory])
        assert torch.equal(results[0], inputs[0] + inputs[2])
        assert torch.equal(results[1], inputs[1] + inputs[2])

    _check(replay)
    assert isinstance(helper.bulk(recorder.notes.append), InPython) is (by == "Python")
    helper.forget()
    replay.close()
    allocator.check()


def _overlapping(memory: torch.Tensor) -> list[torch.Tensor]:
    return [memory[:8], memory[4:12]]


def _check(replay: Replay) -> None:
    """Assert that all that an executable knows of its addresses agrees."""
    bindings = replay._bindings
    assert bindings is not None
    for each in bindings._all:
        first, addresses = each._first_memory, each.addresses
        assert [each.pointers[index] for index in each._indices] == addresses[:first]
        assert list(each.memory) == addresses[first:]
        for slot, places in enumerate(each.table.places):
            base = each._base(slot, addresses)
            # What was packed lay nowhere as a whole when it was recorded, and an executable may never have been used.
            assert not base or all(each._words[index] == base + offset for index, offset in places)
