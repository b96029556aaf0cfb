"""Graphs of a few nodes that are bound to whatever comes, once many addresses were new: what that costs, when it ends, and right results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client import executables
from pygraphd.client.binding import Binding, UnfitError
from pygraphd.client.bulk import InPython, helper
from pygraphd.client.driver import DriverError
from pygraphd.client.executables import (
    ASKED,
    MANY_NODES,
    MAX_BINDINGS,
    UNSEEN,
    WANDERING,
    WRITES_OF_ONE,
    Bindings,
)
from pygraphd.client.parameters import Parameters
from pygraphd.client.wandering import MOST_NODES, MOST_TENSORS
from tests.relocation.recorder import Recorder
from tests.relocation.test_executables import _check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from pygraphd.client.replay import Replay
    from tests.relocation.conftest import Allocator, Emulator

pytestmark = pytest.mark.torch


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the numbers of the calls for which it was asked whether their addresses had been there before."""
    calls: list[int] = []
    ask = Bindings._bind

    def note(bindings: Bindings, *arguments: Any) -> Binding:
        calls.append(bindings._calls)
        return ask(bindings, *arguments)

    monkeypatch.setattr(Bindings, "_bind", note)
    return calls


def doubled(replay: Replay, memory: list[torch.Tensor], *inputs: torch.Tensor) -> int:
    """Run a graph that doubles its inputs, see that it does, and return how many nodes were written."""
    before = replay.counts.written
    results = replay.run(list(inputs), memory)
    assert [each.tolist() for each in results] == [(each * 2).tolist() for each in inputs]
    return replay.counts.written - before


def wander(recorder: Recorder, replay: Replay, memory: list[torch.Tensor], inputs: int = 1) -> None:
    """Have a graph take it that its addresses never come back."""
    for turn in range(WANDERING):
        written = doubled(replay, memory, *(recorder.floats(turn, i) for i in range(inputs)))
        assert written == inputs
    assert replay._bindings is not None
    assert replay._bindings._unseen == UNSEEN


@pytest.mark.parametrize(
    ("inputs", "after"),
    [(1, WANDERING), (2, WANDERING), (MANY_NODES, 2 * MAX_BINDINGS), (MOST_NODES, 2 * MAX_BINDINGS)],
)
def test_of_most_calls_nobody_asks_whether_their_addresses_were_there_before(
    recorder: Recorder, asked: list[int], inputs: int, after: int
) -> None:
    replay = recorder.doubling([recorder.floats(i, i) for i in range(inputs)])
    memory = replay.memory()

    calls = after + 4 * UNSEEN
    for turn in range(calls):
        assert doubled(replay, memory, *(recorder.floats(turn, i) for i in range(inputs))) == inputs

    assert asked[:after] == [*range(1, after + 1)]
    assert asked[after : after + UNSEEN // ASKED] == [*range(after + ASKED, after + UNSEEN + 1, ASKED)]
    assert len(asked) < (after + calls / 4 if inputs < MANY_NODES else 2 * after + calls / 4)
    assert (replay.executables, replay.made) == (1, 1)
    replay.close()


@pytest.mark.parametrize(
    "recorded",
    [
        pytest.param(
            lambda recorder: recorder.doubling([a := recorder.floats(1)], [a] * (MOST_NODES + 1)), id="nodes"
        ),
        pytest.param(
            lambda recorder: recorder.doubling(
                [recorder.floats(i) for i in range(MOST_TENSORS)], [recorder.floats(0)]
            ),
            id="tensors",
        ),
    ],
)
def test_larger_graphs_are_asked_at_every_call(
    recorder: Recorder, asked: list[int], recorded: Callable[[Recorder], Replay]
) -> None:
    replay = recorded(recorder)
    inputs, memory = len(replay._layout.groups), replay.memory()

    calls = 2 * MAX_BINDINGS + WANDERING
    for turn in range(calls):
        replay.run([recorder.floats(turn) for _ in range(inputs)], memory)

    assert len(asked) == calls
    replay.close()


def test_inputs_that_must_move_together_are_asked_at_every_call(recorder: Recorder, asked: list[int]) -> None:
    def overlapping(storage: torch.Tensor) -> list[torch.Tensor]:
        return [storage[:8], storage[4:12]]

    inputs, out = overlapping(recorder.floats(*range(16))), recorder.arena.allocate(8)
    recorder.graph.add(inputs[0], inputs[1], out)
    replay = recorder.built(inputs, [out]).replay
    memory = replay.memory()

    for turn in range(2 * WANDERING):
        one, other = overlapping(recorder.floats(*range(turn, turn + 16)))
        assert torch.equal(replay.run([one, other], memory)[0], one + other)

    assert len(asked) == 2 * WANDERING
    replay.close()


def test_addresses_that_stay_end_it_at_once_and_are_written_no_more(
    recorder: Recorder, asked: list[int]
) -> None:
    replay = recorder.doubling([recorder.floats(1, 2)])
    memory, stays = replay.memory(), recorder.floats(5, 6)
    wander(recorder, replay, memory)
    asked.clear()

    written = [doubled(replay, memory, stays) for _ in range(20)]

    assert written == [1] + [0] * 19
    assert asked == []
    assert replay.made == 2  # made anew with its addresses in place, as it is found bound
    assert doubled(replay, memory, recorder.floats(7, 7)) == 1
    assert len(asked) == 1
    _check(replay)
    replay.close()


def test_an_executable_that_was_made_in_place_is_made_anew_once_it_stays(recorder: Recorder) -> None:
    replay = recorder.doubling([recorder.floats(1, 2)])
    memory, stays = replay.memory(), recorder.floats(5, 6)
    wander(recorder, replay, memory)
    assert replay._bindings is not None
    replay._bindings._all[0].is_patched = False  # as of one that nearly came back, and so has just been made

    assert [doubled(replay, memory, stays) for _ in range(5)] == [1, 0, 0, 0, 0]

    assert replay.made == 2
    replay.close()


def test_what_takes_turns_comes_to_have_executables_all_the_same(recorder: Recorder) -> None:
    replay = recorder.doubling([recorder.floats(1, 2)])
    memory, sets = replay.memory(), [recorder.floats(i, i) for i in range(WANDERING + 4)]

    written = [doubled(replay, memory, each) for each in sets * (60 + 2 * WRITES_OF_ONE)]

    assert not any(written[-len(sets) :])
    assert replay.executables == len(sets)
    replay.close()


@pytest.mark.parametrize(("count", "steps"), [(3, [1]), (12, [1]), (12, [1, 5, 7, 11])])
def test_what_is_new_among_what_takes_turns_does_not_count(
    recorder: Recorder, count: int, steps: list[int]
) -> None:
    """Some inputs take turns, each with an executable, and every fifth call comes with one that was never seen.

    With several steps, another executable is right after each one than the last time.
    """
    replay = recorder.doubling([recorder.floats(1, 2)])
    memory, sets = replay.memory(), [recorder.floats(i, i) for i in range(count)]
    for each in sets * 2 * WRITES_OF_ONE:
        doubled(replay, memory, each)

    written = []
    for turn in range(10 * WANDERING):
        known = sets[turn * steps[turn // count % len(steps)] % count]
        written.append(doubled(replay, memory, known if turn % 5 else recorder.floats(turn, turn)))

    assert 12 <= sum(written[-60:]) < 20
    replay.close()


def test_what_took_turns_before_stays_bound_meanwhile(recorder: Recorder) -> None:
    replay = recorder.doubling([recorder.floats(1, 2)])
    memory, sets = replay.memory(), [recorder.floats(i, i) for i in range(3)]
    for each in sets * 4 + [recorder.floats(0, 0), *sets]:
        doubled(replay, memory, each)
    assert replay.executables == 4

    for turn in range(2 * (WANDERING + UNSEEN) + 3):
        assert doubled(replay, memory, recorder.floats(turn, turn)) == 1

    written = [doubled(replay, memory, each) for each in sets * ASKED]

    assert sum(written) <= ASKED
    assert not any(written[ASKED:])
    assert replay.executables == 4
    replay.close()


@pytest.mark.parametrize("nodes", [1, MANY_NODES])
def test_what_takes_turns_again_ends_it_soon(recorder: Recorder, nodes: int) -> None:
    replay = recorder.doubling([a := recorder.floats(1, 2)], [a] * nodes)
    memory, sets = replay.memory(), [recorder.floats(i, i) for i in range(3)]
    for each in sets * 6:
        replay.run([each], memory)
    for turn in range((WANDERING if nodes < MANY_NODES else 2 * MAX_BINDINGS) + 1):
        replay.run([recorder.floats(turn, turn)], memory)
    assert replay._bindings is not None
    assert replay._bindings._unseen
    before = replay.counts.written

    for each in sets * 40:
        assert replay.run([each], memory)[0].tolist() == (each * 2).tolist()

    assert replay.counts.written - before <= ASKED * nodes
    assert replay._bindings._unseen == 0
    replay.close()


@pytest.mark.parametrize("way", ["misaligned", "no tensor"])
def test_what_does_not_fit_is_refused_with_nothing_changed(recorder: Recorder, way: str) -> None:
    replay = recorder.doubling([recorder.floats(1, 2), recorder.floats(3, 4)])
    memory, good = replay.memory(), recorder.floats(5, 6)
    wander(recorder, replay, memory, inputs=2)
    bad: Any = recorder.floats(*range(8))[1:3] if way == "misaligned" else "a text"

    with pytest.raises(
        UnfitError, match="not aligned as it was" if way == "misaligned" else "a replay failed"
    ):
        replay.run([good, bad], memory)

    other = recorder.floats(7, 8)
    assert doubled(replay, memory, good, other) == 2
    assert doubled(replay, memory, good, other) == 0
    _check(replay)
    replay.close()


def test_an_executable_that_was_interrupted_is_not_used_any_more(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = recorder.doubling([recorder.floats(1, 2), recorder.floats(3, 4)])
    memory = replay.memory()
    wander(recorder, replay, memory, inputs=2)
    write = Parameters.write

    def interrupted(parameters: Parameters, executable: int, nodes: Iterable[int]) -> None:
        write(parameters, executable, [min(nodes)])
        raise KeyboardInterrupt

    new = [recorder.floats(5, 5), recorder.floats(6, 6)]
    with monkeypatch.context() as patch:
        patch.setattr(Parameters, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replay.run(list(new), memory)

    for _ in range(2):
        with pytest.raises(DriverError, match="came in between"):
            replay.run(list(new), memory)
    replay.close()


def test_an_interrupt_where_it_ends_leaves_nothing_outdated(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = recorder.doubling([recorder.floats(1, 2), recorder.floats(3, 4)])
    memory, stay = replay.memory(), [recorder.floats(5, 6), recorder.floats(7, 8)]
    wander(recorder, replay, memory, inputs=2)
    doubled(replay, memory, *stay)

    def interrupted(_: Binding) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Binding, "catch_up", interrupted)
        with pytest.raises(KeyboardInterrupt):
            replay.run(list(stay), memory)

    assert doubled(replay, memory, *stay) == 0
    _check(replay)
    replay.close()


CALL = st.tuples(
    st.integers(0, 5), st.integers(0, 5), st.integers(0, 2), st.sampled_from(["fits"] * 8 + ["misaligned"])
)
"""Where each of two inputs lies, which memory the call has, and whether it fits."""


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.parametrize("by", ["the helper", "Python"])
@given(
    calls=st.lists(CALL, min_size=1, max_size=40),
    times=st.integers(1, 4),
    nodes=st.integers(1, MOST_NODES),
    unseen=st.integers(1, 9),
)
def test_whatever_comes_results_are_right_and_what_is_known_of_addresses_agrees(
    emulator: Emulator,
    allocator: Allocator,
    compiled_helper: Path,
    by: str,
    calls: list[Any],
    times: int,
    nodes: int,
    unseen: int,
) -> None:
    helper.forget()
    if by == "the helper":
        assert helper.prepare(compiled_helper) is None
    recorder = Recorder(emulator, allocator, emulator.arena(64))
    places = [[allocator.tensor(torch.rand(9)) for _ in range(6)] for _ in range(2)]
    recorded = [allocator.tensor(torch.rand(8)) for _ in range(2)]
    outputs = [recorder.arena.allocate(8) for _ in range(nodes)]
    for out in outputs:
        recorder.graph.add(recorded[0], recorded[1], out)
    replay = recorder.built(recorded, outputs).replay
    memories = [replay.memory() for _ in range(3)]

    bindings = replay._bindings
    assert bindings is not None
    bindings._wanders_after = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executables, "UNSEEN", unseen)
        for first, second, memory, kind in calls * times:
            one, other = places[0][first], places[1][second]
            inputs = [one[1:] if kind == "misaligned" else one[:8], other[:8]]
            if kind == "misaligned":
                with pytest.raises(UnfitError):
                    replay.run(list(inputs), memories[memory])
                continue
            for each in replay.run(list(inputs), memories[memory]):
                assert torch.equal(each, inputs[0] + inputs[1])

    if bindings._unseen:
        bindings._all[0].catch_up()
    _check(replay)
    assert isinstance(helper.bulk(recorder.notes.append), InPython) is (by == "Python")
    helper.forget()
    replay.close()
    allocator.check()
