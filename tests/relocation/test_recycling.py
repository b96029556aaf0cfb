"""Memory that is kept for what a forward saves: used again only when nobody can see it, and never for what user code sees."""

from __future__ import annotations

import gc
import itertools
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client import _torch, recording, recycling, replay
from pygraphd.client.binding import UnfitError
from pygraphd.client.bulk import InPython
from pygraphd.client.outputs import Fixed, Input, Outputs, Part, Whole
from pygraphd.client.recording import Capture, build
from pygraphd.client.recycling import IDLE_CALLS, MAX_OBSERVATIONS, MAX_SETS, Link, Recycler
from pygraphd.client.relocation import BLOCK, Share
from pygraphd.client.replay import Memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.client.recycling import Saved
    from pygraphd.client.replay import Replay
    from tests.relocation.conftest import Allocator, Emulator
    from tests.relocation.recorder import Recorder

pytestmark = pytest.mark.torch

FLOATS = 4
CPU = torch.device("cpu")


def recycler(trim: Callable[[], None] | None = None) -> Recycler:
    """Return one of three allocations: a visible output, a whole saved one, and one with two saved parts."""
    memories = [Memory((FLOATS,), (1,), torch.float32), Memory((FLOATS,), (1,), torch.float32)]
    memories.append(Memory((1024,), (1,), torch.uint8))
    parts = [Part(2, (FLOATS,), (1,), offset, torch.float32) for offset in (0, 128)]
    outputs = Outputs(
        [Whole(0), Whole(1), *parts, Input(0), Fixed(5)], [each.dtype for each in memories], as_tuple=True
    )
    return Recycler(memories, outputs, {1, 2}, _torch.allocator(CPU), trim or (lambda: None), InPython())


def take(made: Recycler, stream: int = 0) -> Saved:
    saved = made.take(stream)
    assert saved is not None
    return saved


def test_a_set_holds_what_is_recycled_and_nothing_else() -> None:
    made = recycler()

    saved = take(made)

    assert made.fresh == (0,)
    assert made.making.fill(saved.made.copy(), [], []) == saved.made
    assert saved.memory[0] is None
    assert saved.memory[1].dtype == torch.float32
    *parts, constant = saved.made
    assert constant == 5
    # By place: nothing was written there, and what was there before may be no number.
    assert [each.data_ptr() for each in parts] == [saved.memory[2][i:].data_ptr() for i in (0, 512)]
    assert all(each.data_ptr() % 16 == 0 and not each._is_view() for each in (*saved.memory[1:], *parts))


def test_where_memory_is_kept_is_told_of_each_set() -> None:
    made = recycler()
    assert (made.slots, made.places) == ((1, 2), ())

    sets = [take(made, stream) for stream in (7, 8)]

    assert len({start for start, _ in made.places}) == 2
    for saved, (start, size) in zip(sets, made.places, strict=True):
        assert size >= 4 * FLOATS + 1024
        assert all(start <= saved.memory[slot].data_ptr() < start + size for slot in made.slots)


def test_a_set_that_nobody_holds_is_taken_again() -> None:
    made = recycler()

    assert len({take(made) for _ in range(10)}) == 1
    assert len(made) == 1


def test_memory_that_is_free_goes_back_before_a_set_is_made() -> None:
    events: list[str] = []
    made = recycler(lambda: events.append("trim"))
    allocate = made._allocate

    def allocate_and_say(*shape: Any) -> torch.Tensor:
        events.append("allocate")
        return allocate(*shape)

    made._allocate = allocate_and_say

    for _ in range(3):
        take(made)

    assert events == ["trim", "allocate"]


class Keeper(torch.autograd.Function):  # type: ignore[misc]
    """Saves what it is given, as AOTAutograd does."""

    kept: torch.Tensor

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(Keeper.kept)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (kept,) = ctx.saved_tensors
        return grad * kept.numel()


def keep_reference(tensor: torch.Tensor) -> Any:
    return [tensor]


def keep_view(tensor: torch.Tensor) -> Any:
    return tensor[1:]


def keep_detached(tensor: torch.Tensor) -> Any:
    return tensor.detach()


def keep_storage_of_another_tensor(tensor: torch.Tensor) -> Any:
    return torch.empty(0).set_(tensor.untyped_storage())


def keep_for_a_backward(tensor: torch.Tensor) -> Any:
    Keeper.kept = tensor
    result = Keeper.apply(torch.ones(2, requires_grad=True))
    del Keeper.kept
    return result


def keep_storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()


KEEP = [
    keep_storage,
    keep_reference,
    keep_view,
    keep_detached,
    keep_storage_of_another_tensor,
    keep_for_a_backward,
]


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize(
    "pick", [lambda saved: saved.memory[1], lambda saved: saved.made[1]], ids=["whole", "part"]
)
def test_a_set_is_not_taken_while_anybody_holds_any_of_it(
    keep: Callable[[torch.Tensor], Any], pick: Callable[[Saved], torch.Tensor]
) -> None:
    made = recycler()
    first = take(made)
    kept = keep(pick(take(made)))

    numbers = {take(made) for _ in range(3)}
    assert len(numbers) == 1
    assert first not in numbers
    del kept
    assert {take(made) for _ in range(3)} == {first}


def test_a_backward_that_has_run_lets_go() -> None:
    made = recycler()
    first = take(made)
    loss = keep_for_a_backward(take(made).memory[1]).sum()

    loss.backward(retain_graph=True)
    assert take(made) != first
    loss.backward()
    assert take(made) == first


def test_what_was_used_on_one_stream_is_not_used_on_another() -> None:
    made = recycler()

    first, second, third, fourth = (take(made, stream) for stream in (7, 8, 7, 8))

    assert (first, second) == (third, fourth)
    assert first != second


def test_more_forwards_in_flight_than_there_are_sets_get_none() -> None:
    made = recycler()
    kept = [take(made).memory[1] for _ in range(MAX_SETS)]

    assert made.take(0) is None
    kept.pop()
    assert made.take(0) is not None
    assert len(made) == MAX_SETS


def test_sets_that_are_needed_no_more_are_given_back() -> None:
    made = recycler()
    first = take(made)
    kept = [take(made).memory[1] for _ in range(3)]
    memory = weakref.ref(kept[2])
    kept.clear()

    for _ in range(2 * IDLE_CALLS):
        assert take(made) == first

    assert len(made) == 1
    assert memory() is None


def test_all_that_is_free_is_given_back_when_memory_is_short() -> None:
    first, second = recycler(), recycler()
    kept = take(first).memory[1]
    take(second)
    numbers = [take(second), take(first)]
    assert (len(first), len(second)) == (2, 1)

    recycling.release_all()

    assert (len(first), len(second)) == (1, 0)
    assert take(second) not in numbers
    del kept


# --- in a recording ----------------------------------------------------------------------------------------------


class Forward:
    """A recording of `visible = a + a; saved = a + visible; temporary = visible + saved` with the last in scratch."""

    def __init__(self, emulator: Emulator, allocator: Allocator) -> None:
        self.allocator = allocator
        self.notes: list[str] = []
        arena, graph = emulator.arena(), emulator.graph()
        a = self.floats(1, 2)
        self.visible, self.saved = arena.allocate(2), arena.allocate(2)
        graph.add(a, a, self.visible)
        graph.add(a, self.visible, self.saved)
        graph.add(self.visible, self.saved, arena.allocate(2))
        capture = Capture(graph.handle, [self.visible, self.saved], tuple(arena.allocations))
        self.replay: Replay = build(emulator.driver, capture, [a], {}, self.notes.append).replay
        arena.let_go()

    def floats(self, *values: float) -> torch.Tensor:
        return self.allocator.tensor(torch.tensor(values, dtype=torch.float32))


@pytest.fixture
def forward(emulator: Emulator, allocator: Allocator) -> Iterator[Forward]:
    made = Forward(emulator, allocator)
    yield made
    made.replay.close()


def test_a_recording_says_what_it_keeps(forward: Forward) -> None:
    before = forward.replay.recycler
    forward.replay.recycle({1})
    _, saved = forward.replay([forward.floats(1, 2)])

    assert before is None
    assert forward.replay.recycler is not None
    ((start, size),) = forward.replay.recycler.places
    assert start <= saved.data_ptr() < start + size
    assert forward.replay.layout.memories == forward.replay.memories


@pytest.mark.parametrize(("most", "kept"), [(0, []), (BLOCK, [BLOCK]), (3 * BLOCK, [BLOCK, 2 * BLOCK])])
def test_small_scratch_is_kept_beside_what_is_saved_up_to_so_much_in_all(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch, most: int, kept: list[int]
) -> None:
    monkeypatch.setattr(recording, "LEAST_SCRATCH", 0)
    monkeypatch.setattr(recording, "SCRATCH", Share(1000, BLOCK))
    monkeypatch.setattr(replay, "SMALL_SCRATCH", most)
    arena, graph, a = recorder.arena, recorder.graph, recorder.floats(1, 2)
    visible, saved, *temporaries = map(arena.allocate, (2, 2, 600, 2, 200))  # in blocks: 1, 1, 5, 1, 2
    for source, to in itertools.pairwise([a, *temporaries, visible, saved]):
        graph.scale(source[:2], to[:2], 2.0)
    made = recorder.built([a], [visible, saved]).replay

    made.recycle({1})
    outputs = made([recorder.floats(3, 4)])

    assert [each.tolist() for each in outputs] == [[48, 64], [96, 128]]
    assert made.recycler is not None
    sizes = [made.memories[slot].bytes for slot in made.recycler.slots]
    assert (sizes[0], sorted(sizes[1:])) == (8, kept)
    made.close()


def test_saved_outputs_stay_where_they_are_and_visible_ones_do_not(forward: Forward) -> None:
    forward.replay.recycle({1})
    a = forward.floats(1, 2)

    kept, places = [], set()
    for count in range(1, 6):
        a.fill_(count)
        visible, saved = forward.replay([a])
        assert saved.tolist() == [3.0 * count] * 2
        kept.append(visible)
        places.add(saved.data_ptr())
        del saved

    assert [each.tolist() for each in kept] == [[2.0 * count] * 2 for count in range(1, 6)]
    assert len(places) == 1


def test_a_visible_output_is_the_callers_alone(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
    forward.replay.recycle({1})
    a = forward.floats(1, 2)

    visible, _ = forward.replay([a])
    gone = weakref.ref(visible)
    del visible, _

    assert gone() is None
    failed: list[weakref.ref[Any]] = []

    def fail(inputs: list[Any], memory: list[Any], *_: Any) -> None:
        failed.extend(weakref.ref(each) for each in memory if each is not None)
        raise UnfitError("not now")

    monkeypatch.setattr(forward.replay, "_launch", fail)
    inputs = [a]
    with pytest.raises(UnfitError):
        forward.replay(inputs)
    assert inputs == [a]
    alive = [each() for each in failed if each() is not None]
    assert len(alive) == len(failed) - 1


def test_two_forwards_in_flight_keep_apart(forward: Forward) -> None:
    forward.replay.recycle({0, 1})  # nobody sees `visible` here, so that only the sets' addresses count
    a, b = forward.floats(1, 1), forward.floats(5, 5)

    for _ in range(4):
        first = forward.replay([a])
        second = forward.replay([b])
        assert [each.tolist() for each in (*first, *second)] == [[2, 2], [3, 3], [10, 10], [15, 15]]
        del first, second


def test_hooks_on_saved_tensors_get_memory_of_their_own(forward: Forward) -> None:
    forward.replay.recycle({1})
    a = forward.floats(1, 2)
    place = forward.replay([a])[1].data_ptr()

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert forward.replay([a])[1].data_ptr() != place

    assert forward.replay([a])[1].data_ptr() == place


# --- what is observed --------------------------------------------------------------------------------------------


class Step:
    """A forward with a link, and what its user and its backward do."""

    def __init__(self, forward: Forward, monkeypatch: pytest.MonkeyPatch) -> None:
        self.forward = forward
        self.link = Link()
        self.link.arm()
        monkeypatch.setattr(_torch, "forward_returns", lambda: self.returned)
        self.returned: int | None = 1

    def run(
        self,
        *,
        in_backward: int = 1,
        given_away: bool = False,
        launched: bool = False,
    ) -> None:
        self.link.forward_begins()
        outputs = self.forward.replay([self.forward.floats(1, 2)])
        if not launched:
            self.link.replayed(self.forward.replay, outputs)
        self.link.forward_returned(outputs)
        inputs = recycling._storages(outputs[in_backward:])
        self.link.backward_returned(inputs, [outputs[1].view(2, 1)] if given_away else [torch.ones(1)])

    def recycled(self) -> list[bool]:
        """Return whether each output lies where it lay before."""

        def places() -> list[int]:
            return [each.data_ptr() for each in self.forward.replay([self.forward.floats(1, 2)])]

        before, kept = places(), self.forward.floats(0, 0)
        hold = self.forward.allocator  # takes memory, so that nothing lies where it lay by chance
        hold.tensor(kept)
        return [first == second for first, second in zip(before, places(), strict=True)]


@pytest.fixture
def step(forward: Forward, monkeypatch: pytest.MonkeyPatch) -> Step:
    return Step(forward, monkeypatch)


def test_what_only_the_backward_sees_is_recycled(step: Step) -> None:
    step.run()

    assert step.recycled() == [False, True]
    assert not step.link.pending


def test_what_a_backward_gives_away_is_not_recycled(step: Step) -> None:
    step.run(given_away=True)

    assert not step.forward.replay.recycles


def test_what_user_code_sees_is_not_recycled_though_it_is_saved(step: Step) -> None:
    step.returned = 2
    step.run(in_backward=0)

    assert not step.forward.replay.recycles


def test_what_does_not_come_to_the_backward_is_not_recycled(step: Step) -> None:
    step.run(in_backward=2)

    assert not step.forward.replay.recycles
    assert step.link.pending


def test_a_forward_that_was_launched_says_nothing_about_a_recording(step: Step) -> None:
    step.run(launched=True)

    assert not step.forward.replay.recycles
    step.run()
    assert step.forward.replay.recycles


def test_observing_ends(step: Step) -> None:
    for _ in range(MAX_OBSERVATIONS):
        assert step.link.pending
        step.run(given_away=True)

    assert not step.link.pending
    step.link.arm()
    assert step.link.pending


def test_each_recording_is_observed_once(step: Step, emulator: Emulator, allocator: Allocator) -> None:
    """A forward has one for each of its dynamic sizes, and the first that is observed must not be the last."""
    first, other = step.forward, Forward(emulator, allocator)
    step.link.arm(first.replay)
    step.link.arm(other.replay)

    seen = []
    for step.forward in (first, other):
        step.run()
        seen.append((first.replay.recycles, other.replay.recycles, step.link.pending))

    assert seen == [(True, False, True), (True, True, False)]
    other.replay.close()


def test_a_recording_that_is_gone_is_not_waited_for(
    step: Step, emulator: Emulator, allocator: Allocator
) -> None:
    gone = Forward(emulator, allocator)
    step.link.arm(step.forward.replay)
    step.link.arm(gone.replay)
    gone.replay.close()
    del gone
    gc.collect()

    step.run()

    assert not step.link.pending


def test_with_hooks_on_what_is_saved_nothing_is_observed(step: Step) -> None:
    """The backward then gets other tensors, which may lie where the forward's lay."""
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        step.run()

    assert not step.forward.replay.recycles
    step.run()
    assert step.forward.replay.recycles


def test_a_forward_that_was_launched_is_not_taken_for_the_one_before(step: Step) -> None:
    """Its tensors may lie where those of a forward lay that was dropped."""
    step.link.forward_begins()
    outputs = step.forward.replay([step.forward.floats(1, 2)])
    step.link.replayed(step.forward.replay, outputs)
    step.link.forward_returned(outputs)
    step.link.forward_begins()
    step.link.forward_returned(outputs)

    step.link.backward_returned(recycling._storages(outputs[1:]), [])

    assert not step.forward.replay.recycles


def test_a_forward_that_raised_leaves_nothing_behind(step: Step) -> None:
    step.link.forward_begins()
    outputs = step.forward.replay([step.forward.floats(1, 2)])
    step.link.replayed(step.forward.replay, outputs)  # and then the next part raised

    step.run(launched=True)

    assert not step.forward.replay.recycles


def test_replays_of_a_forward_that_is_not_watched_are_not_kept(step: Step) -> None:
    """One that runs otherwise for now may have been watched before."""
    step.link.forward_begins()
    outputs = step.forward.replay([step.forward.floats(1, 2)])
    step.link.forward_returned(outputs)

    for _ in range(3):
        step.link.replayed(step.forward.replay, outputs)

    assert step.link.pending
    assert step.link._call.replays is None


def test_a_forward_whose_memory_nobody_wants_is_not_observed(step: Step) -> None:
    step.link.wanted = False

    step.link.arm()

    assert not step.link.pending


def test_a_forward_without_a_backward_is_not_observed_for_ever(step: Step) -> None:
    for _ in range(MAX_OBSERVATIONS):
        step.link.forward_begins()
        step.link.forward_returned(step.forward.replay([step.forward.floats(1, 2)]))

    assert not step.link.pending


def test_an_error_in_observing_ends_it_and_the_call_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    link, compiled = Link(), SimpleNamespace(current_callable=lambda inputs: [torch.ones(1)])
    recycling.watch(compiled, link, is_backward=False)
    link.arm()
    monkeypatch.setattr(link, "forward_returned", lambda _outputs: 1 / 0)

    assert compiled.current_callable([])[0].tolist() == [1]
    assert not link.pending
    assert compiled.current_callable([])[0].tolist() == [1]


def test_where_it_cannot_be_told_what_user_code_sees_nothing_is_recycled(step: Step) -> None:
    step.returned = None
    step.run()

    assert not step.forward.replay.recycles
    assert not step.link.pending


def test_a_compiled_forward_is_told_how_many_outputs_user_code_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """From within a real compiled forward, on the CPU: two results are returned, and more is saved."""
    import torch._inductor.output_code

    told: list[tuple[int | None, int]] = []
    original = torch._inductor.output_code.CompiledFxGraph.post_compile

    def post_compile(self: Any, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        inner = self.current_callable

        def run(inputs: list[Any]) -> Any:
            outputs = inner(inputs)
            told.append((_torch.forward_returns(), len(outputs)))
            return outputs

        self.current_callable = run

    monkeypatch.setattr(torch._inductor.output_code.CompiledFxGraph, "post_compile", post_compile)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = layers(x)
        return y, y.square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(forward)
    results = compiled(torch.randn(4, 8))
    (returned, outputs), *_ = told
    assert returned == len(results)
    assert outputs > 2
    with torch.no_grad():
        compiled(torch.randn(4, 8))
    assert told[-1][0] is None
    torch._dynamo.reset()
