"""A graph of one kernel is launched without an executable, with its arguments as the call has them."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.backend.driver import _CLUSTER_DIMENSION, _COOPERATIVE, DriverError, NodeType
from pygraphd.client.backend.errors import FallbackError
from pygraphd.client.recording import recordings
from tests.support.recording_case import Case, Operations, case

if TYPE_CHECKING:
    from typing import Any

    from pygraphd.client.replay.replay import Replay
    from tests.support.recorder import Recorder

pytestmark = pytest.mark.torch
__all__ = ["case"]


def summed(recorder: Recorder) -> Replay:
    """Record `a + b`, with the arguments one by one."""
    a, b, out = recorder.floats(1, 2), recorder.floats(3, 4), recorder.arena.allocate(2)
    recorder.graph.add(a, b, out)
    return recorder.built([a, b], [out]).replay


def test_it_has_no_executable_and_is_launched_at_any_addresses(recorder: Recorder) -> None:
    _, executables = recorder.emulator.live()
    replay, launched = summed(recorder), recorder.emulator.single_kernels()

    for i in range(40):
        assert replay.serve([recorder.floats(i, 1), recorder.floats(i, 2)])[0][0].tolist() == [2 * i, 3]

    assert recorder.emulator.single_kernels() == launched + 40
    assert (replay.executables, recorder.emulator.live()[1]) == (0, executables)
    counts = replay.counts
    assert (counts.fused, counts.relocated, counts.written) == (40, 40, 40)
    assert recorder.notes == []
    replay.close()


def test_its_arguments_may_be_a_packed_list(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay, launched = recorder.built([a], [out]).replay, recorder.emulator.single_kernels()

    assert [replay.serve([recorder.floats(i)])[0][0][0].item() for i in range(5)] == [0, 3, 6, 9, 12]
    assert recorder.emulator.single_kernels() == launched + 5
    replay.close()


def test_addresses_that_stay_are_written_once(recorder: Recorder) -> None:
    replay, inputs = summed(recorder), [recorder.floats(1, 2), recorder.floats(3, 4)]
    memory = replay.memory()

    for _ in range(6):
        assert replay.serve_on([*inputs], memory)[0].tolist() == [4, 6]

    assert (replay.counts.replays, replay.counts.written) == (6, 1)
    replay.close()


@pytest.mark.parametrize("attribute", [_COOPERATIVE, _CLUSTER_DIMENSION])
def test_a_kernel_that_is_launched_in_another_way_has_an_executable(
    recorder: Recorder, attribute: int
) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 2.0)
    recorder.graph.attribute(attribute)
    replay, launched = recorder.built([a], [out]).replay, recorder.emulator.single_kernels()

    assert replay.serve([recorder.floats(3, 4)])[0][0].tolist() == [6, 8]
    assert (replay.executables, recorder.emulator.single_kernels()) == (1, launched)
    replay.close()


def test_a_kernel_with_a_node_beside_it_has_an_executable(recorder: Recorder) -> None:
    """As one of NCCL's, which lies between events."""
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 2.0)
    recorder.graph.other(NodeType.EMPTY)
    replay = recorder.built([a], [out]).replay

    assert replay.serve([recorder.floats(3, 4)])[0][0].tolist() == [6, 8]
    assert replay.executables == 1
    replay.close()


def test_a_kernel_of_which_the_driver_does_not_tell_how_it_is_launched_has_an_executable(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 2.0)
    monkeypatch.setitem(recorder.emulator.driver._calls, "cuGraphKernelNodeGetAttribute", lambda *_: 801)
    replay = recorder.built([a], [out]).replay

    assert replay.serve([recorder.floats(3, 4)])[0][0].tolist() == [6, 8]
    assert replay.executables == 1
    replay.close()


@pytest.mark.parametrize("node", ["copy", "memset"])
def test_a_copy_has_an_executable(recorder: Recorder, node: str) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.copy(out, a) if node == "copy" else recorder.graph.set(out, 0)
    replay = recorder.built([a], [out]).replay

    assert replay.serve([recorder.floats(3, 4)])[0][0].tolist() == ([3, 4] if node == "copy" else [0, 0])
    assert replay.executables == 1
    replay.close()


def test_a_launch_that_fails_is_told_by_its_name(recorder: Recorder) -> None:
    replay, inputs = summed(recorder), [recorder.floats(1, 2), recorder.floats(3, 4)]
    failed = pytest.raises(DriverError, match="cuLaunchKernel failed with CUresult 999")
    recorder.emulator.fail_at(1)
    with failed:
        replay.serve([*inputs])
    recorder.emulator.fail_at(1)
    with failed:
        replay.serve_on([*inputs], replay.memory())
    recorder.emulator.fail_at(0)

    assert replay.serve([*inputs])[0][0].tolist() == [4, 6]
    replay.close()
    with pytest.raises(FallbackError):
        replay.serve([*inputs])


def doubled(operations: Operations, inputs: list[Any]) -> Any:
    return (operations.add(inputs[0], inputs[0]),)


def test_a_call_whose_launch_failed_runs_as_kernels_and_its_recording_goes(case: Case) -> None:
    run = case.make(doubled)
    for i in range(3):
        run([case.floats(i)])
    replays = len(run.replays)
    case.emulator.fail_at(1)

    assert run([case.floats(4)])[0].tolist() == [8]

    case.emulator.fail_at(0)
    assert replays == 1
    assert not run.replays
    assert case.report.fallbacks["cuLaunchKernel failed with CUresult 999"] == 1
    assert case.report.fallbacks[recordings.NOT_YET] == 1


def test_what_nobody_keeps_leaves_nothing(recorder: Recorder) -> None:
    replay = summed(recorder)
    fused = replay.fused
    assert fused is not None
    del replay
    gc.collect()

    assert (
        fused([recorder.floats(1), recorder.floats(2)]) is None
    )  # the table has gone before what it points to
    assert recorder.emulator.live() == (0, 0)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)), max_size=20))
def test_results_are_right_whatever_addresses_come_in_which_order(
    case: Case, order: list[tuple[int, int, int]]
) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.add(inputs[0], inputs[1]),)

    run = case.make(body)
    values = [case.floats(i, 10 * i) for i in range(4)]
    for _ in range(3):
        run([values[0], values[1]])
    [replay] = run.replays
    memories = [replay.memory() for _ in range(3)]

    for a, b, at in order:
        assert torch.equal(replay.serve_on([values[a], values[b]], memories[at])[0], values[a] + values[b])
    run.close()
