"""What the GPU tests hold replays against notices what is wrong with one: by values, by guard zones, by poison, by addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import NodeType
from tests.support.beside import Beside
from tests.support.guards import Guarded
from tests.support.recording_case import Case, add
from tests.support.seen import Seen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.client.recording.recordings import Recordings
    from tests.support.emulator import Allocator, Emulator

pytestmark = pytest.mark.torch


@pytest.fixture
def case(emulator: Emulator, allocator: Allocator) -> Iterator[Case]:
    case = Case(emulator, allocator)
    yield case
    case.close()


class Plain:
    """Memory of what runs as KERNELS, without guard zones: all of it is poisoned after the call."""

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()


@pytest.fixture
def guarded(case: Case, monkeypatch: pytest.MonkeyPatch) -> Guarded:
    monkeypatch.setattr(case.recorder.as_kernels, "_allocator", Plain())
    guarded = Guarded("cpu")
    monkeypatch.setattr(torch_private, "allocator", lambda _device: guarded)
    return guarded


class Spoilt:
    """A relocatable callable of which each call is followed by a mistake."""

    def __init__(self, whole: Recordings, spoil: Callable[[list[Any], Any], Any]) -> None:
        self.whole = whole
        self.spoil = spoil

    def __call__(self, inputs: list[Any]) -> Any:
        mine = list(inputs)
        return self.spoil(mine, self.whole(inputs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


def beside(case: Case, guarded: Guarded, body: Any = add, spoil: Any = None) -> Beside:
    run = case.make(body)
    relocatable: Any = Spoilt(run, spoil) if spoil is not None else run
    return Beside(case.recorder.compiled(body), relocatable, guarded, case.recorder.generator)


def call(case: Case, run: Beside, calls: int = 5) -> None:
    for i in range(calls):
        assert run([case.floats(i, 1), case.floats(2, 3)])[0].tolist() == [i + 2, 4]
    run.close()


def test_a_replay_that_is_right_moves_at_every_call(case: Case, guarded: Guarded) -> None:
    run = beside(case, guarded)

    call(case, run)

    run.expect_moved_calls()
    case.expect(captured=1)
    (replay,) = run.relocatable.replays
    assert (replay.counts.replays, replay.counts.relocated) == (4, 4)


def test_what_runs_as_kernels_at_every_call_has_not_moved_at_any(case: Case, guarded: Guarded) -> None:
    run = beside(case, guarded)
    call(case, run, calls=3)  # one runs as KERNELS, one is recorded

    run.calls += 3
    with pytest.raises(AssertionError):
        run.expect_moved_calls()


def test_inputs_that_are_changed_and_share_memory_do_so_in_the_copies(case: Case, guarded: Guarded) -> None:
    def body(operations: Any, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0], inputs[1])
        return (inputs[0],)

    run = beside(case, guarded, body)
    for _ in range(5):
        base = case.floats(0, 1, 2, 3, 4, 5)
        assert run([base[:4], case.floats(4, 5, 4, 5), base[1:3]])[0].tolist() == [4, 6, 6, 8]
    run.close()

    run.expect_moved_calls()


@pytest.mark.parametrize(
    ("what", "begin", "end"),
    [("before", 0, 1), ("behind", -1, None), ("before", 0, 512), ("behind", -512, None)],
)
def test_a_write_to_a_guard_zone_is_noticed(
    case: Case, guarded: Guarded, what: str, begin: int, end: int | None
) -> None:
    def spoil(inputs: list[Any], outputs: Any) -> Any:
        torch.empty(0, dtype=torch.uint8).set_(inputs[0].untyped_storage())[begin:end] = 7
        return outputs

    with pytest.raises(AssertionError, match=f"something was written {what} memory"):
        call(case, beside(case, guarded, spoil=spoil))


def test_a_write_to_memory_of_a_call_before_is_noticed(case: Case, guarded: Guarded) -> None:
    kept: list[Any] = []

    def spoil(inputs: list[Any], outputs: Any) -> Any:
        kept.append(inputs[0])
        if len(kept) == 4:
            kept[2].fill_(1)
        return outputs

    with pytest.raises(AssertionError, match="memory of a call before was written to"):
        call(case, beside(case, guarded, spoil=spoil))


@pytest.mark.parametrize(("wrong", "text"), [("output", "output 0 differs"), ("input", "input 1 differs")])
def test_what_differs_in_the_last_bit_is_noticed(case: Case, guarded: Guarded, wrong: str, text: str) -> None:
    def spoil(inputs: list[Any], outputs: Any) -> Any:
        value = outputs[0] if wrong == "output" else inputs[1]
        value.copy_(torch.nextafter(value, torch.tensor(9.0)))
        return outputs

    with pytest.raises(AssertionError, match=f"{text}.* and 8 runs as KERNELS agree bit for bit"):
        call(case, beside(case, guarded, spoil=spoil))


@pytest.mark.parametrize(("off", "passes"), [(1e-5, True), (1e-2, False)])
def test_where_runs_as_kernels_differ_a_replay_may_as_well_but_not_by_more_than_an_order_of_adding(
    case: Case, guarded: Guarded, off: float, passes: bool
) -> None:
    def spoil(_: list[Any], outputs: Any) -> Any:
        return (outputs[0] + off,)

    runs = iter(range(100))

    def wavering(inputs: list[Any]) -> Any:
        return (inputs[0] + inputs[1] + 1e-6 * next(runs),)

    run = beside(case, guarded, spoil=spoil)
    run._run_kernels = wavering
    inputs = [case.floats(1), case.floats(2)]
    if passes:
        run(inputs)
    else:
        with pytest.raises(AssertionError):
            run(inputs)


def test_an_output_that_stays_where_it_was_is_noticed(case: Case, guarded: Guarded) -> None:
    kept: list[torch.Tensor] = []

    def spoil(_: list[Any], outputs: Any) -> Any:
        kept.append(outputs[0])
        kept[0].copy_(outputs[0])
        return (kept[0],)

    with pytest.raises(AssertionError, match=r"\('output', 0\)"):
        call(case, beside(case, guarded, spoil=spoil))


def test_what_a_recording_is_made_of_is_seen(emulator: Emulator) -> None:
    seen, graph, arena = Seen(), emulator.graph(), emulator.arena()
    a, b, out = (arena.allocate(4) for _ in range(3))
    graph.add(a, b, out)
    graph.copy(b, a)
    graph.set(a, 0)
    graph.set(b, 0)
    seen.note(emulator.driver, graph.handle)
    emulator.driver.destroy_graph(graph.handle)

    assert seen.nodes == {NodeType.KERNEL: 1, NodeType.MEMCPY: 1, NodeType.MEMSET: 2}
    seen.expect("ADD|sub")
    seen.kernels["triton_poi_fused_exp"] += 1
    seen.expect("add", "triton_(red|poi)")
    for other in ("scale", "fused_exp", "triton_red", "triton_poi_add"):
        with pytest.raises(AssertionError):
            seen.expect("add", other)
