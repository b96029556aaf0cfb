"""Errors of the user's, of ours and of the driver while a call is recorded or replayed; and other threads."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import IN_A_CAPTURE, FallbackError
from pygraphd.client.backend.torch_private import profiling, tensors
from pygraphd.client.recording import budget, recordings
from pygraphd.client.replay.native import ffi
from pygraphd.client.replay.relocation_table import BLOCK
from tests.support.recording_case import Case, Operations, add, case
from tests.support.refusals import refusal_of

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["case"]  # fixtures

pytestmark = pytest.mark.torch


def test_an_error_of_the_users_while_it_is_recorded_is_the_users(case: Case) -> None:
    fail = False

    def body(operations: Operations, inputs: list[Any]) -> Any:
        if fail and operations is case.recorder.as_kernels:
            raise ValueError("mine")
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    run([case.floats(1)])
    fail = True
    with pytest.raises(ValueError, match="mine"):
        run([case.floats(1)])
    fail = False

    assert run([case.floats(1)])[0].tolist() == [2]
    case.expect(captured=1)


@contextlib.contextmanager
def no_views() -> Iterator[None]:
    """Have libtorch refuse each view that the helper makes, as it may where the host has no memory."""
    functions = [tensors._function(library, name) for library, name in tensors._LIBTORCH]
    refuse = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 6)(lambda *_: 1)
    made = ffi.helper.ops
    common = torch._C.TensorBase, tensors._handle_offset(), *profiling.profiler_flags()
    broken = [
        ctypes.cast(refuse, ctypes.c_void_p).value if n == 1 else each for n, each in enumerate(functions)
    ]
    made._module.configure(*common, *broken)
    try:
        yield
    finally:
        made._module.configure(*common, *functions)


@pytest.mark.parametrize("calls", [2, 5], ids=["first replay", "later replay"])
def test_an_error_after_a_launch_is_the_programs_and_nothing_is_written_twice(case: Case, calls: int) -> None:
    """The first replay of a recording, and each that is checked or profiled, is called in another way than later ones."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(*inputs)
        return (inputs[0][1:],)

    run, a, b = case.make(body), case.floats(0, 0), case.floats(1, 1)
    for _ in range(calls):
        run([a, b])

    with no_views(), pytest.raises(RuntimeError):
        run([a, b])

    assert a.tolist() == [calls + 1] * 2
    assert case.report.fallbacks == {recordings.NOT_YET: 1}


@pytest.mark.parametrize("value", [1.5, "text"])
def test_an_input_of_another_kind_is_named(case: Case, value: object) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for _ in range(3):
        run([case.floats(1), value])

    assert refusal_of(run) == f"input 1 is a {type(value).__name__}"
    assert case.recorder.captures == 0


def test_no_room_for_copies_is_a_reason(case: Case) -> None:
    run = case.make(add)
    case.recorder.free = 3 * BLOCK

    for _ in range(3):
        run([case.floats(1), case.floats(2)])

    assert refusal_of(run) == budget.NO_MEMORY_TO_VERIFY
    assert not run.refused_for_good
    assert case.recorder.captures == 0


def test_no_room_for_the_call_as_kernels_beside_a_trial_is_a_reason(case: Case) -> None:
    """Known only when it is recorded: what a call takes beside its inputs."""

    def body(operations: Operations, inputs: list[Any]) -> Any:
        return tuple(operations.add(inputs[0], inputs[0]) for _ in range(20))

    run = case.make(body)
    case.recorder.free = 8 * BLOCK

    for _ in range(3):
        assert run([case.floats(*[1] * 100)])[19].tolist() == [2] * 100

    assert refusal_of(run) == budget.NO_MEMORY_TO_VERIFY
    assert case.recorder.captures == 1


def test_within_a_capture_of_the_users_it_runs_as_kernels(case: Case) -> None:
    run = case.make(add)
    for _ in range(2):
        run([case.floats(1), case.floats(2)])
    case.recorder.capturing = True

    assert run([case.floats(3), case.floats(4)])[0].tolist() == [7]

    assert case.report.fallbacks[IN_A_CAPTURE] == 1
    case.recorder.capturing = False
    assert run([case.floats(3), case.floats(4)])[0].tolist() == [7]
    case.expect(captured=1)


def test_a_driver_call_that_fails_costs_the_recording_and_not_the_call(case: Case) -> None:
    run = case.make(add)
    for _ in range(2):
        run([case.floats(1), case.floats(2)])
    inputs = [case.floats(3), case.floats(4)]
    case.emulator.fail_at(1)

    assert run(inputs)[0].tolist() == [7]

    case.emulator.fail_at(0)
    assert len(run.replays) == 0
    assert "CUresult 999" in (refusal_of(run) or "")
    assert not run.refused_for_good
    assert run([case.floats(5), case.floats(6)])[0].tolist() == [11]


def test_every_driver_call_of_a_recording_may_fail(case: Case) -> None:
    def calls_until(fail_at: int) -> int:
        run = case.make(add)
        run([case.floats(1), case.floats(2)])
        case.emulator.fail_at(fail_at)
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
        assert run([case.floats(2), case.floats(2)])[0].tolist() == [4]
        calls = case.emulator.calls()
        case.emulator.fail_at(0)
        assert (refusal_of(run) is None) is (not 0 < fail_at <= calls)
        run.close()
        return calls

    before = case.emulator.live()
    for call in range(1, calls_until(0) + 1):
        calls_until(call)
        assert case.emulator.live() == before, f"call {call}"


def accumulate_and_draw(operations: Operations, inputs: list[Any]) -> Any:
    operations.accumulate(inputs[0], inputs[1])
    return operations.add(inputs[0], inputs[1]), operations.random()


def test_whichever_driver_call_of_a_replay_fails_what_is_drawn_and_changed_is_so_once(case: Case) -> None:
    failed = recorded = 0
    while True:
        run, total = case.make(accumulate_and_draw), case.floats(0, 0)
        for step in range(1, 6):
            began = case.recorder.generator.offset
            if step == 4:
                case.emulator.fail_at(failed + 1)
            added, drawn = run([total, case.floats(1, 2)])
            if step == 4:
                calls = case.emulator.calls()
                case.emulator.fail_at(0)
            assert total.tolist() == [step, 2 * step]
            assert added.tolist() == [step + 1, 2 * step + 2]
            assert drawn.tolist() == [began + 4] * 2
            assert case.recorder.generator.offset == began + 4
        if calls <= failed:
            break
        recorded += refusal_of(run) is None
        failed += 1
    # Each write and the launch. An executable whose copy cannot be written is replaced.
    assert failed >= 3
    assert recorded == 1, (failed, recorded)


def test_an_error_of_ours_costs_the_recording_and_not_the_call(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.client.recording.verification.copies_of", lambda *inputs: 1 // 0)
    run = case.make(add)

    for _ in range(3):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    assert refusal_of(run) == "recording failed: integer division or modulo by zero"
    assert not run.refused_for_good


def test_an_error_of_ours_in_a_replay_runs_as_kernels(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = case.make(add)
    for _ in range(2):
        run([case.floats(1), case.floats(2)])
    with monkeypatch.context() as patch:
        inputs = [case.floats(3), case.floats(4)]
        patch.setattr(type(case.allocator), "__call__", lambda *_: 1 // 0)
        patch.setattr(type(case.recorder.as_kernels), "add", lambda _self, a, b: a + b)
        assert run(inputs)[0].tolist() == [7]

    assert case.report.fallbacks["a replay failed: ZeroDivisionError"] == 1
    assert run([case.floats(3), case.floats(4)])[0].tolist() == [7]
    case.expect(captured=1)


def test_out_of_memory_is_a_reason(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    run = case.make(add)
    for _ in range(2):
        run([case.floats(1), case.floats(2)])

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(type(case.allocator), "__call__", full)
    monkeypatch.setattr(type(case.recorder.as_kernels), "add", lambda _self, a, b: a + b)

    inputs = [torch.tensor([3.0]), torch.tensor([4.0])]
    assert run(inputs)[0].tolist() == [7]

    assert case.report.fallbacks[recordings.NO_MEMORY] == 1
    monkeypatch.undo()
    for _ in range(16):
        assert run([case.floats(3), case.floats(4)])[0].tolist() == [7]
    assert case.report.fallbacks[recordings.NO_MEMORY] == 1 + 15
    (replay,) = run.replays
    assert replay.counts.replays == 2  # one is the trial of the recording
    case.expect(captured=1)


@pytest.mark.parametrize("by_helper", [False, True])
def test_a_replay_that_lacks_memory_is_tried_at_fewer_and_fewer_calls(
    case: Case, monkeypatch: pytest.MonkeyPatch, by_helper: bool
) -> None:
    tried, is_full, call = list[int](), False, 0
    original = torch_private.allocator

    def allocator(device: torch.device) -> Any:
        allocate = original(device)

        def limited(*arguments: Any) -> torch.Tensor:
            if is_full:
                tried.append(call)
                raise torch.OutOfMemoryError("full")
            found: torch.Tensor = allocate(*arguments)
            return found

        return limited

    monkeypatch.setattr(torch_private, "allocator", allocator)
    made = case.make(add)
    for _ in range(4):
        made([case.floats(1), case.floats(2)])
    run, is_full = made.run if by_helper else made, True
    while call < 200:
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
        call += 1
    assert tried == [0, 16, 48, 112]

    is_full = False
    for _ in range(60):
        assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]
    assert case.report.fallbacks[recordings.NO_MEMORY] == 240
    is_full, call = True, 300
    run([case.floats(1), case.floats(2)])
    assert tried == [0, 16, 48, 112, 300]


def test_another_thread_runs_kernels_while_one_records(case: Case) -> None:
    run = case.make(add)
    run([case.floats(1), case.floats(2)])
    seen: list[Any] = []

    def other() -> None:
        # The recorder's own operations are what this thread would record with: it must run KERNELS.
        case.recorder.operations = case.recorder.as_kernels
        seen.append(run([case.floats(5), case.floats(6)])[0].tolist())

    def between() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    case.recorder.between = between
    assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    assert seen == [[11]]
    assert case.report.fallbacks[recordings.BEING_RECORDED] == 1
    case.expect(captured=1)


def test_many_threads_take_turns(case: Case) -> None:
    run = case.make(add)
    for _ in range(2):
        run([case.floats(0), case.floats(0)])
    wrong: list[Any] = []

    def work(number: int) -> None:
        got = [run([case.floats(number), case.floats(i)])[0].item() for i in range(200)]
        wrong.extend(set(got) ^ {float(number + i) for i in range(200)})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    case.expect(captured=1)


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_call_is_recorded(case: Case, *, enabled: bool) -> None:
    seen: list[bool] = []

    def body(operations: Operations, inputs: list[Any]) -> Any:
        seen.append(gc.isenabled())
        return (operations.add(inputs[0], inputs[1]),)

    run = case.make(body)
    (gc.enable if enabled else gc.disable)()
    try:
        for _ in range(3):
            run([case.floats(1), case.floats(2)])
        after = gc.isenabled()
    finally:
        gc.enable()

    assert seen == [enabled, False, enabled]  # as KERNELS, recorded, as KERNELS to compare; then replayed
    assert after is enabled


def test_the_error_of_a_failed_replay_is_freed_without_the_garbage_collector(case: Case) -> None:
    """Such calls may come at every step, in a program that has switched the collector off."""

    class Error(FallbackError):
        pass

    run = case.make(lambda operations, inputs: (operations.add(inputs[0], inputs[0]),))
    for number in range(4):
        run([case.floats(number, 1.0)])
    error = Error("of a test")
    seen = weakref.ref(error)
    gc.disable()
    try:
        run.replay_failed([case.floats(5.0, 1.0)], error)
        del error
        assert seen() is None
    finally:
        gc.enable()
