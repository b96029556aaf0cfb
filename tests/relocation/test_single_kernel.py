"""Graphs of one kernel, which is launched itself: with the arguments of each call, without an executable, and when it is not."""

from __future__ import annotations

import gc
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client import _torch
from pygraphd.client.binding import MisfitError
from pygraphd.client.bulk import helper
from pygraphd.client.driver import DriverError
from pygraphd.client.executables import Bindings
from pygraphd.client.misfits import Misfit
from pygraphd.client.single_kernel import SingleKernel
from tests.relocation.recorder import Recorder
from tests.relocation.test_at_once import Blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pygraphd.client.replay import Replay
    from tests.relocation.conftest import Allocator, Emulator

pytestmark = pytest.mark.torch


def expect(replay: Replay, emulator: Emulator, *, launched: int) -> None:
    """Hold what was made for a recording, and how many kernels were launched, against what is given."""
    assert isinstance(replay._bindings, SingleKernel)
    assert (replay.executables, replay.made) == (0, 0)
    assert emulator.kernel_launches() == launched
    assert emulator.live()[1] == 0


@pytest.fixture
def before(emulator: Emulator) -> int:
    """Return how many kernels were launched before the test."""
    return emulator.kernel_launches()


@pytest.mark.parametrize("packed", [False, True])
def test_each_call_launches_the_kernel_wherever_its_tensors_lie(
    recorder: Recorder, emulator: Emulator, before: int, packed: bool
) -> None:
    a = recorder.floats(1, 2)
    out = recorder.arena.allocate(2)
    if packed:
        recorder.graph.scale(a, out, 2.0)
    else:
        recorder.graph.add(a, a, out)
    replay = recorder.built([a], [out]).replay
    kept = []

    for number in range(100):
        (result,) = replay([recorder.floats(number, 1)])
        assert result.tolist() == [2.0 * number, 2]
        kept.append(result)

    assert [each.tolist() for each in kept] == [[2.0 * number, 2] for number in range(100)]
    expect(replay, emulator, launched=before + 100)
    assert replay.counts.relocated == replay.counts.written == 100
    replay.close()


def test_what_stays_where_it_was_is_not_written_again(recorder: Recorder) -> None:
    a = recorder.floats(1, 2)
    replay = recorder.doubling([a])
    memory = replay.memory()

    for _ in range(3):
        (result,) = replay.run([a], memory)
        assert result.tolist() == [2, 4]

    assert (replay.counts.replays, replay.counts.written) == (3, 1)
    replay.close()


def test_it_is_launched_on_the_stream_of_the_call(
    recorder: Recorder, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = [5]
    monkeypatch.setattr(_torch, "current_stream", lambda _device: lambda: stream[0])
    a = recorder.floats(1, 2)
    replay = recorder.doubling([a])

    for stream[0] in (5, 1 << 40, 0, 5):
        replay([a])
        assert emulator.kernel_stream() == stream[0]
    replay.close()


def test_an_input_that_is_aligned_worse_does_not_fit(
    recorder: Recorder, emulator: Emulator, before: int
) -> None:
    a = recorder.floats(*range(8))
    replay = recorder.doubling([a])
    inputs = [recorder.allocator.tensor(torch.zeros(9))[1:]]

    with pytest.raises(MisfitError) as raised:
        replay(inputs)

    assert raised.value.misfit is Misfit.ALIGNMENT
    assert len(inputs) == 1
    expect(replay, emulator, launched=before)
    assert replay([a])[0].tolist() == [2.0 * number for number in range(8)]
    replay.close()


def test_an_input_that_is_written_to(recorder: Recorder) -> None:
    a, b = recorder.floats(1, 2), recorder.floats(10, 20)
    recorder.graph.accumulate(a, b)
    replay = recorder.built([a, b], []).replay
    others = recorder.floats(3, 4), recorder.floats(5, 6)

    replay([*others])

    assert (others[0].tolist(), a.tolist()) == ([8, 10], [1, 2])
    replay.close()


def test_every_call_of_the_driver_may_fail(emulator: Emulator, allocator: Allocator) -> None:
    """In a recording there is none of it then, but for what tells of the kernel: that is asked for no more than it is worth."""
    call, outcomes = 0, list[str]()
    while not outcomes or outcomes[-1] != "recorded without failing":
        call += 1
        recorder = Recorder(emulator, allocator)
        a = recorder.floats(1, 2)
        out = recorder.arena.allocate(2)
        recorder.graph.scale(a, out, 2.0)
        emulator.fail_at(call)
        try:
            replay = recorder.built([a], [out]).replay
        except DriverError:
            outcomes.append("not recorded")
            continue
        failed = emulator.calls() >= call
        emulator.fail_at(0)
        kind = "alone" if isinstance(replay._bindings, SingleKernel) else "in a graph"
        outcomes.append(kind if failed else "recorded without failing")
        assert replay([recorder.floats(3, 4)])[0].tolist() == [6, 8]
        replay.close()
    emulator.fail_at(0)

    assert outcomes.count("in a graph") == 2
    assert "alone" not in outcomes


def test_a_launch_that_fails_is_told_and_the_inputs_are_left(recorder: Recorder, emulator: Emulator) -> None:
    a = recorder.floats(1, 2)
    replay = recorder.doubling([a])
    inputs = [recorder.floats(3, 4)]
    emulator.fail_at(1)

    with pytest.raises(DriverError, match="cuLaunchKernelEx"):
        replay(inputs)

    emulator.fail_at(0)
    assert len(inputs) == 1
    replay.close()


def in_a_graph(replay: Replay) -> bool:
    return isinstance(replay._bindings, Bindings) and replay.executables == 1


@pytest.mark.parametrize("how", [{"cooperative": True}, {"blocks": 2}])
def test_a_kernel_that_is_launched_in_a_manner_of_its_own_stays_in_its_graph(
    recorder: Recorder, emulator: Emulator, how: dict[str, Any]
) -> None:
    emulator.kernels_are(**how)
    replay = recorder.doubling([recorder.floats(1, 2)])

    assert in_a_graph(replay)
    assert replay([recorder.floats(3, 4)])[0].tolist() == [6, 8]
    replay.close()


def test_clusters_of_one_block_are_none(recorder: Recorder, emulator: Emulator, before: int) -> None:
    emulator.kernels_are(blocks=1)
    replay = recorder.doubling([recorder.floats(1, 2)])

    replay([recorder.floats(3, 4)])

    expect(replay, emulator, launched=before + 1)
    replay.close()


def test_two_kernels_a_copy_and_inputs_that_move_together_stay_in_a_graph(
    recorder: Recorder, emulator: Emulator, allocator: Allocator
) -> None:
    """Of two, the second might fail when the first has run."""
    two = recorder.doubling([recorder.floats(1, 2), recorder.floats(3, 4)])
    other = Recorder(emulator, allocator)
    a = other.floats(1, 2)
    out = other.arena.allocate(2)
    other.graph.copy(out, a)
    copy = other.built([a], [out]).replay
    third = Recorder(emulator, allocator)
    whole = third.floats(1, 2, 3, 4)
    out = third.arena.allocate(2)
    third.graph.add(whole[:2], whole[1:3], out)
    together = third.built([whole[:2], whole[1:3]], [out]).replay

    assert all(map(in_a_graph, (two, copy, together)))
    for each in (two, copy, together):
        each.close()


def test_a_closed_one_does_not_fit(recorder: Recorder) -> None:
    from pygraphd.client.binding import UnfitError

    a = recorder.floats(1, 2)
    replay = recorder.doubling([a])
    replay.close()

    with pytest.raises(UnfitError, match="gone for others"):
        replay([a])


@pytest.fixture(params=["by Python", "by the helper"])
def either_way(request: pytest.FixtureRequest, compiled_helper: Path) -> Iterator[None]:
    helper.forget()
    if request.param == "by the helper":
        if shutil.which("cc") is None:
            pytest.skip("needs a C compiler")
        assert helper.prepare(compiled_helper) is None
    yield
    helper.forget()


CALLS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from(["dropped", "kept", "all dropped"])),
    min_size=1,
    max_size=40,
)
"""Which memory each input lies in, and what becomes of the output."""


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(calls=CALLS, recycled=st.booleans())
def test_any_calls_give_what_they_should(
    either_way: None, emulator: Emulator, monkeypatch: pytest.MonkeyPatch, calls: list[Any], recycled: bool
) -> None:
    blocks = Blocks(256)
    monkeypatch.setattr(_torch, "allocator", lambda _device: blocks)
    recorder = Recorder(emulator, blocks)  # type: ignore[arg-type] # it gives out memory, too
    places = [blocks.tensor(torch.zeros(8)) for _ in range(4)]
    out = recorder.arena.allocate(8)
    recorder.graph.add(places[0], places[1], out)
    replay = recorder.built(places[:2], [out]).replay
    if recycled:
        replay.recycle({0})
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, (first, second, fate) in enumerate(calls * 2):
        places[first].fill_(number)
        expected = places[first] + places[second]

        (output,) = replay([places[first], places[second]])

        assert torch.equal(output, expected)
        if fate == "kept" and len(kept) < 20:
            kept.append((output, expected))
        elif fate == "all dropped":
            kept.clear()
        assert all(torch.equal(*each) for each in kept)
        del output
    assert isinstance(replay._bindings, SingleKernel)
    replay.close()


def test_calls_whose_tensors_stay_are_done_in_one_go(
    emulator: Emulator, compiled_helper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    helper.forget()
    assert helper.prepare(compiled_helper) is None
    blocks = Blocks()
    monkeypatch.setattr(_torch, "allocator", lambda _device: blocks)
    recorder = Recorder(emulator, blocks)  # type: ignore[arg-type] # it gives out memory, too
    a = blocks.tensor(torch.zeros(8))
    replay = recorder.doubling([a])
    launched = emulator.kernel_launches()

    for number in range(5):
        a.fill_(number)
        assert replay([a])[0].tolist() == [2.0 * number] * 8
        gc.collect()

    assert replay.counts.at_once == 4
    assert emulator.kernel_launches() == launched + 5
    replay.close()
    helper.forget()
