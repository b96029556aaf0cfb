"""Recordings that are bound to new addresses at every call: right results, nothing written elsewhere, nothing left behind."""

from __future__ import annotations

import ctypes
import gc
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.driver import DriverError
from pygraphd.client.backend.errors import UnfitError
from pygraphd.client.recording import builder
from pygraphd.client.recording.builder import NOTHING, Built, Capture, build, input_groups
from pygraphd.client.replay.graph_exec import InputGroup
from pygraphd.client.replay.native.ffi import InPython, helper
from pygraphd.client.replay.node_params import OpaqueError
from pygraphd.client.replay.relocation_table import BLOCK, Share, Span
from tests.support.recorder import Recorder

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.emulator import Allocator, Emulator


pytestmark = pytest.mark.torch


def test_inputs_and_outputs_lie_anywhere_and_outputs_are_kept(recorder: Recorder) -> None:
    a, b, out = recorder.floats(1, 2), recorder.floats(10, 20), recorder.arena.allocate(2)
    recorder.graph.add(a, b, out)
    replay = recorder.built([a, b], [out]).replay

    kept = [replay([recorder.floats(i, i), recorder.floats(5, 6)])[0] for i in range(20)]

    assert [each.tolist() for each in kept] == [[i + 5.0, i + 6.0] for i in range(20)]
    assert len({each.data_ptr() for each in kept}) == 20
    assert replay.counts.replays == 20
    assert recorder.arena.untouched()
    replay.close()


def test_what_lies_where_it_lay_is_not_written_again(recorder: Recorder) -> None:
    a, b, out = recorder.floats(1, 2), recorder.floats(10, 20), recorder.arena.allocate(2)
    recorder.graph.add(a, b, out)
    recorder.graph.scale(out, out, 2.0)
    replay = recorder.built([a, b], [out]).replay
    memory = replay.memory()

    for _ in range(3):
        replay.run([a, b], memory)
    assert (replay.counts.replays, replay.counts.relocated, replay.counts.written) == (3, 1, 2)

    other = recorder.floats(100, 200)
    assert replay.run([a, other], memory)[0].tolist() == [202, 404]
    assert (replay.counts.relocated, replay.counts.written) == (2, 3)
    replay.close()


def test_inputs_that_move_together_are_looked_at_together(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns overlap as one group: what it takes to bind them must not grow with their square."""
    looks: list[int] = []
    base = InputGroup.base

    def noting(group: InputGroup, places: Sequence[int]) -> int:
        looks.append(len(places))
        return base(group, places)

    rows, out = recorder.allocator.tensor(torch.ones(2, 64)), recorder.arena.allocate(2)
    columns = rows.unbind(1)
    recorder.graph.scale(rows[0, :2], out, 2.0)
    replay = recorder.built([*columns], [out]).replay
    memory = replay.memory()
    monkeypatch.setattr(InputGroup, "base", noting)

    replay.run([*recorder.allocator.tensor(rows).unbind(1)], memory)

    assert (max(looks), len(looks)) == (
        64,
        4,
    )  # once for the nodes and once for the words, and so for the output
    replay.close()


def test_a_replay_that_was_closed_fits_no_call(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    replay.close()

    inputs = [a]
    with pytest.raises(UnfitError, match="gone for others"):
        replay(inputs)
    assert inputs == [a]


def test_the_list_of_inputs_is_emptied_and_a_list_stays_a_list(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    capture = Capture(
        recorder.graph.handle, [out, None, 7], tuple(recorder.arena.allocations), as_tuple=False
    )
    replay = build(recorder.emulator.driver, capture, [a, 2], {}, recorder.notes.append).replay
    inputs = [recorder.floats(1, 1), 2]

    outputs = replay(inputs)

    assert inputs == []
    assert isinstance(outputs, list)
    assert outputs[0].tolist() == [3, 3]
    assert outputs[1:] == [None, 7]
    replay.close()


@pytest.mark.parametrize(("size", "fits"), [(8, True), (9, True), (BLOCK, True), (BLOCK + 1, False)])
def test_only_what_fits_into_an_outputs_blocks_may_have_lain_there(
    recorder: Recorder, size: int, fits: bool
) -> None:
    """Else a kernel that wrote to it would write past the output's end."""
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    before = Span(out.data_ptr(), out.data_ptr() + size)
    capture = Capture(recorder.graph.handle, [out], (before, *recorder.arena.allocations))

    if fits:
        replay = build(recorder.emulator.driver, capture, [a], {}, recorder.notes.append).replay
        assert replay([recorder.floats(1, 2)])[0].tolist() == [3, 6]
        replay.close()
    else:
        with pytest.raises(OpaqueError, match="overlap"):
            build(recorder.emulator.driver, capture, [a], {}, recorder.notes.append)


def test_each_input_of_a_group_keeps_its_alignment(recorder: Recorder) -> None:
    storage = recorder.allocator.tensor(torch.arange(256.0))
    worse, better = storage[63:67], storage[64:68]
    out = recorder.arena.allocate(4)
    recorder.graph.add(worse, better, out)
    replay = recorder.built([worse, better], [out]).replay

    with pytest.raises(UnfitError, match="not aligned as it was"):
        replay([storage[64:68], storage[65:69]])
    assert replay([storage[127:131], storage[128:132]])[0].tolist() == [255, 257, 259, 261]
    replay.close()


def test_a_replay_that_nobody_keeps_leaves_nothing(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    before = recorder.emulator.live()
    built = recorder.built([a], [out])
    assert recorder.emulator.live() != before

    del built
    gc.collect()

    graphs, executables = recorder.emulator.live()
    assert (graphs, executables) == (before[0] - 1, before[1])


def test_on_another_stream_nothing_is_written_at_a_fixed_address(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, out, buffer = recorder.floats(1, 2), recorder.arena.allocate(2), recorder.floats(0, 0)
    recorder.graph.add(a, buffer, out)
    stream = [7]
    monkeypatch.setattr(
        "pygraphd.client.backend.torch_private.current_stream", lambda _device: lambda: stream[0]
    )
    replay = recorder.built([a, buffer], [out], {1: buffer}).replay
    assert replay([a, recorder.floats(10, 20)])[0].tolist() == [11, 22]

    stream[0] = 8
    with pytest.raises(UnfitError, match="another stream"):
        replay([a, recorder.floats(0, 0)])

    assert buffer.tolist() == [10, 20]
    replay.close()


def test_outputs_that_share_memory_share_it_in_every_call(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2, 3, 4), recorder.arena.allocate(4)
    recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a], [out, out.view(2, 2).t()]).replay

    flat, turned = replay([recorder.floats(5, 6, 7, 8)])

    assert turned.tolist() == [[10, 14], [12, 16]]
    flat[0] = -1
    assert turned[0, 0] == -1
    replay.close()


def test_scratch_comes_in_pieces(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in as many as fit into the gaps that there are, and the largest alone."""
    monkeypatch.setattr(builder, "LEAST_SCRATCH", 0)
    monkeypatch.setattr(builder, "SCRATCH", Share(1000, 3 * BLOCK))
    arena, graph, a = recorder.arena, recorder.graph, recorder.floats(1, 2)
    out = arena.allocate(2)
    temporaries = [arena.allocate(length) for length in (2, 200, 2, 600, 2, 2)]  # in blocks: 1, 2, 1, 5, 1, 1
    for source, to in itertools.pairwise([a, *temporaries, out]):
        graph.scale(source[:2], to[:2], 2.0)
    replay = recorder.built([a], [out]).replay

    made = [replay([recorder.floats(each, 1)])[0].tolist() for each in (3, 4, 5)]

    assert [memory.bytes // BLOCK for memory in replay.memories[1:]] == [3, 3, 5]
    assert made == [[each * 128, 128] for each in (3, 4, 5)]
    replay.close()


def test_scratch_is_asked_for_where_no_small_tensor_is(recorder: Recorder) -> None:
    a, first, out = recorder.floats(1, 2), recorder.arena.allocate(2), recorder.arena.allocate(2)
    recorder.graph.scale(a, first, 2.0)
    recorder.graph.scale(first, out, 3.0)
    replay = recorder.built([a], [out]).replay

    assert [memory.bytes for memory in replay.memories] == [8, (1 << 20) + BLOCK]
    assert replay([recorder.floats(3, 4)])[0].tolist() == [18, 24]
    replay.close()


def test_what_no_node_has_an_address_in_takes_no_memory(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library's workspace, which is kept to the end of a capture whether a kernel uses it or not."""
    monkeypatch.setattr(builder, "LEAST_SCRATCH", 0)
    arena, graph = recorder.arena, recorder.graph
    a, out, first, _, second = (recorder.floats(1, 2), *map(arena.allocate, (2, 2, 4096, 2)))
    graph.scale(a, first, 2.0)
    graph.scale(first, second, 3.0)
    graph.scale(second, out, 5.0)
    replay = recorder.built([a], [out]).replay

    assert [memory.bytes for memory in replay.memories] == [8, 2 * BLOCK]
    assert replay([recorder.floats(3, 4)])[0].tolist() == [90, 120]
    replay.close()


def test_what_is_large_is_allocated_first(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "LEAST_SCRATCH", 0)
    a, arena = recorder.floats(*range(300)), recorder.arena
    lengths = [2, 300, 100, 300]
    outputs = [arena.allocate(length) for length in lengths]
    temporary = arena.allocate(200)
    for out in outputs:
        recorder.graph.scale(a[: out.numel()], out, 2.0)
    recorder.graph.scale(a[:200], temporary, 2.0)
    asked: list[int] = []

    def allocate(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        asked.append(size[0] * dtype.itemsize)
        return recorder.allocator(size, stride, dtype)

    monkeypatch.setattr(torch_private, "allocator", lambda _device: allocate)
    replay = recorder.built([a], outputs).replay

    made = replay([recorder.floats(*range(1, 301))])

    assert asked == [1200, 1200, 1024, 400, 8]
    assert [each.tolist() for each in made] == [[2.0 * x for x in range(1, n + 1)] for n in lengths]
    assert made[1].data_ptr() != made[3].data_ptr()
    replay.close()


def test_without_temporaries_that_nodes_know_of_there_is_no_scratch(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.arena.allocate(4096)
    recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a], [out]).replay

    assert [memory.bytes for memory in replay.memories] == [8]
    assert replay([recorder.floats(3, 4)])[0].tolist() == [6, 8]
    replay.close()


def test_a_replay_that_cannot_be_made_leaves_no_executable(
    recorder: Recorder, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no replay")

    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 2.0)
    monkeypatch.setattr(builder, "Replay", fail)

    with pytest.raises(RuntimeError, match="no replay"):
        recorder.built([a], [out])

    assert emulator.live() == (0, 0)


def test_inputs_that_are_changed_in_place_are_changed_where_they_lie(recorder: Recorder) -> None:
    a, b = recorder.floats(1, 2), recorder.floats(10, 20)
    recorder.graph.accumulate(a, b)
    replay = recorder.built([a, b], [a]).replay
    cache = recorder.floats(0, 0)

    for _ in range(3):
        [returned] = replay([cache, recorder.floats(1, 2)])
        assert returned is cache

    assert cache.tolist() == [3, 6]
    assert a.tolist() == [1, 2]
    replay.close()


def test_a_view_of_an_input_is_a_view_of_the_callers(recorder: Recorder) -> None:
    a = recorder.allocator.tensor(torch.arange(6.0))
    out = recorder.arena.allocate(6)
    recorder.graph.scale(a, out, 1.0)
    view = a.view(2, 3)[:, 1:]
    whole = a.view(torch.int32)
    replay = recorder.built([a], [out, view, whole]).replay
    mine = recorder.allocator.tensor(torch.arange(6.0) * 2)

    _, seen, numbers = replay([mine])

    assert seen.tolist() == [[2, 4], [8, 10]]
    assert seen.untyped_storage().data_ptr() == mine.untyped_storage().data_ptr()
    assert not seen._is_view()
    assert torch.equal(numbers, mine.view(torch.int32))
    replay.close()


def test_a_constant_of_the_module_and_an_empty_tensor_come_out_as_they_are(recorder: Recorder) -> None:
    a, out, constant = recorder.floats(1, 2), recorder.arena.allocate(2), recorder.floats(7)
    recorder.graph.add(a, a, out)
    replay = recorder.built([a], [out, constant, torch.empty(0, 3)]).replay

    first, second = replay([recorder.floats(1, 1)]), replay([recorder.floats(1, 1)])

    assert first[1] is second[1] is constant
    assert first[2].shape == (0, 3)
    assert first[2] is not second[2]
    replay.close()


def test_inputs_that_overlap_move_as_one_and_others_of_the_same_storage_do_not(recorder: Recorder) -> None:
    base = recorder.allocator.tensor(torch.arange(10.0))
    a, b, apart = base[0:3], base[1:4], base[6:9]
    assert [len(group.members) for group, _ in input_groups([a, b, apart], {})] == [2, 1]
    out, far = recorder.arena.allocate(3), recorder.arena.allocate(3)
    recorder.graph.add(a, b, out)
    recorder.graph.scale(apart, far, 2.0)
    replay = recorder.built([a, b, apart], [out, far]).replay

    moved = recorder.allocator.tensor(torch.arange(100.0, 300.0))
    outputs = replay([moved[64:67], moved[65:68], torch.arange(3.0)])

    assert [each.tolist() for each in outputs] == [[329, 331, 333], [0, 2, 4]]
    with pytest.raises(UnfitError, match="lie otherwise"):
        replay([moved[64:67], moved[66:69], apart])
    assert [each.tolist() for each in replay([a, b, apart])] == [[1, 3, 5], [12, 14, 16]]
    replay.close()


def test_inputs_that_start_to_share_memory_are_bound_as_they_lie(recorder: Recorder) -> None:
    a, b, out = recorder.floats(1, 2), recorder.floats(10, 20), recorder.arena.allocate(2)
    recorder.graph.add(a, b, out)
    replay = recorder.built([a, b], [out]).replay

    same = recorder.floats(3, 4)

    assert replay([same, same])[0].tolist() == [6, 8]
    replay.close()


def test_a_kernel_may_find_its_input_from_the_beginning_of_the_storage(recorder: Recorder) -> None:
    base = recorder.allocator.tensor(torch.arange(6.0))
    view = base[4:]
    out = recorder.arena.allocate(2)
    recorder.graph.scale(base[2:4], out, 1.0)  # the kernel was handed an address before its input
    replay = recorder.built([view], [out]).replay

    moved = recorder.allocator.tensor(torch.arange(10.0, 16.0))

    assert replay([moved[4:]])[0].tolist() == [12, 13]
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

    (result,) = replay([recorder.floats(10, 20, 30, 40)])

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
    with pytest.raises(UnfitError, match="not aligned as it was"):
        replay(inputs)

    assert inputs == [worse]
    assert replay([a])[0].tolist() == [0, 0]
    replay.close()


def test_an_input_that_no_node_shows_is_named_and_can_be_staged(recorder: Recorder) -> None:
    a, hidden = recorder.floats(1, 2), recorder.floats(3, 4)
    table = (ctypes.c_void_p * 1)(hidden.data_ptr())
    out, seen = recorder.arena.allocate(2), recorder.arena.allocate(2)
    recorder.graph.through_table(table, out)
    recorder.graph.scale(a, seen, 1.0)
    built = recorder.built([a, hidden], [out, seen])
    assert built.unseen == {1}
    built.replay.close()

    again = Recorder(recorder.emulator, recorder.allocator)
    buffer = recorder.floats(0, 0)
    table[0] = buffer.data_ptr()
    out, seen = again.arena.allocate(2), again.arena.allocate(2)
    again.graph.through_table(table, out)
    again.graph.scale(a, seen, 1.0)
    built = again.built([a, hidden], [out, seen], {1: buffer})

    assert built.unseen == frozenset()
    outputs = built.replay([recorder.floats(5, 6), recorder.floats(7, 8)])
    assert [each.tolist() for each in outputs] == [[7, 8], [5, 6]]
    built.replay.close()


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
    replay = build(recorder.emulator.driver, capture, [a], {}, recorder.notes.append).replay
    state[:2] = recorder.floats(100, 200)

    assert replay([recorder.floats(1, 1)])[0].tolist() == [101, 201]
    replay.close()


def test_an_output_in_memory_that_must_stay_is_refused(recorder: Recorder) -> None:
    out = recorder.arena.allocate(2)
    held = tuple(recorder.arena.allocations)

    with pytest.raises(OpaqueError, match="must stay in place"):
        build(
            recorder.emulator.driver,
            Capture(recorder.graph.handle, [out], held, held),
            [recorder.floats(1)],
            {},
            recorder.notes.append,
        )


def test_memory_that_must_stay_but_was_something_else_before_is_refused(recorder: Recorder) -> None:
    big = recorder.arena.allocate(200)
    recorder.arena.free(big)
    recorder.arena.allocate(2)
    held = (recorder.arena.allocations[-1],)

    with pytest.raises(OpaqueError, match="used for something else"):
        build(
            recorder.emulator.driver,
            Capture(recorder.graph.handle, [recorder.floats(1)], tuple(recorder.arena.allocations), held),
            [recorder.floats(1)],
            {},
            recorder.notes.append,
        )


def test_two_devices_are_refused(recorder: Recorder) -> None:
    with pytest.raises(OpaqueError, match="works on 2 devices"):
        recorder.built([recorder.floats(1)], [torch.empty(1, device="meta")])


def test_every_driver_call_may_fail_and_nothing_is_left_behind(recorder: Recorder) -> None:
    """Also while it is recorded; and inputs that a call could not take are there for a plain launch."""
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
            assert replay(inputs)[0].tolist() == [7, 14]
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
    assert needed == 16
    for call in range(1, needed + 1):
        attempt(call)
        assert emulator.live() == before, f"call {call}"
    emulator.driver.destroy_graph(recorder.graph.handle)


# --- any program ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One kernel: which values it reads (by number, modulo how many there are), how long its result is, what dies after it."""

    kind: str
    reads: tuple[int, int, int]
    length: int
    dies: int | None


STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from(["add", "scale", "gather", "copy", "in place"]),
        st.tuples(*[st.integers(0, 30)] * 3),
        st.sampled_from([4, 8, 100, 130, 300]),
        st.one_of(st.none(), st.integers(0, 30)),
    ),
    min_size=1,
    max_size=12,
)
SIZE = 400


def plain(steps: Sequence[Step], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the value of every step, each in memory of its own."""
    values = list(inputs)
    for step in steps:
        x, y, z = (values[read % len(values)] for read in step.reads)
        if step.kind == "in place":
            n = min(len(x), len(y), step.length)
            if x.data_ptr() != y.data_ptr():
                x[:n] += y[:n]
            continue
        values.append(result(step, x, y, z))
    return values


def result(step: Step, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    if step.kind == "gather":
        return torch.cat([each[:4] for each in (x, y, z)])
    n = min(len(x), len(y), step.length)
    return {"add": x[:n] + y[:n], "scale": x[:n] * 0.5, "copy": x[:n].clone()}[step.kind]


def record(
    recorder: Recorder, steps: Sequence[Step], inputs: Sequence[torch.Tensor]
) -> tuple[Built, list[int]]:
    """Record a program whose temporaries die early; return it and the numbers of the values that it returns."""
    arena, graph, values = recorder.arena, recorder.graph, list(inputs)
    alive = set[int]()
    for step in steps:
        readable = [number for number in range(len(values)) if number < len(inputs) or number in alive]
        x, y, z = (values[read % len(values)] for read in step.reads)
        assert all(read % len(values) in readable for read in step.reads)
        if step.kind == "in place":
            if x.data_ptr() != y.data_ptr():
                graph.accumulate(x[: min(len(x), len(y), step.length)], y)
            continue
        n = 12 if step.kind == "gather" else min(len(x), len(y), step.length)
        out = arena.allocate(n)
        if step.kind == "add":
            graph.add(x, y, out)
        elif step.kind == "scale":
            graph.scale(x, out, 0.5)
        elif step.kind == "copy":
            graph.copy(out, x)
        else:
            graph.gather([each[:4] for each in (x, y, z)], out, magic=x.data_ptr() ^ 0xFFFF)
        values.append(out)
        alive.add(len(values) - 1)
        if step.dies is not None and alive and (dying := sorted(alive)[step.dies % len(alive)]) in alive:
            if step.dies % 3:  # else it is kept to the end, as a library's workspace is
                arena.free(values[dying])
            alive.remove(dying)
    returned = sorted(alive)
    outputs = [arena.allocate(len(values[number]), is_new=True) for number in returned]
    for output, number in zip(outputs, returned, strict=True):
        graph.copy(output, values[number])
    return recorder.built(inputs, outputs), returned


def readable(steps: list[Step], inputs: int) -> list[Step]:
    """Return the steps with each read turned to a value that is still alive then."""
    kept, alive, count = [], list(range(inputs)), inputs
    for step in steps:
        reads = tuple(alive[read % len(alive)] for read in step.reads)
        kept.append(Step(step.kind, (reads[0], reads[1], reads[2]), step.length, step.dies))
        if step.kind == "in place":
            continue
        alive.append(count)
        count += 1
        temporaries = [number for number in alive if number >= inputs]
        if step.dies is not None and temporaries:
            alive.remove(temporaries[step.dies % len(temporaries)])
    return kept


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.parametrize("by", ["the helper", "Python"])
@given(
    steps=STEPS,
    moves=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 1)), min_size=2, max_size=5
    ),
)
def test_any_program_gives_what_it_gives_when_launched(
    emulator: Emulator,
    allocator: Allocator,
    steps: list[Step],
    moves: list[tuple[int, int, int]],
    by: str,
    compiled_helper: Path,
) -> None:
    """Temporaries share memory, inputs stay or move, all old memory is poisoned."""
    helper.forget()
    if by == "the helper":
        assert helper.prepare(compiled_helper) is None
    steps = readable(steps, 3)
    inputs = [allocator.tensor(torch.rand(SIZE)) for _ in range(3)]
    recorder = Recorder(emulator, allocator, emulator.arena(256))
    try:
        built, returned = record(recorder, steps, inputs)
    except OpaqueError as error:
        if str(error) != NOTHING:
            raise
        return
    for move in moves:
        inputs = [
            allocator.tensor(torch.rand(SIZE)) if moved else each
            for each, moved in zip(inputs, move, strict=True)
        ]
        mine = [each.clone() for each in inputs]
        expected = plain(steps, mine)

        outputs = built.replay(list(inputs))

        for output, number in zip(outputs, returned, strict=True):
            assert torch.equal(output, expected[number])
        assert all(map(torch.equal, inputs, mine))
        assert recorder.arena.untouched()
    assert isinstance(helper.bulk(recorder.notes.append), InPython) is (by == "Python")
    assert recorder.notes == []
    helper.forget()
    built.replay.close()
    allocator.check()


def test_a_capture_of_nothing_is_refused_and_nothing_is_left(
    emulator: Emulator, allocator: Allocator
) -> None:
    """As of a partition that only hands on what it is given; of an empty graph the driver takes no array of nodes."""
    recorder = Recorder(emulator, allocator)
    x = recorder.floats(1, 2)

    assert emulator.driver.nodes(recorder.graph.handle) == []
    with pytest.raises(OpaqueError, match=NOTHING):
        recorder.built([x], [x])
    assert emulator.live() == (0, 0)
