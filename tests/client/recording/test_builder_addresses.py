"""Views, overlaps, alignment and memory that must stay: what a relocatable graph makes of them."""

from __future__ import annotations

import pytest
import torch

from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import FallbackError, NotRelocatableError
from pygraphd.client.recording.alias_sets import input_groups
from pygraphd.client.recording.builder import build
from pygraphd.client.recording.capture import Capture
from pygraphd.client.recording.false_pointers import CapturedCall
from pygraphd.client.replay.relocation_table import BLOCK, Span
from tests.support.recorder import Recorder

pytestmark = pytest.mark.torch


def test_a_view_of_an_input_is_a_view_of_the_callers(recorder: Recorder) -> None:
    a = recorder.allocator.tensor(torch.arange(6.0))
    out = recorder.arena.allocate(6)
    recorder.graph.scale(a, out, 1.0)
    view = a.view(2, 3)[:, 1:]
    whole = a.view(torch.int32)
    replay = recorder.built([a], [out, view, whole]).replay
    mine = recorder.allocator.tensor(torch.arange(6.0) * 2)

    _, seen, numbers = replay.serve([mine])[0]

    assert seen.tolist() == [[2, 4], [8, 10]]
    assert seen.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
    assert not seen._is_view()
    assert torch.equal(numbers, mine.view(torch.int32))
    replay.close()


def test_a_constant_of_the_module_and_an_empty_tensor_come_out_as_they_are(recorder: Recorder) -> None:
    a, out, constant = recorder.floats(1, 2), recorder.arena.allocate(2), recorder.floats(7)
    recorder.graph.add(a, a, out)
    replay = recorder.built([a], [out, constant, torch.empty(0, 3)]).replay

    first, second = replay.serve([recorder.floats(1, 1)])[0], replay.serve([recorder.floats(1, 1)])[0]

    assert first[1] is second[1] is constant
    assert first[2].shape == (0, 3)
    assert first[2] is not second[2]
    replay.close()


def test_inputs_that_overlap_move_as_one_and_others_of_the_same_storage_do_not(recorder: Recorder) -> None:
    base = recorder.allocator.tensor(torch.arange(10.0))
    a, b, apart = base[0:3], base[1:4], base[6:9]
    assert [len(group.members) for group, _ in input_groups([a, b, apart])] == [2, 1]
    out, far = recorder.arena.allocate(3), recorder.arena.allocate(3)
    recorder.graph.add(a, b, out)
    recorder.graph.scale(apart, far, 2.0)
    replay = recorder.built([a, b, apart], [out, far]).replay

    moved = recorder.allocator.tensor(torch.arange(100.0, 300.0))
    outputs = replay.serve([moved[64:67], moved[65:68], torch.arange(3.0)])[0]

    assert [each.tolist() for each in outputs] == [[329, 331, 333], [0, 2, 4]]
    with pytest.raises(FallbackError, match="lie otherwise"):
        replay.serve([moved[64:67], moved[66:69], apart])
    assert [each.tolist() for each in replay.serve([a, b, apart])[0]] == [[1, 3, 5], [12, 14, 16]]
    replay.close()


def test_inputs_that_start_to_share_memory_are_bound_as_they_lie(recorder: Recorder) -> None:
    a, b, out = recorder.floats(1, 2), recorder.floats(10, 20), recorder.arena.allocate(2)
    recorder.graph.add(a, b, out)
    replay = recorder.built([a, b], [out]).replay

    same = recorder.floats(3, 4)

    assert replay.serve([same, same])[0][0].tolist() == [6, 8]
    replay.close()


def test_a_kernel_may_find_its_input_from_the_beginning_of_the_storage(recorder: Recorder) -> None:
    base = recorder.allocator.tensor(torch.arange(6.0))
    view = base[4:]
    out = recorder.arena.allocate(2)
    recorder.graph.scale(base[2:4], out, 1.0)  # the kernel was handed an address before its input
    replay = recorder.built([view], [out]).replay

    moved = recorder.allocator.tensor(torch.arange(10.0, 16.0))

    assert replay.serve([moved[4:]])[0][0].tolist() == [12, 13]
    replay.close()


def test_a_constant_right_behind_the_memory_of_an_input_stays_where_it_is(recorder: Recorder) -> None:
    """Inputs are recorded in blocks of their own, and one of the program's own tensors may lie in the next one."""
    block = 512 // 4
    memory = recorder.allocator.tensor(torch.arange(2.0 * block)).numpy()
    mine, constant = (torch.from_numpy(memory[half * block : (half + 1) * block]) for half in range(2))
    assert mine.untyped_storage().data_ptr() + mine.untyped_storage().nbytes() == constant.data_ptr()
    a, out = mine[2:6], recorder.arena.allocate(4)
    recorder.graph.add(a, constant[:4], out)
    replay = recorder.built([a], [out]).replay

    (result,) = replay.serve([recorder.floats(10, 20, 30, 40)])[0]

    assert result.tolist() == [10 + block, 20 + block + 1, 30 + block + 2, 40 + block + 3]
    replay.close()


def test_an_input_that_is_aligned_worse_does_not_fit_and_changes_nothing(recorder: Recorder) -> None:
    storage = recorder.allocator.tensor(torch.zeros(256))
    a = storage[64:66]
    out = recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 1.0)
    replay = recorder.built([a], [out]).replay
    worse = storage[67:69]

    inputs = [worse]
    with pytest.raises(FallbackError, match="not aligned as it was"):
        replay.serve(inputs)

    assert inputs == [worse]
    assert replay.serve([a])[0][0].tolist() == [0, 0]
    replay.close()


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
    replay = build(recorder.emulator.driver, CapturedCall(capture, [a]), recorder.notes.append).replay
    state[:2] = recorder.floats(100, 200)

    assert replay.serve([recorder.floats(1, 1)])[0][0].tolist() == [101, 201]
    replay.close()


def test_an_output_in_memory_that_must_stay_is_refused(recorder: Recorder) -> None:
    out = recorder.arena.allocate(2)
    held = tuple(recorder.arena.allocations)

    with pytest.raises(NotRelocatableError, match="must stay in place"):
        build(
            recorder.emulator.driver,
            CapturedCall(Capture(recorder.graph.handle, [out], held, held), [recorder.floats(1)]),
            recorder.notes.append,
        )


def test_memory_that_must_stay_but_was_something_else_before_is_refused(recorder: Recorder) -> None:
    big = recorder.arena.allocate(200)
    recorder.arena.free(big)
    recorder.arena.allocate(2)
    held = (recorder.arena.allocations[-1],)

    with pytest.raises(NotRelocatableError, match="used for something else"):
        build(
            recorder.emulator.driver,
            CapturedCall(
                Capture(recorder.graph.handle, [recorder.floats(1)], tuple(recorder.arena.allocations), held),
                [recorder.floats(1)],
            ),
            recorder.notes.append,
        )


def test_two_devices_are_refused(recorder: Recorder) -> None:
    with pytest.raises(NotRelocatableError, match="works on 2 devices"):
        recorder.built([recorder.floats(1)], [torch.empty(1, device="meta")])


def test_every_driver_call_may_fail_and_nothing_is_left_behind(recorder: Recorder) -> None:
    """Also while it is recorded; and inputs that a call could not take are there for a call as KERNELS."""
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
            assert replay.serve(inputs)[0][0].tolist() == [7, 14]
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
    assert needed == 18
    for call in range(1, needed + 1):
        attempt(call)
        assert emulator.live() == before, f"call {call}"
    emulator.driver.destroy_graph(recorder.graph.handle)
