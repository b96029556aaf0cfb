"""All sizes of a graph allocate scratch of one size, so that each call finds the memory of the one before."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.frontend import devices
from pygraphd.client.recording import builder
from pygraphd.client.replay import scratch as scratch_module
from pygraphd.client.replay.scratch import SharedScratch
from tests.support.recording_case import Case, Operations, case

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.recording.recordings import Recordings
    from pygraphd.client.replay.replay import Replay

pytestmark = pytest.mark.torch
__all__ = ["case"]

LEAST = 128
"""Floats of a block, to which the smallest piece of scratch is set here: the emulated captures have 64 of them."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "MIN_SCRATCH_BYTES", 4 * LEAST)


def doubled_twice(operations: Operations, inputs: list[Any]) -> Any:
    """Return 4 * a; the first doubling goes to scratch."""
    doubled = operations.add(inputs[0], inputs[0])
    result = operations.add(doubled, doubled)
    operations.done(doubled)
    return (result,)


def call(case: Case, run: Recordings, n: int) -> None:
    a = case.allocator.tensor(torch.rand(n))
    expected = 4 * a
    assert torch.equal(run([a, n])[0], expected)


def scratch(replay: Replay) -> int:
    """Return the bytes of scratch of a call, by steps; the helper has to allocate as much."""
    at = replay.layout.scratch
    assert at is not None
    size: int = replay.memory()[at].nbytes
    assert ((size,), (1,), torch.uint8) in replay.counts.arguments
    return size


def test_sizes_allocate_as_much_scratch_as_the_largest(case: Case) -> None:
    run = case.make(doubled_twice)
    for n in (LEAST, 3 * LEAST, 2 * LEAST):
        call(case, run, n)
        call(case, run, n)

    assert len(run.replays) == 3
    assert {scratch(replay) for replay in run.replays} == {4 * 3 * LEAST}
    for n in (2 * LEAST, LEAST, 3 * LEAST, LEAST):
        call(case, run, n)
    assert sum(replay.counts.fused for replay in run.replays) == 4
    case.expect(captured=3)


def test_recordings_of_one_graph_share_the_size_where_each_size_has_its_own(case: Case) -> None:
    shared = SharedScratch()
    small, large = (case.made(doubled_twice, GraphFacts(), scratch=shared) for _ in range(2))
    for run, n in ((small, LEAST), (large, 4 * LEAST), (small, LEAST)):
        call(case, run, n)
        call(case, run, n)

    assert {scratch(replay) for run in (small, large) for replay in run.replays} == {4 * 4 * LEAST}


def test_a_graph_without_sizes_keeps_its_pieces(case: Case) -> None:
    run = case.make(doubled_twice)
    for _ in range(3):
        a = case.allocator.tensor(torch.rand(2 * LEAST))
        assert torch.equal(run([a])[0], 4 * a)

    [replay] = run.replays
    assert (replay.layout.scratch, replay.scratch_bytes) == (None, 0)


def test_a_graph_with_sizes_and_no_scratch_allocates_none(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for _ in range(3):
        assert run([case.floats(1, 2), 2])[0].tolist() == [2, 4]

    [replay] = run.replays
    assert (replay.layout.scratch, replay.scratch_bytes) == (None, 0)


def test_a_recording_that_is_gone_is_not_asked_any_more(case: Case) -> None:
    shared = SharedScratch()
    gone, kept = (case.made(doubled_twice, GraphFacts(), scratch=shared) for _ in range(2))
    for n in (LEAST, LEAST):
        call(case, gone, n)
    gone.close()
    for n in (2 * LEAST, 2 * LEAST):
        call(case, kept, n)

    assert [scratch(replay) for replay in kept.replays] == [4 * 2 * LEAST]


@pytest.mark.parametrize("how", ["closed", "dropped", "deleted"])
def test_without_its_largest_size_a_graph_allocates_less(case: Case, how: str) -> None:
    """Else a batch that was large once would have all others allocate its scratch for ever."""
    shared = SharedScratch()
    small, other, large = (
        case.made(doubled_twice, GraphFacts(), recheck_s=600.0, scratch=shared) for _ in range(3)
    )
    for run, n in ((small, LEAST), (other, 2 * LEAST), (large, 16 * LEAST)):
        for _ in range(3):
            call(case, run, n)
    kept = [*small.replays, *other.replays]
    assert {scratch(replay) for replay in kept} == {shared.bytes} == {4 * 16 * LEAST}

    if how == "closed":
        large.close()
    elif how == "dropped":
        large._drop(large._slots[(16 * LEAST,)])
    else:
        case.forget(large)
        del run, large
        gc.collect()
        kept[0].counts.next_check = 0  # as at every 256th call
        call(case, small, LEAST)

    assert {scratch(replay) for replay in kept} == {shared.bytes} == {4 * 2 * LEAST}
    for run, n in ((small, LEAST), (other, 2 * LEAST), (small, LEAST)):
        call(case, run, n)
    other.close()
    assert [scratch(replay) for replay in small.replays] == [shared.bytes] == [4 * LEAST]
    call(case, small, LEAST)
    small.close()
    assert shared.bytes == 0


def test_a_recording_that_is_replaced_or_not_kept_asks_for_no_scratch(case: Case) -> None:
    run = case.make(doubled_twice)
    for _ in range(2):
        call(case, run, LEAST)
    first = run.replays
    run._record(run._slots[(LEAST,)], [case.allocator.tensor(torch.rand(LEAST)), LEAST])
    assert run.replays != first
    assert run._scratch._live() == [*run.replays]

    call(case, run, 2 * LEAST)
    case.recorder.between = run.close
    call(case, run, 2 * LEAST)
    assert (run._scratch._live(), run._scratch.bytes) == ([], 0)


def test_a_handler_within_a_call_changes_the_scratch_of_the_other_recordings(case: Case) -> None:
    """It does not wait for the call, which it has interrupted."""
    run = case.make(doubled_twice)
    for n in (LEAST, 2 * LEAST, 8 * LEAST):
        for _ in range(2):
            call(case, run, n)
    small, middle, _ = run.replays

    with small.counts:
        run._drop(run._slots[(8 * LEAST,)])

    assert (scratch(small), scratch(middle)) == (4 * 8 * LEAST, 4 * 2 * LEAST)
    for n in (LEAST, 2 * LEAST):
        call(case, run, n)
    run._drop(run._slots[(2 * LEAST,)])
    assert scratch(small) == 4 * LEAST


class Told:
    """A recording that `needs` some bytes of scratch, and is told how many to allocate; meanwhile another thread does `between`."""

    def __init__(self, needs: int, between: Callable[[], None] = lambda: time.sleep(0)) -> None:
        self.scratch_bytes, self.allocates, self.between = needs, 0, between
        self.counts = SimpleNamespace(is_held_here=lambda: False)

    def allocate_scratch(self, size: int) -> None:
        assert size >= self.scratch_bytes
        self.between()
        self.allocates = size


def test_a_recording_that_another_thread_adds_while_the_others_are_told_is_allowed_for() -> None:
    shared, made = SharedScratch(), list[Any]()
    small, large = Told(1), Told(5)
    later: list[Any] = [Told(3)]

    def add() -> None:
        while later:
            made.append(later.pop())
            shared.add(made[-1])

    for each in (small, large):
        shared.add(each)  # type: ignore[arg-type]
    small.between = add
    shared.remove(large)  # type: ignore[arg-type]

    assert ([each.allocates for each in (small, *made)], shared.bytes) == ([3, 3], 3)


@pytest.mark.parametrize("how", ["interrupted", "within a call"])
def test_recordings_that_could_not_be_told_are_told_later(how: str) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    shared, small, large = SharedScratch(), Told(20), Told(100)
    shared.add(small)  # type: ignore[arg-type]
    if how == "interrupted":
        small.between = interrupt
    else:
        small.counts.is_held_here = lambda: True
    with contextlib.suppress(KeyboardInterrupt):
        shared.add(large)  # type: ignore[arg-type]
    small.between, small.counts.is_held_here = (lambda: None), lambda: False
    assert small.allocates == 20
    shared.settle()

    assert (small.allocates, large.allocates) == (100, 100)


def test_threads_that_add_and_remove_recordings_leave_what_the_largest_needs() -> None:
    shared, kept = SharedScratch(), [Told(needs) for needs in (1, 2, 3)]

    def alternate(needs: int) -> None:
        for _ in range(300):
            replay: Any = Told(needs)
            shared.add(replay)
            shared.remove(replay)

    for replay in kept:
        shared.add(replay)  # type: ignore[arg-type]
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(alternate, needs) for needs in (10, 20, 30, 40)]:
            done.result()

    assert ([replay.allocates for replay in kept], shared.bytes) == ([3, 3, 3], 3)


@pytest.mark.parametrize(("least", "free"), [(LEAST, 1 << 40), (LEAST, 0), (1 << 40, 1 << 40)])
def test_a_workspace_is_allocated_beside_the_scratch_whenever_memory_was_given_back(
    case: Case, monkeypatch: pytest.MonkeyPatch, least: int, free: int
) -> None:
    """Otherwise it would lie in memory that is then too small for the scratch."""
    monkeypatch.setattr(scratch_module, "IN_ONE_PIECE_FROM", least)
    run, held, emptied = case.make(doubled_twice), weakref.WeakSet[Any](), case.recorder.emptied_before
    for n in (LEAST, LEAST):
        call(case, run, n)
    [replay] = run.replays
    allocate = replay.allocate_bytes

    def allocated(size: int) -> torch.Tensor:
        held.add(made := allocate(size))
        return made

    monkeypatch.setattr(replay, "allocate_bytes", allocated)
    case.recorder.free, case.recorder.beside = free, lambda: sum(each.nbytes for each in held)
    case.recorder.workspaces_beside.clear()
    before = len(emptied)

    for n in (LEAST, LEAST, LEAST):
        call(case, run, n)
    run.empty_cache()
    run.trim()

    assert len(emptied) == before + 2  # before the first replay, and as asked
    assert len(case.recorder.cleared_before) == 1 + (
        least == LEAST
    )  # before the capture, and with large scratch before the first replay
    assert case.recorder.workspaces_beside == [4 * LEAST] * (3 if least == LEAST and free else 0)
    assert not held


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.integers(1, 6), min_size=1, max_size=8), odd=st.integers(0, 7))
def test_calls_are_right_in_any_order_of_sizes(case: Case, order: list[int], odd: int) -> None:
    run = case.make(doubled_twice)
    sizes = [each * LEAST // 2 + odd for each in order]
    for n in [*sizes, *sizes]:
        call(case, run, n)

    assert run.replays
    assert {scratch(replay) for replay in run.replays} == {run._scratch.bytes}
    assert run._scratch.bytes >= max(replay.scratch_bytes for replay in run.replays)
    run.close()


def test_a_gpu_has_one_scratch_size_for_each_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[SharedScratch] = []

    def make_recordings(*arguments: Any, groups: Any) -> Any:
        made.append(arguments[-1])
        return object()

    from pygraphd.client.recording import attention_host

    monkeypatch.setattr(attention_host, "make_recordings", make_recordings)
    options: Any = type("Options", (), {"sizes": type("Sizes", (), {"sizes": 8}), "recheck_s": 0.0})
    some = devices.Devices(options, None, None, None)  # type: ignore[arg-type]
    some._recorders.update(dict.fromkeys((0, 1), object()))  # type: ignore[arg-type]
    for digest, device in (("a", 0), ("a", 0), ("b", 0), ("a", 1)):
        some.recordings(lambda _: None, device, GraphFacts(digest=digest), lambda *_: None)

    assert made[0] is made[1]
    assert len({id(each) for each in made}) == 3
    made.clear()
    assert not some._scratch
