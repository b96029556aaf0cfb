"""A relocatable graph of a captured call: inputs and outputs lie anywhere, and what is allocated for it."""

from __future__ import annotations

import gc
import itertools
from typing import TYPE_CHECKING

import pytest
import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.backend.errors import FallbackError, NotRelocatableError
from pygraphd.client.recording import builder
from pygraphd.client.recording.builder import LAUNCHES_NOTHING, build
from pygraphd.client.recording.capture import Capture
from pygraphd.client.recording.false_pointers import CapturedCall
from pygraphd.client.replay.relocation_table import BLOCK, Share, Span
from tests.support.recorder import Recorder

if TYPE_CHECKING:
    from tests.support.emulator import Allocator, Emulator

pytestmark = pytest.mark.torch


def test_inputs_and_outputs_lie_anywhere_and_outputs_are_kept(recorder: Recorder) -> None:
    a, b, out = recorder.floats(1, 2), recorder.floats(10, 20), recorder.arena.allocate(2)
    recorder.graph.add(a, b, out)
    replay = recorder.built([a, b], [out]).replay

    kept = [replay.serve([recorder.floats(i, i), recorder.floats(5, 6)])[0][0] for i in range(20)]

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
        replay.serve_on([a, b], memory)
    assert (replay.counts.replays, replay.counts.relocated, replay.counts.written) == (3, 1, 2)

    other = recorder.floats(100, 200)
    assert replay.serve_on([a, other], memory)[0].tolist() == [202, 404]
    assert (replay.counts.relocated, replay.counts.written) == (2, 3)
    replay.close()


def test_a_replay_that_was_closed_fits_no_call(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    replay = recorder.built([a], [out]).replay
    replay.close()

    inputs = [a]
    with pytest.raises(FallbackError, match="was evicted meanwhile"):
        replay.serve(inputs)
    assert inputs == [a]


def test_the_list_of_inputs_is_emptied_and_a_list_stays_a_list(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    capture = Capture(
        recorder.graph.handle, [out, None, 7], tuple(recorder.arena.allocations), as_tuple=False
    )
    replay = build(recorder.emulator.driver, CapturedCall(capture, [a, 2]), recorder.notes.append).replay
    inputs = [recorder.floats(1, 1), 2]

    outputs = replay.serve(inputs)[0]

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
        replay = build(recorder.emulator.driver, CapturedCall(capture, [a]), recorder.notes.append).replay
        assert replay.serve([recorder.floats(1, 2)])[0][0].tolist() == [3, 6]
        replay.close()
    else:
        with pytest.raises(NotRelocatableError, match="overlap"):
            build(recorder.emulator.driver, CapturedCall(capture, [a]), recorder.notes.append)


def test_each_input_of_a_group_keeps_its_alignment(recorder: Recorder) -> None:
    storage = recorder.allocator.tensor(torch.arange(256.0))
    worse, better = storage[63:67], storage[64:68]
    out = recorder.arena.allocate(4)
    recorder.graph.add(worse, better, out)
    replay = recorder.built([worse, better], [out]).replay

    with pytest.raises(FallbackError, match="not aligned as it was"):
        replay.serve([storage[64:68], storage[65:69]])
    assert replay.serve([storage[127:131], storage[128:132]])[0][0].tolist() == [255, 257, 259, 261]
    replay.close()


def test_a_replay_that_nobody_keeps_leaves_nothing(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.graph.scale(a, out, 3.0)
    recorder.graph.accumulate(out, a)
    before = recorder.emulator.live()
    built = recorder.built([a], [out])
    assert recorder.emulator.live() != before

    del built
    gc.collect()

    graphs, executables = recorder.emulator.live()
    assert (graphs, executables) == (before[0] - 1, before[1])


def test_outputs_that_share_memory_share_it_in_every_call(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2, 3, 4), recorder.arena.allocate(4)
    recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a], [out, out.view(2, 2).t()]).replay

    flat, turned = replay.serve([recorder.floats(5, 6, 7, 8)])[0]

    assert turned.tolist() == [[10, 14], [12, 16]]
    flat[0] = -1
    assert turned[0, 0] == -1
    replay.close()


def test_scratch_comes_in_pieces(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other in as many as fit into the gaps that there are, and the largest alone."""
    monkeypatch.setattr(builder, "MIN_SCRATCH_BYTES", 0)
    monkeypatch.setattr(builder, "SCRATCH", Share(1000, 3 * BLOCK))
    arena, graph, a = recorder.arena, recorder.graph, recorder.floats(1, 2)
    out = arena.allocate(2)
    temporaries = [arena.allocate(length) for length in (2, 200, 2, 600, 2, 2)]  # in blocks: 1, 2, 1, 5, 1, 1
    for source, to in itertools.pairwise([a, *temporaries, out]):
        graph.scale(source[:2], to[:2], 2.0)
    replay = recorder.built([a], [out]).replay

    made = [replay.serve([recorder.floats(each, 1)])[0][0].tolist() for each in (3, 4, 5)]

    assert [memory.bytes // BLOCK for memory in replay.layout.memories[1:]] == [3, 3, 5]
    assert made == [[each * 128, 128] for each in (3, 4, 5)]
    replay.close()


def test_scratch_is_asked_for_where_no_small_tensor_is(recorder: Recorder) -> None:
    a, first, out = recorder.floats(1, 2), recorder.arena.allocate(2), recorder.arena.allocate(2)
    recorder.graph.scale(a, first, 2.0)
    recorder.graph.scale(first, out, 3.0)
    replay = recorder.built([a], [out]).replay

    assert [memory.bytes for memory in replay.layout.memories] == [8, (1 << 20) + BLOCK]
    assert replay.serve([recorder.floats(3, 4)])[0][0].tolist() == [18, 24]
    replay.close()


def test_what_no_node_has_an_address_in_takes_no_memory(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a library's workspace, which is kept to the end of a capture whether a kernel uses it or not."""
    monkeypatch.setattr(builder, "MIN_SCRATCH_BYTES", 0)
    arena, graph = recorder.arena, recorder.graph
    a, out, first, _, second = (recorder.floats(1, 2), *map(arena.allocate, (2, 2, 4096, 2)))
    graph.scale(a, first, 2.0)
    graph.scale(first, second, 3.0)
    graph.scale(second, out, 5.0)
    replay = recorder.built([a], [out]).replay

    assert [memory.bytes for memory in replay.layout.memories] == [8, 2 * BLOCK]
    assert replay.serve([recorder.floats(3, 4)])[0][0].tolist() == [90, 120]
    replay.close()


def test_what_is_large_is_allocated_first(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "MIN_SCRATCH_BYTES", 0)
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

    made = replay.serve([recorder.floats(*range(1, 301))])[0]

    assert asked == [1200, 1200, 1024, 400, 8]
    assert [each.tolist() for each in made] == [[2.0 * x for x in range(1, n + 1)] for n in lengths]
    assert made[1].data_ptr() != made[3].data_ptr()
    replay.close()


def test_without_temporaries_that_nodes_know_of_there_is_no_scratch(recorder: Recorder) -> None:
    a, out = recorder.floats(1, 2), recorder.arena.allocate(2)
    recorder.arena.allocate(4096)
    recorder.graph.scale(a, out, 2.0)
    replay = recorder.built([a], [out]).replay

    assert [memory.bytes for memory in replay.layout.memories] == [8]
    assert replay.serve([recorder.floats(3, 4)])[0][0].tolist() == [6, 8]
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
        [returned] = replay.serve([cache, recorder.floats(1, 2)])[0]
        assert returned is cache

    assert cache.tolist() == [3, 6]
    assert a.tolist() == [1, 2]
    replay.close()


def test_a_capture_of_nothing_is_refused_and_nothing_is_left(
    emulator: Emulator, allocator: Allocator
) -> None:
    """As of a partition that only hands on what it is given; of an empty graph the driver takes no array of nodes."""
    recorder = Recorder(emulator, allocator)
    x = recorder.floats(1, 2)

    assert emulator.driver.nodes(recorder.graph.handle) == []
    with pytest.raises(NotRelocatableError, match=LAUNCHES_NOTHING):
        recorder.built([x], [x])
    assert emulator.live() == (0, 0)
