"""Small graphs that lie elsewhere at most calls: the helper finds or writes an executable, Python is asked seldom, results are right."""

from __future__ import annotations

import itertools
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client import _torch
from pygraphd.client.binding import Binding, UnfitError
from pygraphd.client.bulk import Compiled, helper
from pygraphd.client.driver import DriverError
from pygraphd.client.executables import FEW_BINDINGS, NEW_IN_A_ROW, WANDERING, WRITES_OF_ONE, Bindings
from pygraphd.client.random_numbers import Draw
from pygraphd.client.replay import Replay, _Drawing
from pygraphd.client.wandering import MOST_NODES, MOST_TENSORS, TURNS, Wandering
from tests.relocation.interrupts import interrupting
from tests.relocation.recorder import Recorder
from tests.relocation.test_at_once import FLOATS, Blocks, Ticket, by_the_helper  # noqa: F401
from tests.relocation.test_executables import _check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.relocation.conftest import Emulator

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"),
]


class Wanderer:
    """A graph that doubles each of its inputs, or the first one several times, and calls of it."""

    def __init__(
        self,
        emulator: Emulator,
        blocks: Blocks,
        inputs: int = 1,
        nodes: int | None = None,
        recycled: bool = False,
    ) -> None:
        self.blocks = blocks
        self.emulator = emulator
        recorder: Any = Recorder(emulator, blocks)  # type: ignore[arg-type] # it gives out memory, too
        recorded = [self.floats(number) for number in range(inputs)]
        self.replay: Replay = recorder.doubling(recorded, None if nodes is None else [recorded[0]] * nodes)
        if recycled:
            self.replay.recycle({0})
        self.notes: list[str] = recorder.notes

    def floats(self, value: float) -> torch.Tensor:
        return self.blocks.tensor(torch.full((FLOATS,), float(value)))

    def written(self, *inputs: torch.Tensor) -> int:
        """Call it, see that the results are right, let go of them, and return how many nodes were written."""
        before = self.replay.counts.written
        self.see(self.replay(list(inputs)), *inputs)
        return self.replay.counts.written - before

    @staticmethod
    def see(results: Sequence[torch.Tensor], *inputs: torch.Tensor) -> None:
        many = inputs if len(results) == len(inputs) else [inputs[0]] * len(results)
        assert [each.tolist() for each in results] == [(2 * each).tolist() for each in many]

    @property
    def bindings(self) -> Bindings:
        assert self.replay._bindings is not None
        return self.replay._bindings

    def wander(self, inputs: int = 1) -> list[list[torch.Tensor]]:
        """Have the helper serve it; return the inputs of the calls that took, each of which lies elsewhere."""
        sets = [[self.floats(turn + i) for i in range(inputs)] for turn in range(WANDERING)]
        for each in sets:
            self.written(*each)
        assert self.bindings.wandering is not None
        assert self.bindings.wandering.turns
        return sets

    def check(self) -> None:
        """Hold what is known of addresses against what the executables are bound to."""
        if self.bindings.wandering is not None:
            self.bindings.wandering.pause()
        _check(self.replay)


Make = "Callable[..., Wanderer]"


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> Blocks:
    blocks = Blocks(2048)
    monkeypatch.setattr(_torch, "allocator", lambda _device: blocks)
    return blocks


@pytest.fixture
def make(by_the_helper: None, emulator: Emulator, many: Blocks) -> Iterator[Callable[..., Wanderer]]:  # noqa: F811
    """Return what makes a `Wanderer`."""
    made: list[Wanderer] = []

    def make(**how: Any) -> Wanderer:
        made.append(Wanderer(emulator, many, **how))
        return made[-1]

    yield make
    for each in made:
        assert each.notes == []
        each.replay.close()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each call that Python was asked to bind."""
    calls: list[int] = []
    ask = Bindings._bind

    def note(bindings: Bindings, *arguments: Any) -> Binding:
        calls.append(bindings._calls)
        return ask(bindings, *arguments)

    monkeypatch.setattr(Bindings, "_bind", note)
    return calls


@pytest.mark.parametrize("inputs", [1, 2, 8])
def test_python_is_asked_about_few_of_the_calls_that_lie_elsewhere(
    make: Callable[..., Wanderer], asked: list[int], inputs: int
) -> None:
    case = make(inputs=inputs)
    first = case.wander(inputs)  # kept, so that what comes next lies elsewhere
    assert len(asked) == NEW_IN_A_ROW
    assert case.bindings.wandering is not None
    case.bindings.wandering.turns = 0
    before, kept = case.replay.counts.at_once, [*first]

    for turn in range(3 * (TURNS + 1)):
        kept.append([case.floats(turn + i) for i in range(inputs)])
        assert case.written(*kept[-1]) == inputs

    assert len(asked) == NEW_IN_A_ROW + 3
    assert case.replay.counts.at_once - before == 3 * TURNS
    assert case.replay.executables <= 2
    case.check()


def test_without_the_helper_python_is_asked_about_all(
    emulator: Emulator, many: Blocks, asked: list[int]
) -> None:
    helper.forget()
    case = Wanderer(emulator, many)
    sets = [case.floats(turn) for turn in range(4 * WANDERING)]

    for each in sets:
        case.written(each)

    assert len(asked) == len(sets)
    assert case.bindings.wandering is None
    case.replay.close()


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"nodes": MOST_NODES + 1}, id="nodes"),
        pytest.param({"inputs": MOST_TENSORS, "nodes": 1}, id="tensors"),
    ],
)
def test_larger_graphs_are_left_to_python(
    make: Callable[..., Wanderer], asked: list[int], how: dict[str, int]
) -> None:
    case, inputs = make(**how), how.get("inputs", 1)
    sets = [[case.floats(turn)] * inputs for turn in range(2 * WANDERING)]

    for each in sets:
        case.written(*each)

    assert len(asked) == len(sets)
    assert case.bindings.wandering is None


def test_inputs_that_must_move_together_are_left_to_python(
    by_the_helper: None,  # noqa: F811
    emulator: Emulator,
    many: Blocks,
    asked: list[int],
) -> None:
    def overlapping(storage: torch.Tensor) -> list[torch.Tensor]:
        return [storage[:8], storage[4:12]]

    recorder: Any = Recorder(emulator, many)  # type: ignore[arg-type]
    inputs, out = overlapping(many.tensor(torch.rand(16))), recorder.arena.allocate(8)
    recorder.graph.add(inputs[0], inputs[1], out)
    replay = recorder.built(inputs, [out]).replay
    storages = [many.tensor(torch.rand(16)) for _ in range(2 * WANDERING)]

    for each in storages:
        one, other = overlapping(each)
        assert torch.equal(replay([one, other])[0], one + other)

    assert len(asked) == len(storages)
    replay.close()


def test_copies_and_sets_are_written_as_kernels_are(
    by_the_helper: None,  # noqa: F811
    emulator: Emulator,
    many: Blocks,
) -> None:
    """And so is an argument list in one buffer."""
    recorder: Any = Recorder(emulator, many)  # type: ignore[arg-type]
    a, (copied, zeros, scaled) = many.tensor(torch.rand(8)), (recorder.arena.allocate(8) for _ in range(3))
    recorder.graph.copy(copied, a)
    recorder.graph.set(zeros, 0)
    recorder.graph.scale(copied, scaled, 3.0)
    replay = recorder.built([a], [copied, zeros, scaled]).replay
    inputs = [many.tensor(torch.rand(8)) for _ in range(5 * TURNS)]
    kept = []

    for each in inputs:
        kept.append(replay([each]))
        assert torch.equal(kept[-1][0], each)
        assert not kept[-1][1].any()
        assert torch.equal(kept[-1][2], 3 * each)
        del kept[:-2]

    assert replay.counts.at_once >= 4 * TURNS
    kept.clear()
    replay.close()


def test_who_has_the_driver_called_by_python_is_left_to_it(
    make: Callable[..., Wanderer], asked: list[int]
) -> None:
    case = make()
    case.emulator.driver.launch_address = None
    sets = [case.floats(turn) for turn in range(2 * WANDERING)]

    for each in sets:
        case.written(each)

    assert len(asked) == len(sets)


def test_addresses_that_stay_are_written_once(make: Callable[..., Wanderer]) -> None:
    case = make()
    case.wander()
    stays, made = case.floats(5), case.replay.made

    written = [case.written(stays) for _ in range(4 * (TURNS + 1))]

    assert written == [1] + [0] * (len(written) - 1)
    assert case.replay.made == made
    case.check()


def test_when_python_was_asked_about_addresses_that_stay_the_helper_goes_on(
    make: Callable[..., Wanderer], asked: list[int]
) -> None:
    case = make()
    case.wander()
    wandering, stays = case.bindings.wandering, case.floats(5)
    assert wandering is not None
    while wandering.turns:
        case.written(stays)
    before = len(asked)

    case.written(stays)

    assert (len(asked), wandering.turns) == (before, TURNS)


@pytest.mark.parametrize(("count", "asks"), [(NEW_IN_A_ROW - 1, False), (NEW_IN_A_ROW + 1, True)])
def test_as_many_as_soon_have_executables_are_left_to_python(
    make: Callable[..., Wanderer], count: int, asks: bool
) -> None:
    case = make(nodes=3)
    sets = [case.floats(turn) for turn in range(count)]

    for each in sets * 4:
        case.written(each)

    assert (case.bindings.wandering is not None) is asks
    if not asks:
        assert not any(case.written(each) for each in sets)


def test_the_helper_serves_it_after_many_calls_though_some_were_not_new(
    make: Callable[..., Wanderer],
) -> None:
    case = make()
    sets, new = [case.floats(turn) for turn in range(8)], [case.floats(turn) for turn in range(8)]
    for turn in range(8):
        for each in (new[turn], *sets[:5]):
            case.written(each)
        if case.bindings.wandering is not None:
            break

    assert case.bindings.wandering is not None
    assert case.bindings._to_be_bound == WANDERING


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("count", [2, 5, 20])
def test_what_takes_turns_comes_to_have_executables(
    make: Callable[..., Wanderer], nodes: int, count: int
) -> None:
    case = make(nodes=nodes)
    case.wander()
    sets = [case.floats(turn) for turn in range(count)]
    rounds = (TURNS + 1) * (2 * WRITES_OF_ONE + 4 if nodes == 1 else 6)

    written = [case.written(each) for each in sets * rounds]

    assert not any(written[-count * (TURNS + 1) :])
    assert count <= case.replay.executables <= count + 2
    before = case.replay.counts.at_once
    for each in reversed(sets * 17):  # in another order
        case.written(each)
    assert case.replay.counts.at_once - before >= count * 16
    case.check()


@pytest.mark.parametrize(("count", "nodes"), [(12, 5), (24, 5), (24, 16), (61, 8), (60, 3)])
def test_layers_that_share_a_graph_soon_have_executables(
    make: Callable[..., Wanderer], count: int, nodes: int
) -> None:
    """Each with weights of its own: half of the nodes, or more, would be written at each call."""
    case = make(nodes=nodes)
    layers = [case.floats(turn) for turn in range(count)]

    written = [sum(case.written(each) for each in layers) for _ in range(8)]

    assert not any(written[4:])
    assert case.replay.executables in {count, count + 1}
    case.check()


def test_where_there_is_no_room_for_more_the_helper_goes_on_writing(
    make: Callable[..., Wanderer], asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.client.executables.MAX_NODES", 1)
    case = make(nodes=3)
    sets = [case.floats(turn) for turn in range(20)]
    for each in sets * 10:
        case.written(each)
    before = len(asked)

    for each in sets * 30:
        case.written(each)

    assert case.replay.executables == FEW_BINDINGS
    assert len(asked) - before < 20 * 30 / 10
    case.check()


def test_what_takes_turns_is_found_among_new_addresses(make: Callable[..., Wanderer]) -> None:
    case = make(nodes=3)
    case.wander()
    sets, new = [case.floats(turn) for turn in range(3)], [case.floats(turn) for turn in range(500)]

    written = []
    for turn in range(100 * TURNS):
        case.written(new[turn % len(new)])
        written.append(case.written(sets[turn % len(sets)]))

    assert sum(written[-20 * TURNS :]) <= 3 * 40
    assert case.replay.executables <= 6
    case.check()


@pytest.mark.parametrize("way", ["misaligned", "no tensor", "too few"])
def test_what_does_not_fit_is_refused_with_nothing_changed(make: Callable[..., Wanderer], way: str) -> None:
    case = make(inputs=2)
    case.wander(2)
    good, other, calls = case.floats(5), case.floats(7), case.emulator.calls()
    bad: dict[str, list[Any]] = {
        "misaligned": [good, case.floats(6)[1:]],
        "no tensor": [good, "a text"],
        "too few": [good],
    }

    for _ in range(3):
        inputs = list(bad[way])
        with pytest.raises(UnfitError, match="aligned" if way == "misaligned" else "a replay failed"):
            case.replay(inputs)
        assert len(inputs) == len(bad[way])

    assert case.emulator.calls() == calls
    assert case.written(good, other) == 2
    assert case.written(good, other) == 0
    case.check()


def test_without_memory_nothing_is_written(make: Callable[..., Wanderer]) -> None:
    case = make(inputs=2)
    case.wander(2)
    inputs, calls, held = [case.floats(5), case.floats(6)], case.emulator.calls(), case.blocks.held
    case.blocks.fails_at = 2

    given = list(inputs)
    with pytest.raises(torch.OutOfMemoryError):
        case.replay(given)

    assert given == inputs
    assert (case.emulator.calls(), case.blocks.held) == (calls, held)
    assert case.written(*inputs) == 2
    case.check()


@pytest.mark.parametrize("fail_at", [1, 2, 3])
def test_a_driver_call_that_fails_is_told_and_what_was_not_written_is_not_launched(
    make: Callable[..., Wanderer], fail_at: int
) -> None:
    """The first two calls write a node each, the third one launches."""
    case = make(inputs=2)
    case.wander(2)
    inputs = [case.floats(5), case.floats(6)]
    case.emulator.fail_at(fail_at)

    expected = "writing a KERNEL node failed" if fail_at < 3 else "cuGraphLaunch failed"
    with pytest.raises(DriverError, match=expected) as raised:
        case.replay(list(inputs))

    case.emulator.fail_at(0)
    assert raised.value.code > 0
    spare = case.bindings._all[0]
    assert spare.inputs.unchanged(inputs, spare.pointers) is (fail_at == 3)
    assert case.written(*inputs) == (2 if fail_at < 3 else 0)


@pytest.mark.parametrize("stream", [0, 5])
def test_what_draws_random_numbers_is_launched_by_what_advances_them(
    make: Callable[..., Wanderer], stream: int
) -> None:
    case = make()
    case.wander()
    ticket = Ticket()
    case.replay._start = case.replay._start_at_once = _Drawing(ticket, case.emulator.driver).launch
    new = case.floats(3)

    if not stream:
        _, drawn = case.replay.drawing([new])
        assert (drawn, ticket.drawn) == (Draw(7, 0, 1), 1)
        return
    ticket.one_stream.move(stream)
    with pytest.raises(UnfitError, match="on another stream"):
        case.replay([new])
    assert ticket.drawn == 0


@pytest.mark.parametrize("kept", [0, 1])
def test_memory_that_is_kept_from_call_to_call(make: Callable[..., Wanderer], kept: int) -> None:
    """If results are kept, each call has another set than the call before."""
    case = make(inputs=3, recycled=True)
    results: list[Any] = []
    sets = [[case.floats(turn + i) for i in range(3)] for turn in range(WANDERING * 2)]

    for turn, inputs in enumerate(sets * 6):
        if turn == 5 * len(sets):
            before = case.replay.counts.relocated
        results = results[-kept:] if kept else []
        results.append((case.replay(list(inputs)), inputs))
        for result in results:
            case.see(result[0], *result[1])
        del result

    assert case.bindings.wandering is not None
    assert case.replay.counts.relocated - before <= len(sets) // 8
    results.clear()
    case.check()


def test_an_executable_is_known_to_be_bound_to_another_set_of_kept_memory(
    make: Callable[..., Wanderer],
) -> None:
    """Though the input and all other memory lie where they lay."""
    case = make(inputs=1, recycled=True)
    sets, stays = [case.floats(turn) for turn in range(WANDERING + 2)], case.floats(5)
    for each in sets:
        case.written(each)
    assert case.bindings.wandering is not None
    for turn in range(3 * TURNS):
        case.written(sets[turn % len(sets)])
        first = case.replay([stays])
        second = case.replay([stays])  # has a set of its own, as the first one is held
        case.see(second, stays)
        del first, second
        stays += 1
        third = case.replay([stays])
        case.see(third, stays)
        del third

    case.check()


def test_a_replay_that_is_closed_does_not_fit(make: Callable[..., Wanderer]) -> None:
    case = make()
    case.wander()
    case.replay.close()

    with pytest.raises(UnfitError, match="has gone"):
        case.replay([case.floats(1)])


INTERRUPTED = [
    Replay._elsewhere,
    Replay._at_once,
    Bindings.bound,
    Bindings._bind,
    Bindings.came,
    Bindings._go_on_wandering,
    Wandering.pause,
    Wandering.renew,
    Binding.bind,
    Binding.catch_up,
    Binding.wrote,
    Binding.place,
]


@pytest.mark.parametrize("code", [each.__code__ for each in INTERRUPTED], ids=lambda each: each.co_qualname)
@pytest.mark.parametrize("recycled", [False, True])
def test_an_interrupt_at_any_instruction_leaves_nothing_outdated(
    make: Callable[..., Wanderer], code: Any, recycled: bool
) -> None:
    case = make(inputs=2, recycled=recycled)
    sets = itertools.cycle(each for each in case.wander(2) for _ in range(2))
    interrupts = torn = 0
    for instruction in range(1, 120):
        try:
            with interrupting(code, instruction):
                for _ in range(TURNS + 2):
                    case.replay(list(next(sets)))
        except KeyboardInterrupt:
            interrupts += 1
        except DriverError:
            pass
        try:
            for each in itertools.islice(sets, 3):
                case.written(*each)
        except DriverError:  # it was left half written, and says so
            torn += 1
            case = make(inputs=2, recycled=recycled)
            sets = itertools.cycle(each for each in case.wander(2) for _ in range(2))

    assert interrupts > 5
    assert not torn or code in {Binding.bind.__code__, Bindings.bound.__code__, Bindings._bind.__code__}


CALL = st.tuples(
    st.integers(0, 30),
    st.integers(0, 30),
    st.sampled_from(["dropped"] * 6 + ["kept", "all dropped", "misaligned"]),
)
"""Where each of two inputs lies, and what becomes of the outputs, or that it does not fit."""


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    calls=st.lists(CALL, min_size=10, max_size=60),
    times=st.integers(1, 6),
    nodes=st.sampled_from([None, 1, 3]),
    recycled=st.booleans(),
)
def test_whatever_comes_results_are_right_and_what_is_known_of_addresses_agrees(
    by_the_helper: None,  # noqa: F811
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    calls: list[Any],
    times: int,
    nodes: int | None,
    recycled: bool,
) -> None:
    many = Blocks(1024)
    monkeypatch.setattr(_torch, "allocator", lambda _device: many)
    case = Wanderer(emulator, many, inputs=2, nodes=nodes, recycled=recycled)
    places = [[many.tensor(torch.rand(FLOATS + 1)) for _ in range(31)] for _ in range(2)]
    kept: list[Any] = []

    for first, second, fate in calls * times:
        inputs = [places[0][first][:FLOATS], places[1][second][:FLOATS]]
        if fate == "misaligned":
            inputs[1] = places[1][second][1:]
            with pytest.raises(UnfitError):
                case.replay(list(inputs))
            continue
        outputs = case.replay(list(inputs))
        case.see(outputs, *inputs)
        kept = {"kept": [*kept, (outputs, inputs)], "all dropped": []}.get(fate, kept)
        del kept[:-8]
        del outputs
        for each, of in kept:
            case.see(each, *of)

    assert isinstance(helper.bulk(case.notes.append), Compiled)
    kept.clear()
    case.check()
    assert case.notes == []
    case.replay.close()
