"""Addresses that take turns, come back or never do: which executables there are, what is written, and right results."""

from __future__ import annotations

import random
import shutil
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import PROFILED, FallbackError
from pygraphd.client.backend.torch_private import profiling
from pygraphd.client.recording.aliased_memory import AliasedMemory
from pygraphd.client.replay import exec_cache
from pygraphd.client.replay.exec_cache import FEW_EXECUTABLES, MAX_EXECUTABLES, NODES_A_WRITE, ONE_LESS, WORTH
from pygraphd.client.replay.node_params import Parameters
from pygraphd.client.replay.relocation_table import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pygraphd.client.replay.replay import Replay
    from tests.support.recorder import Recorder

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many executables a graph may have at most, which are few."""
    monkeypatch.setattr(exec_cache, "MAX_NODES", 1)
    return FEW_EXECUTABLES


class Doubling:
    """A graph that doubles an input `nodes` times, into as many outputs, and what its calls take."""

    def __init__(self, recorder: Recorder, nodes: int = WORTH, others: int = 0) -> None:
        self._recorder = recorder
        recorder.arena = recorder.emulator.arena(2 * (nodes + others))
        first, self._stays = recorder.floats(1, 2), recorder.floats(3, 4)
        reads = [first] * nodes + [self._stays] * others
        self.replay: Replay = recorder.doubling([first, self._stays], reads)
        self._nodes = nodes
        self.memory = self.replay.memory()
        self.emulator = recorder.emulator

    def places(self, count: int) -> list[torch.Tensor]:
        return [self._recorder.floats(number, -number) for number in range(count)]

    def written(self, values: torch.Tensor) -> int:
        """Call it, see that its results are right, and return how many nodes were written."""
        before = self.replay.counts.written
        for each in self.replay.serve_on([values, self._stays], self.memory)[: self._nodes]:
            assert torch.equal(each, 2 * values)
            each.fill_(-1)
        return self.replay.counts.written - before

    def round(self, places: Iterable[torch.Tensor]) -> int:
        return sum(map(self.written, places))


@pytest.fixture
def doubling(recorder: Recorder) -> Iterator[Doubling]:
    case = Doubling(recorder)
    yield case
    case.replay.close()


@pytest.mark.parametrize("count", [2, 5, 20, MAX_EXECUTABLES])
def test_addresses_that_take_turns_have_an_executable_each_and_are_written_twice(
    doubling: Doubling, count: int
) -> None:
    places = doubling.places(count)

    assert [doubling.round(places) for _ in range(4)] == [WORTH * count, WORTH * (count - 1), 0, 0]

    order = random.Random(0)
    assert doubling.round(order.choices(places, k=4 * count)) == 0
    assert doubling.replay.executables == count


def test_addresses_that_stay_are_written_once(doubling: Doubling) -> None:
    (stays,) = doubling.places(1)

    assert [doubling.written(stays) for _ in range(20)] == [WORTH] + [0] * 19
    assert doubling.replay.executables == 1


def test_addresses_that_never_come_back_are_written_to_one_executable(doubling: Doubling) -> None:
    assert [doubling.written(each) for each in doubling.places(40)] == [WORTH] * 40
    assert doubling.replay.executables == 1


def test_what_never_comes_back_costs_no_executable_of_what_takes_turns(doubling: Doubling) -> None:
    places, new = doubling.places(3), doubling.places(60)
    for _ in range(4):
        doubling.round([*places, new.pop()])

    assert [doubling.round([*places, new.pop()]) for _ in range(20)] == [WORTH] * 20
    assert doubling.replay.executables == len(places) + 1


def test_where_few_nodes_of_many_follow_what_moves_it_is_cheaper_to_write_them(recorder: Recorder) -> None:
    case = Doubling(recorder, 1, others=NODES_A_WRITE)
    places = case.places(2)
    case.round(places)

    assert [case.round(places) for _ in range(6)] == [2] * 6

    assert case.replay.executables == 1
    case.replay.close()


def test_of_more_places_than_executables_all_but_one_of_these_stay_bound(
    few: int, doubling: Doubling
) -> None:
    """Were the one written to that was not used for longest, it would be the one that comes next, at every call."""
    places = doubling.places(few + 3)
    for _ in range(3):
        doubling.round(places)

    assert [doubling.round(places) for _ in range(8)] == [WORTH * (3 + 1)] * 8
    assert doubling.replay.executables == few


def test_executables_that_are_not_used_any_more_go_to_what_takes_turns_now(
    few: int, doubling: Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = exec_cache.IDLE_CALLS // few + 3
    for _ in range(3):
        places = doubling.places(few)
        for _ in range(rounds):
            doubling.round(places)
        assert doubling.round(places) == 0
    assert doubling.replay.executables == few


def test_how_many_executables_a_graph_may_have() -> None:
    most = [exec_cache.most_executables(nodes) for nodes in (0, 1, 16, 17, 256, 257, 100_000)]

    assert most == [64, 64, 64, 60, 4, FEW_EXECUTABLES, FEW_EXECUTABLES]


@pytest.mark.parametrize("call", [1, WORTH, WORTH + 1, WORTH + 2])
def test_where_another_executable_cannot_be_had_one_is_enough(
    doubling: Doubling, recorder: Recorder, call: int
) -> None:
    """It takes a driver call for each node, one that instantiates, and one that uploads."""
    places, alive = doubling.places(2), recorder.emulator.live()
    doubling.round(places)
    values = recorder.floats(0, 0)
    doubling.written(values)
    recorder.emulator.fail_at(call)
    doubling.written(places[0])
    recorder.emulator.fail_at(0)

    assert [doubling.round(places) for _ in range(4)] == [WORTH] + [2 * WORTH] * 3

    assert (doubling.replay.executables, recorder.emulator.live()) == (1, alive)
    assert [note.split(":")[0] for note in recorder.notes] == [ONE_LESS]


def test_an_interrupt_while_another_executable_is_made_leaves_none_bound_to_old_addresses(
    doubling: Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **_others: object) -> None:
        raise KeyboardInterrupt

    first, second = doubling.places(2)
    doubling.round([first, second])
    with monkeypatch.context() as patch:
        patch.setattr(Parameters, "write_graph", interrupted)
        with pytest.raises(KeyboardInterrupt):
            doubling.written(first)

    assert doubling.written(second) == 0
    assert [doubling.round([first, second]) for _ in range(3)] == [WORTH, 0, 0]
    assert doubling.replay.executables == 2


def test_an_executable_that_is_replaced_is_there_until_the_next_one_is(doubling: Doubling) -> None:
    """The table holds it until it has been told of the other one."""
    executables: Any = doubling.replay._executables
    live = doubling.emulator.live
    (first,) = executables._handles
    before = live()[1]

    other = executables._make(0, first)
    assert (executables._handles, live()[1]) == ([other], before + 1)
    assert executables._make(0, 0) == executables._handles[-1]
    assert (len(executables), live()[1]) == (2, before + 1)


def test_a_recording_that_is_dropped_takes_its_table_along(recorder: Recorder) -> None:
    """At once: the table holds what makes its executables, and no collection of garbage sees it."""
    case = Doubling(recorder)
    places = case.places(2)
    for _ in range(2):
        case.round(places)
    gone = weakref.ref(case.replay._executables)

    del case

    assert gone() is None


def test_another_executable_is_made_where_it_is_bound_as_the_memory_of_the_capture_is_gone(
    recorder: Recorder,
) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(3)
    recorder.graph.set(out, 0)
    recorder.graph.copy(out[:2], a)
    for _ in range(WORTH):
        recorder.graph.accumulate(out[1:2], a)
    replay = recorder.built([a], [out]).replay
    sets = [(recorder.floats(i, 2 * i), replay.memory()) for i in range(4)]

    for turn in range(20):
        values, memory = sets[turn % 4]
        memory[0].fill_(7)
        first, second = values.tolist()
        assert replay.serve_on([values], memory)[0].tolist() == [first, second + WORTH * first, 0]

    assert replay.executables == 4
    assert recorder.notes == []
    assert recorder.arena.untouched()
    replay.close()


def copied(recorder: Recorder) -> Replay:
    """Record twice `WORTH` sums of the input onto a copy of it."""
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.copy(out, a)
    for _ in range(2 * WORTH):
        recorder.graph.accumulate(out, a)
    return recorder.built([a], [out]).replay


def test_while_a_profiler_runs_a_graph_that_copies_has_no_first_executable(recorder: Recorder) -> None:
    """CUPTI would keep records of memory that may be gone when the executable is launched under the next profile."""
    replay = copied(recorder)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        for _ in range(3):
            with pytest.raises(FallbackError, match=PROFILED):
                replay.serve([recorder.floats(1, 2)])
    assert replay.executables == 0

    assert replay.serve([recorder.floats(1, 2)])[0][0].tolist() == [9, 18]
    assert replay.executables == 1
    replay.close()


def test_while_a_profiler_runs_a_graph_that_copies_is_written_for_addresses_that_take_turns(
    recorder: Recorder,
) -> None:
    replay = copied(recorder)
    places = [(recorder.floats(i, i), replay.memory()) for i in range(3)]

    def rounds() -> None:
        for values, memory in places * 4:
            assert replay.serve_on([values], memory)[0].tolist() == (9 * values).tolist()

    replay.serve_on([places[0][0]], places[0][1])
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        rounds()
    assert replay.executables == 1

    rounds()
    assert replay.executables == 3
    assert recorder.notes == []
    replay.close()


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("was_profiled", [False, True])
def test_a_graph_that_copies_may_not_be_profiled_once_it_has_an_executable_from_after_a_profile(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, copies: bool, was_profiled: bool
) -> None:
    if copies:
        replay = copied(recorder)
    else:
        a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
        for _ in range(2 * WORTH):
            recorder.graph.add(out, a, a)
        replay = recorder.built([a], [out]).replay
    places = [(recorder.floats(i, i), replay.memory()) for i in range(2)]

    def call(at: int) -> None:
        replay.serve_on([places[at][0]], places[at][1])

    call(0)
    monkeypatch.setattr(profiling._profiles, "were_prepared", was_profiled)
    call(0)
    assert replay.can_launch_profiled

    for _ in range(3):
        call(1)
        call(0)
    assert replay.executables == 2
    assert replay.can_launch_profiled is not (copies and was_profiled)
    replay.close()
    assert replay.can_launch_profiled


def test_a_profile_that_begins_while_an_executable_is_made_counts(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay = copied(recorder)
    instantiate = recorder.emulator.driver.instantiate

    def interrupted(*given: Any) -> int:
        profiling._profiles.were_prepared = True  # by another thread
        return instantiate(*given)

    monkeypatch.setattr(recorder.emulator.driver, "instantiate", interrupted)
    replay.serve([recorder.floats(1, 2)])

    assert not replay.can_launch_profiled
    replay.close()


def test_a_profile_that_begins_after_the_last_look_is_noticed_before_the_launch(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a call waits for another one of the same recording."""
    replay = copied(recorder)
    monkeypatch.setattr(profiling._profiles, "were_prepared", True)
    replay.serve([recorder.floats(1, 2)])
    before = replay.counts.replays
    inputs = [recorder.floats(1, 2)]
    monkeypatch.setitem(profiling._profiles.flags, profiling._READY, True)

    assert replay.fused is not None
    assert replay.fused(inputs) is None
    with pytest.raises(FallbackError, match=PROFILED):
        replay.serve(inputs)

    assert (replay.counts.replays, len(inputs)) == (before, 1)
    replay.close()


def test_while_a_profiler_runs_a_graph_of_kernels_alone_gets_executables(doubling: Doubling) -> None:
    places = doubling.places(3)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True):
        assert [doubling.round(places) for _ in range(4)] == [3 * WORTH, 2 * WORTH, 0, 0]


@pytest.fixture
def aliased(recorder: Recorder) -> Iterator[AliasedMemory]:
    """Have a graph recorded on aliased memory, which must not be written to."""
    memory = AliasedMemory(recorder.emulator.driver, torch.device("cpu"), 4 * PAGE, 1)
    memory.memory.fill_(7)
    recorder.arena = recorder.emulator.arena(base=memory.free.start + PAGE)
    yield memory
    assert (memory.memory == 7).all()
    memory.close()


def moving(recorder: Recorder, memory: AliasedMemory, node: str) -> Replay:
    """Record `WORTH` sums of the input onto a copy of it, or onto zeros, all on aliased memory."""
    a, out = memory.take(8).view(torch.float32), recorder.arena.allocate(2)
    if node == "copy":
        recorder.graph.copy(out, a)
    else:
        recorder.graph.set(out, 0)
    for _ in range(WORTH):
        recorder.graph.accumulate(out, a)
    return recorder.built([a], [out]).replay


@pytest.mark.parametrize("node", ["copy", "memset"])
def test_a_copy_or_memset_recorded_on_aliased_memory_moves_where_memory_is_allocated(
    recorder: Recorder, aliased: AliasedMemory, node: str
) -> None:
    replay, times = moving(recorder, aliased, node), WORTH + (node == "copy")
    sets = [(recorder.floats(i, 2 * i), replay.memory()) for i in range(6)]
    executables = []

    for turn in (0, 0, 1, 2, 3, 4, 5, 4, 5, 4, 5):
        values, memory = sets[turn]
        memory[0].fill_(7)
        assert torch.equal(replay.serve_on([values], memory)[0], times * values)
        executables.append(replay.executables)

    assert executables == [1] * 7 + [2] * 4
    assert recorder.notes == []
    replay.close()


@pytest.mark.parametrize("call", [1, 2, 3])
def test_where_the_first_executable_cannot_be_had_the_call_fails_and_nothing_is_left(
    recorder: Recorder, aliased: AliasedMemory, call: int
) -> None:
    """It takes a driver call for the copy, one that instantiates, and one that uploads."""
    replay, values = moving(recorder, aliased, "copy"), recorder.floats(1, 2)
    alive = recorder.emulator.live()
    recorder.emulator.fail_at(call)

    with pytest.raises(DriverError, match="CUresult 999"):
        replay.serve_on([values], replay.memory())

    recorder.emulator.fail_at(0)
    assert (replay.executables, recorder.emulator.live()) == (0, alive)
    assert torch.equal(replay.serve_on([values], replay.memory())[0], (WORTH + 1) * values)
    assert recorder.notes == []
    replay.close()


def test_only_nodes_that_follow_what_has_moved_are_written(recorder: Recorder) -> None:
    inputs = [recorder.floats(i, i) for i in range(10)]
    replay = recorder.doubling(inputs)
    memory = replay.memory()
    replay.serve_on([*inputs], memory)

    for moved in range(10):
        before = replay.counts.written
        values = [*inputs[:moved], recorder.floats(7, 7), *inputs[moved + 1 :]]
        assert replay.serve_on([*values], memory)[moved].tolist() == [14, 14]
        # Its own, and that of what had moved before.
        assert replay.counts.written - before == (1 if moved == 0 else 2)
    replay.close()


def test_for_what_no_node_reads_nothing_is_done(recorder: Recorder) -> None:
    a, unused = recorder.floats(1, 2), recorder.floats(0, 0)
    replay = recorder.doubling([a, unused], [a] * WORTH)
    memory = replay.memory()
    replay.serve_on([a, unused], memory)
    before = replay.counts.written

    for number in range(20):
        replay.serve_on([a, recorder.floats(number, number)], memory)

    assert (replay.executables, replay.counts.written) == (1, before)
    replay.close()


def test_inputs_that_do_not_fit_are_told_however_often_they_come_and_nothing_is_done(
    recorder: Recorder,
) -> None:
    storage = recorder.allocator.tensor(torch.zeros(256))
    a, worse = storage[64:66], [storage[67 + 4 * number :][:2] for number in range(3)]
    replay = recorder.doubling([a], [a] * WORTH)
    memory = replay.memory()
    replay.serve_on([a], memory)
    recorder.emulator.fail_at(0)

    for each in worse * 10:
        with pytest.raises(FallbackError, match="not aligned as it was"):
            replay.serve_on([each], memory)

    assert (replay.executables, recorder.emulator.calls()) == (1, 0)
    replay.close()


@pytest.mark.parametrize("node", range(1, WORTH + 1))
def test_what_could_not_be_written_is_not_taken_for_bound(doubling: Doubling, node: int) -> None:
    first, second = doubling.places(2)
    doubling.written(first)
    doubling.emulator.fail_at(node)

    with pytest.raises(DriverError, match="writing a KERNEL node failed"):
        doubling.written(second)

    doubling.emulator.fail_at(0)
    assert doubling.written(first) == WORTH
