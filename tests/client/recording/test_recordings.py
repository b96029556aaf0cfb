"""When a call is recorded, by its sizes, and what is kept of it."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.recording import recordings, recordings_by_size
from pygraphd.client.replay.replay import RECORDING_CLOSED
from tests.support.recording_case import Case, Operations, RngCursor, add, case
from tests.support.refusals import refusal_of
from tests.support.stepped_clock import SteppedClock

if TYPE_CHECKING:
    from collections.abc import Callable, Collection


__all__ = ["case"]  # fixtures

pytestmark = pytest.mark.torch


def test_it_is_recorded_when_it_comes_back_and_then_replayed(case: Case) -> None:
    run = case.make(add)

    results = [run([case.floats(i, i), case.floats(1, 2)])[0] for i in range(10)]

    assert [each.tolist() for each in results] == [[i + 1.0, i + 2.0] for i in range(10)]
    case.expect(captured=1)
    summary = case.report.summary()
    (facts,) = summary["facts"].values()
    assert summary["nodes_in_graphs"] == facts["nodes"] == 1
    assert facts["memory_bytes"] == 8  # two outputs of four bytes
    assert case.report.fallbacks == {recordings.NOT_YET: 1}
    assert case.recorder.captures == len(run.replays) == 1
    assert refusal_of(run) is None


def test_what_recording_takes_is_counted_once_and_not_the_call_that_runs_as_kernels_meanwhile(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SteppedClock()
    monkeypatch.setattr(time, "perf_counter", clock.now)

    def body(operations: Operations, inputs: list[Any]) -> Any:
        clock.sleep(0.03 if operations is case.recorder.as_kernels else 0.02)
        return (operations.add(inputs[0], inputs[1]),)

    monkeypatch.setattr(case.recorder, "trim", lambda: clock.sleep(0.01))
    run = case.make(body)
    run([case.floats(0), case.floats(1), 1])
    assert case.report.recording_ms == 0

    began = clock.now()
    run([case.floats(1), case.floats(1), 1])
    whole_ms = (clock.now() - began) * 1e3
    counted_ms = case.report.recording_ms
    run([case.floats(2), case.floats(1), 1])

    assert counted_ms >= 20 + 2 * 10
    assert counted_ms == pytest.approx(whole_ms - 30)
    assert case.report.recording_ms == counted_ms

    for _ in range(2):
        run([case.floats(2), case.floats(1), 2])
    assert run.recording_us == pytest.approx(2 * (counted_ms - 2 * 10) * 1e3)


def test_calls_that_recordings_have_served_count_when_these_are_gone(case: Case) -> None:
    run = case.make(add)
    for _ in range(8):
        run([case.floats(1), case.floats(1)])
    served = run.replayed
    assert served > 0
    run.close()
    assert (run.replays, run.replayed) == ((), served)


def test_another_device_may_be_the_current_one(case: Case) -> None:
    run = case.make(add)
    case.recorder.current_device = 1

    for i in range(4):
        assert run([case.floats(i), case.floats(1)])[0].tolist() == [i + 1]

    assert case.recorder.current_device == 1
    case.expect(captured=1)


def test_a_call_that_is_recorded_changes_its_inputs_once(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        operations.accumulate(inputs[0], inputs[1])
        return (inputs[0],)

    run = case.make(body)
    total = case.floats(0, 0)

    for count in range(1, 6):
        assert run([total, case.floats(1, 2)])[0] is total
        assert total.tolist() == [count, 2 * count]

    case.expect(captured=1)


def test_random_numbers_go_on_as_if_run_as_kernels(case: Case) -> None:
    def body(operations: Operations, _: list[Any]) -> Any:
        return (operations.random(),)

    run = case.make(body)

    drawn = [run([case.floats(0)])[0].tolist()[0] for _ in range(6)]

    assert drawn == [4, 8, 12, 16, 20, 24]
    case.expect(captured=1)
    assert [cursor.closed for cursor in case.recorder.cursors] == [False]


def test_who_draws_no_random_numbers_pays_for_none(case: Case) -> None:
    run = case.make(add)

    for _ in range(2):
        run([case.floats(1), case.floats(2)])

    assert [cursor.closed for cursor in case.recorder.cursors] == [True]


def test_who_draws_no_random_numbers_is_tried_while_another_stream_does(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RngCursor.learn

    def learn(cursor: RngCursor, addresses: Callable[[], Collection[int]], stream: int) -> bool:
        draws = original(cursor, addresses, stream)
        cursor.affinity.move(7)
        return draws

    monkeypatch.setattr(RngCursor, "learn", learn)
    run = case.make(add)

    for _ in range(3):
        run([case.floats(1), case.floats(2)])

    case.expect(captured=1)
    assert set(case.report.fallbacks) == {recordings.NOT_YET}


def test_a_graph_with_an_input_that_no_node_shows_is_refused_for_good(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        return operations.look_up(inputs[1]), operations.add(inputs[0], inputs[0])

    run = case.make(body)
    results = []
    for i in range(5):
        first, second = run([case.floats(i, i), case.floats(10 * i, 1)])
        results.append((first.tolist(), second.tolist()))

    assert results == [([10.0 * i, 1.0], [2.0 * i] * 2) for i in range(5)]
    case.expect(captured=0)
    assert case.recorder.captures == 2  # the first might have been chance
    told = "verification: output 0 differs in where it has NaN or infinity"
    assert case.report.fallbacks == {recordings.NOT_YET: 1, told: 4}
    assert run.refused_for_good


def test_an_input_that_is_not_used_may_be_any(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        return (operations.add(inputs[0], inputs[0]),)

    run = case.make(body)
    for i in range(4):
        assert run([case.floats(i), case.floats(7)])[0].tolist() == [2 * i]

    case.expect(captured=1)
    assert case.recorder.captures == 1


def test_sizes_are_recorded_when_they_come_back_and_never_without_end(case: Case) -> None:
    run = case.make(add)

    def call(n: int) -> None:
        a, b = (case.allocator.tensor(torch.rand(n)) for _ in range(2))
        expected = a + b
        assert torch.equal(run([a, b, n])[0], expected)

    for n in range(1, 101):
        call(n)
    case.expect(captured=0)
    assert case.report.fallbacks == {recordings.NOT_YET: 100}
    assert len(run._slots) == recordings_by_size.MAX_SIZE_SLOTS

    for _ in range(10):
        for n in range(1, 21):
            call(n)

    case.expect(captured=recordings_by_size.CAPTURES_OF_EACH * recordings.MAX_RECORDINGS)
    assert len(run.replays) == recordings.MAX_RECORDINGS
    assert case.report.fallbacks[recordings_by_size.TOO_MANY_CAPTURES] > 0
    _, executables = case.emulator.live()
    assert executables <= recordings.MAX_RECORDINGS


def test_a_recording_that_is_made_while_all_are_closed_is_not_kept(case: Case) -> None:
    """As when another thread evicts the size during the call that records."""
    run = case.make(add)
    run([case.floats(1), case.floats(2)])
    case.recorder.between = run.close

    results = [run([case.floats(i), case.floats(2)])[0].tolist() for i in range(4)]

    assert results == [[2], [3], [4], [5]]
    assert (run.replays, case.emulator.live()) == ((), (0, 0))
    assert case.recorder.captures == 1
    case.expect(captured=0)
    assert case.report.fallbacks == {recordings.NOT_YET: 1, RECORDING_CLOSED: 4}
    assert case.report.summary()["nodes_in_graphs"] == 0


def test_the_summary_counts_the_nodes_of_a_model_that_is_gone(case: Case) -> None:
    """As of one that a function of the program holds, which has ended when the summary is written."""
    kept, gone = case.make(add), case.make(add)
    for _ in range(3):
        for run in (kept, gone):
            assert run([case.floats(1), case.floats(2)])[0].tolist() == [3]

    case.forget(gone)
    del run, gone
    gc.collect()

    assert case.report.summary()["nodes_in_graphs"] == 2
    assert case.emulator.live() == (1, 0)  # a single kernel needs no executable
    assert len(kept.replays) == 1


def test_the_recording_that_was_not_used_for_longest_goes(case: Case) -> None:
    run = case.make(add)

    def call(n: int) -> None:
        run([case.allocator.tensor(torch.ones(n)), case.allocator.tensor(torch.ones(n)), n])

    for n in range(recordings.MAX_RECORDINGS):
        call(n + 1)
        call(n + 1)
    call(1)
    call(100)
    call(100)
    captured = case.recorder.captures

    call(1)
    assert case.recorder.captures == captured
    call(2)
    assert case.recorder.captures == captured + 1


def test_each_size_is_recorded_or_refused_by_itself(case: Case) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        extra = case.floats(1, 1) if operations is case.recorder.as_kernels else case.floats(1, 2)
        return (operations.add(inputs[0], extra if inputs[1] == 3 else inputs[0]),)

    run = case.make(body)

    for _ in range(3):
        for n in (1, 2, 3):
            run([case.floats(n, n), n])

    refusals = {size: slot.refusal and slot.refusal.reason for size, slot in run._slots.items()}
    assert refusals == {
        (1,): None, (2,): None, (3,): "verification: output 0 differs by 25 % of its largest value",
    }  # fmt: skip
    assert refusal_of(run) is None
    first, second = run.replays
    run([case.floats(5, 6), 1])
    assert run.replays == (second, first)  # in the order of use
    assert run.replays[-1] is run._slots[(1,)].replay
    run.close()
    assert (len(run.replays), case.emulator.live()[1]) == (0, 0)
    assert run.refused_for_good


def test_a_size_that_will_not_be_recorded_any_more_is_refused_for_now(case: Case) -> None:
    """Else calls as KERNELS would be measured as those of a GRAPH."""
    run = case.make(add, max_recordings=1)

    def call(n: int) -> None:
        run([case.allocator.tensor(torch.ones(n)), case.allocator.tensor(torch.ones(n)), n])

    for n in range(1, 10):
        call(n)
        call(n)

    assert [refusal_of(run)] == [None]  # the last one was recorded
    run.close()
    assert (refusal_of(run), run.refused_for_good) == (recordings_by_size.TOO_MANY_CAPTURES, False)


def test_memory_that_cannot_be_given_back_is_no_matter_of_the_call(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trim() -> None:
        raise RuntimeError("an error of the user's kernels, which CUDA tells whoever comes next")

    run = case.make(add)
    monkeypatch.setattr(case.recorder, "trim", trim)
    a, b = (case.allocator.tensor(torch.ones(4)) for _ in range(2))

    results = [run([a, b, 4])[0].tolist() for _ in range(4)]

    assert results == [[2.0] * 4] * 4
    assert case.report.counts["captured"] == 1
    assert case.report.failures == {"giving memory back: RuntimeError": 2}


def test_it_says_which_calls_have_prepared_what_later_ones_have(case: Case) -> None:
    run = case.make(add)
    a, b = (case.allocator.tensor(torch.ones(4)) for _ in range(2))

    prepared = []
    for _ in range(8):
        before = run.one_time_work
        run([a, b, 4])
        prepared.append(run.one_time_work != before)

    assert prepared == [False, True] + [False] * 6


def test_how_many_recordings_there_are_can_be_set(case: Case) -> None:
    run = case.make(add, max_recordings=2)

    for _ in range(20):
        for n in range(1, 6):
            run([case.allocator.tensor(torch.ones(n)), case.allocator.tensor(torch.ones(n)), n])

    assert len(run.replays) == 2
    case.expect(captured=2 * recordings_by_size.CAPTURES_OF_EACH)


def test_what_becomes_of_a_recording_is_logged(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    def body(operations: Operations, inputs: list[Any]) -> Any:
        extra = case.floats(1, 1) if operations is case.recorder.as_kernels else case.floats(1, 2)
        return (operations.add(inputs[0], extra if inputs[1] == 3 else inputs[0]),)

    run = case.made(body, GraphFacts(name="forward abc"))
    caplog.set_level("INFO", "pygraph")
    for _ in range(3):
        for n in (1, 3):
            run([case.floats(n, n), n])

    differs = "verification: output 0 differs by 25 % of its largest value"
    assert [each.getMessage() for each in caplog.records] == [
        "forward abc at 1: recording",
        "forward abc at 1: recorded and verified: 1 nodes",
        "forward abc at 3: recording",
        f"forward abc at 3: not recorded: {differs} (results_differ, ONE_CALL)",
        "forward abc at 3: recording",
        f"forward abc at 3: not recorded: {differs} (results_differ, PERMANENT)",
    ]


def test_memory_is_given_back_only_once_there_is_a_recording(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that finds its decision in the cache deploys each partition while the model is being compiled."""
    trimmed = []
    monkeypatch.setattr(case.recorder, "trim", lambda: trimmed.append(True))
    run = case.make(add)

    run.trim()
    assert trimmed == []

    for number in range(4):
        run([case.floats(number, 1.0), case.floats(1.0, 2.0)])
    before = len(trimmed)
    run.trim()
    assert len(trimmed) == before + 1


def test_memory_is_given_back_before_the_first_replay_and_the_helper_serves_the_others(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call that makes a recording holds gradients among copies, so that segments of both cannot go then."""
    recorded, by_python, seen = case.make(add), list[int](), list[tuple[int, int]]()
    serve = recorded._run

    def noted(inputs: list[Any]) -> Any:
        by_python.append(1)
        return serve(inputs)

    monkeypatch.setattr(recorded, "_run", noted)
    run = recorded.run
    for number in range(6):
        run([case.floats(number, 1.0), case.floats(1.0, 2.0)])
        seen.append((len(by_python), len(case.recorder.emptied_before)))

    assert seen == [(1, 0), (2, 1), (3, 2), (3, 2), (3, 2), (3, 2)]


def test_a_recording_that_another_thread_makes_before_the_first_replay_is_served_by_the_helper(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = case.make(add)
    run, slots = recorded.run, recorded._slots
    for number in range(2):
        run([case.floats(number, 1.0), case.floats(1.0, 2.0)])
    give_back, others = recorded.empty_cache, [recorded]

    def record_again(**options: bool) -> None:
        give_back(**options)
        while others:
            others.pop()._record(slots[()], [case.floats(5.0, 1.0), case.floats(1.0, 2.0)])

    monkeypatch.setattr(recorded, "empty_cache", record_again)
    for number in range(3):
        run([case.floats(number, 1.0), case.floats(1.0, 2.0)])

    case.expect(captured=2)
    assert list(recorded._fused) == [()]
    assert [each.fused for each in recorded.replays] == [recorded._fused[()]]
