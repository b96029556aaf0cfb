"""Which dynamic sizes are decided apart: what comes back, within bounds, whatever the order."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.dispatch import shapes, time_budget
from pygraphd.client.dispatch.shapes import DecidedSize, Sizes
from pygraphd.client.dispatch.slot import Slot
from pygraphd.client.dispatch.time_budget import TimeBudget
from pygraphd.schema.messages import MAX_INTEGER_INPUTS
from tests.support.sized_case import KERNELS, Case


def test_a_size_is_decided_when_it_has_come_back_and_others_run_as_kernels() -> None:
    case = Case(calls=3)

    assert case.calls(8, 16, 8, 24, 8, 8) == [KERNELS] * 4 + [(8,)] * 2
    assert case.decided == [(8,)]
    assert case.report.fallbacks == {shapes.NOT_OFTEN_ENOUGH: 4}


def test_a_size_that_the_cache_knows_is_decided_at_its_first_call_while_there_is_room() -> None:
    case = Case(known=(8, 16, 32), sizes=2, calls=3)

    assert case.calls(8, 24, 24, 16, 32, 16, 8) == [(8,), KERNELS, KERNELS, (16,), KERNELS, (16,), (8,)]
    assert case.decided == [(8,), (16,)]
    assert (case.lookups, case.asked) == (1, [8, 16])
    assert case.report.fallbacks == {shapes.NOT_OFTEN_ENOUGH: 2, shapes.TOO_MANY_TO_DECIDE: 1}


def test_a_known_size_is_decided_at_its_first_call_however_many_unknown_ones_came_before() -> None:
    case = Case(known=(1000,))

    assert case.calls(*range(64), 1000)[-1] == (1000,)
    assert (case.lookups, case.asked) == (1, [1000])


def test_where_no_size_is_to_be_decided_none_is_looked_up() -> None:
    case = Case(known=(8,), sizes=0)

    assert case.calls(8) == [KERNELS]
    assert (case.lookups, case.asked) == (0, [])


def test_the_most_used_of_the_known_sizes_come_first_while_there_is_no_time_for_all() -> None:
    case = Case(known=range(20), calls=100)
    case.each_s = None
    case.calls(0)
    case.took_s[0] = time_budget.EXPECTED_S
    most = int((time_budget.ALLOWANCE_S - time_budget.EXPECTED_S) / time_budget.EXPECTED_S) + 1

    case.calls(*reversed(range(20)))
    assert case.decided[1:] == [(size,) for size in reversed(range(1, most + 1))]
    assert case.report.fallbacks == {shapes.NO_TIME: 19 - most}
    case.now_s += time_budget.EXPECTED_S / time_budget.SHARE  # pays for one
    case.calls(*reversed(range(20)))

    assert case.decided[most + 1 :] == [(most + 1,)]


@pytest.mark.parametrize("each_s", [0.03, 0.11, 0.34, 2.0])
def test_how_many_of_the_known_sizes_come_at_once_is_what_recordings_so_far_say(each_s: float) -> None:
    case = Case(known=range(200), sizes=1000)
    case.each_s = None
    case.calls(0)
    case.took_s[0] = each_s
    assert case.calls(199) == [KERNELS]
    case.now_s += 100 * each_s  # that is paid
    case.calls(*range(199, 0, -1))

    at_once = min(int(time_budget.ALLOWANCE_S / each_s) + 1, 199)
    assert case.decided[1:] == [(size,) for size in range(at_once, 0, -1)]


def test_sizes_that_are_known_as_kernels_take_no_time_for_recordings() -> None:
    case = Case(known=range(20), calls=100)
    case.each_s, case.are_recorded = None, False

    case.calls(*range(20))

    assert case.decided == [(size,) for size in range(20)]


def test_a_known_size_that_is_seldom_used_elsewhere_need_not_wait_for_ever_for_the_others() -> None:
    case = Case(known=range(20), calls=3)

    assert case.calls(19, 19, 19) == [KERNELS, KERNELS, (19,)]
    assert (case.decided, case.asked) == ([(19,)], [19])


def test_what_was_known_at_the_first_call_is_not_used_again_when_a_size_comes_back_much_later() -> None:
    """It may have been measured anew in between."""
    case = Case(known=(8,), sizes=1, calls=1)
    case.calls(8, *[24] * 2 * shapes.IDLE_TICKS, *[8] * 2 * shapes.IDLE_TICKS)

    assert case.decided == [(8,), (24,), (8,)]
    assert case.asked == [8]


def test_a_further_size_waits_while_recordings_have_used_up_their_time() -> None:
    case = Case(known=(48,), calls=1)

    case.now_s = 1000.0  # as after compiling: time before the first recordings allows for no more of them
    case.took_s[8] = time_budget.ALLOWANCE_S + 0.5
    assert case.calls(8, 16, 16, 48, 8) == [(8,), KERNELS, KERNELS, KERNELS, (8,)]
    assert case.report.fallbacks == {shapes.NO_TIME: 3}
    case.now_s += 0.5 / time_budget.SHARE
    assert case.calls(16) == [(16,)]
    assert case.asked == []


def test_recordings_of_other_graphs_count_too() -> None:
    budget = TimeBudget(lambda: 0.0)
    first, second = Case(calls=1), Case(calls=1)
    first.sized._budget = second.sized._budget = budget
    first.took_s[8] = time_budget.ALLOWANCE_S + 0.5

    assert [*first.calls(8), *second.calls(8)] == [(8,), KERNELS]
    del first
    assert second.calls(8) == [KERNELS]  # the time that it took is gone all the same


def test_sizes_wait_for_the_first_recording_which_tells_how_long_they_take() -> None:
    case = Case(calls=1)
    case.each_s = None

    assert case.calls(*range(5)) == [(0,), *[KERNELS] * 4]
    case.took_s[0] = 0.01
    case.now_s += time_budget.ASKED_EVERY_S
    assert case.calls(1, 2) == [(1,), (2,)]


def test_sizes_wait_while_those_before_are_still_to_be_recorded() -> None:
    case = Case(calls=1)
    case.each_s = None
    case.calls(0)
    case.took_s[0] = 0.4  # as each of those that follow

    assert case.calls(*range(1, 9)) == [(1,), (2,), *[KERNELS] * 6]
    assert set(case.report.fallbacks) == {shapes.NO_TIME}
    case.each_s = 1e-6  # both took no time
    case.now_s += time_budget.ASKED_EVERY_S
    assert case.calls(100) == [(100,)]
    case.took_s[100] = time_budget.ALLOWANCE_S + 0.2
    assert case.calls(101) == [KERNELS]


@pytest.mark.parametrize("each_s", [0.01, 0.1, 0.34, 2.0])
def test_as_many_sizes_are_set_up_at_once_as_recordings_so_far_say(each_s: float) -> None:
    case = Case(calls=1, sizes=1000)
    case.each_s = None
    case.calls(0)
    case.took_s[0] = each_s
    case.calls(0, 1)
    case.now_s += 100 * each_s  # that is paid

    started = case.calls(*range(2, 200))
    most = time_budget.ALLOWANCE_S / each_s
    assert min(most, 198) - 1 <= len(started) - started.count(KERNELS) <= most + 1


def test_a_size_whose_recording_takes_longer_than_expected_makes_others_wait() -> None:
    case = Case(calls=1)
    case.each_s = None
    case.calls(1)
    case.took_s[1] = 0.3
    case.calls(2, 3)
    case.took_s[2] = 1.2  # the other one is still expected, at the mean of both

    owed_s = 0.3 + 1.2 + 0.3 - time_budget.ALLOWANCE_S
    assert case.calls(4) == [KERNELS]
    case.now_s += (owed_s - 0.1) / time_budget.SHARE
    assert case.calls(4) == [KERNELS]
    case.now_s += 0.2 / time_budget.SHARE
    assert case.calls(4) == [(4,)]


def test_a_size_that_is_never_recorded_is_paid_for_by_time() -> None:
    """As one whose calls end: else it would keep others from being recorded for ever."""
    case = Case(calls=1, sizes=1000)
    case.each_s = None
    for size in range(60):
        assert case.calls(size) == [(size,)]
        case.now_s += time_budget.EXPECTED_S / time_budget.SHARE + 1e-6


def test_a_size_that_cannot_be_set_up_costs_nothing() -> None:
    case = Case(calls=1)

    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    decide, case.sized._decide = case.sized._decide, fail
    assert case.calls(*range(20)) == [KERNELS] * 20
    case.sized._decide = decide

    assert case.calls(20) == [(20,)]


def test_the_first_sizes_of_each_graph_cost_the_budget_nothing() -> None:
    """A model of many graphs with one size each is as one without dynamic sizes."""
    budget = TimeBudget(lambda: 0.0)
    cases = [Case(calls=1, free=time_budget.FREE_SIZES) for _ in range(20)]
    for each in cases:
        each.sized._budget = budget
        each.each_s = 2.0
        assert each.calls(8, 16) == [(8,), (16,)]
    cases[0].each_s = None

    assert cases[0].calls(24, 32) == [(24,), KERNELS]  # the one, and then it is expected to take 2 s


def test_sizes_that_are_known_as_kernels_need_no_time() -> None:
    case = Case(known=[8, 16], kernels=[16], calls=1)
    case.took_s[8] = 100.0
    assert case.calls(8, 24, 16) == [(8,), KERNELS, (16,)]
    gone = Case(known=[8], kernels=[8], calls=3)
    gone.recall = lambda _: None  # type: ignore[assignment,method-assign]  # as of an entry that has become too old
    assert gone.calls(8, 8, 8) == [KERNELS, KERNELS, (8,)]


def test_a_size_that_is_being_measured_is_told_when_another_one_is_called() -> None:
    """Until it is decided: then changes of size cost nothing more."""
    case, told = Case(calls=1), list[Sizes]()
    decide = case.sized._decide

    def decide_and_note(sizes: Sizes) -> DecidedSize:
        def interrupt() -> bool:
            told.append(sizes)
            return told.count(sizes) < 2

        return dataclasses.replace(decide(sizes), interrupt=interrupt)

    case.sized._decide = decide_and_note
    case.calls(8, 8, 16, 16, 8, 24, 8, 16, 8, 16)

    assert told == [(8,), (16,), (8,), (24,), (16,)]
    assert list(case.sized._measured) == [(24,)]


def test_what_sizes_were_used_is_remembered_of_decided_ones_alone() -> None:
    case = Case(sizes=2, calls=2)

    case.calls(8, 8, *range(1000, 1200))
    assert case.sized._used.keys() == {(8,)}


def test_a_size_that_another_thread_has_decided_meanwhile_is_not_counted_anew() -> None:
    case = Case(calls=1)
    case.calls(8)

    assert case.sized._cold((8,), ["a tensor", 8]) == (8,)
    assert (8,) not in case.sized._seen
    assert case.decided == [(8,)]


def test_all_integers_count_in_their_order() -> None:
    case = Case(calls=1)

    assert case.sized([2, "a tensor", 3, True]) == (2, 3)
    assert case.sized([3, "a tensor", 2, True]) == (3, 2)


@pytest.mark.parametrize("integers", [[], [1] * (MAX_INTEGER_INPUTS + 1)], ids=len)
def test_without_sizes_or_with_too_many_it_is_one_graph(integers: list[int]) -> None:
    case = Case()

    assert [case.sized(["a tensor", *integers]) for _ in range(3)] == ["whole"] * 3
    assert (case.wholes, case.decided, case.report.fallbacks) == (1, [], {})


@given(
    st.lists(st.integers(1, 12), max_size=300),
    st.integers(0, 4),
    st.integers(1, 4),
    st.none() | st.lists(st.integers(1, 14), unique=True),
)  # as many sizes as go round
def test_whatever_comes_is_right_and_within_the_bounds(
    calls: list[int], sizes: int, least: int, known: list[int] | None
) -> None:
    case = Case(known, sizes=sizes, calls=least)

    results = case.calls(*calls)

    assert all(result in (KERNELS, (size,)) for result, size in zip(results, calls, strict=True))
    assert case.most_open <= sizes
    assert len(case.decided) <= shapes.SETUPS_PER_SIZE * sizes
    assert results.count(KERNELS) == case.report.fallbacks.total()
    waits = {shapes.NO_TIME} if known else set()
    assert set(case.report.fallbacks) <= {shapes.NOT_OFTEN_ENOUGH, shapes.TOO_MANY_TO_DECIDE} | waits


def test_a_size_that_was_not_used_for_long_makes_room_and_can_come_back() -> None:
    case = Case(sizes=2, calls=1)
    case.calls(8, 16)

    busy = case.calls(*[8, 16, 24] * 4)  # both are in use
    assert busy == [(8,), (16,), KERNELS] * 4
    assert case.report.fallbacks == {shapes.TOO_MANY_TO_DECIDE: 4}
    case.calls(*[16, 24] * shapes.IDLE_TICKS)
    assert case.open == {(16,), (24,)}
    case.calls(*[24, 8] * shapes.IDLE_TICKS)
    assert case.open == {(24,), (8,)}


def test_a_few_more_sizes_than_there_is_room_for_do_not_push_each_other_out() -> None:
    case = Case(sizes=8, calls=3)

    case.calls(*[*range(12)] * 4)

    assert case.decided == [(size,) for size in range(8)]
    assert case.report.fallbacks == {shapes.NOT_OFTEN_ENOUGH: 24, shapes.TOO_MANY_TO_DECIDE: 8}


def test_a_size_that_is_the_only_one_from_now_on_gets_room() -> None:
    case = Case(sizes=2, calls=1)
    case.calls(8, 16)

    assert case.calls(*[24] * 2 * shapes.IDLE_TICKS)[-1] == (24,)
    assert case.open == {(16,), (24,)}


def test_sizes_that_take_turns_are_not_set_up_for_ever() -> None:
    case = Case(sizes=1, calls=1)

    for size in range(100):
        case.calls(*[size, 1000 + size] * shapes.IDLE_TICKS)

    assert len(case.decided) == shapes.SETUPS_PER_SIZE
    assert len(case.sized._seen) <= shapes.REMEMBERED
    assert len(case.sized._used) <= shapes.REMEMBERED + 1


def test_what_cannot_be_decided_runs_as_kernels_and_is_said() -> None:
    case = Case(calls=1)

    def fail(*_: object) -> Any:
        raise RuntimeError("broken")

    case.sized._decide = case.sized._begin = fail

    assert case.calls(8, 8) == [KERNELS] * 2
    assert case.report.failures == {"dynamic sizes: RuntimeError: broken": 2}
    assert case.report.fallbacks == {}


def test_the_users_own_error_is_theirs() -> None:
    def fail(_inputs: object) -> Any:
        raise KeyError("the user's")

    case = Case()
    case.sized._run_kernels = fail

    with pytest.raises(KeyError, match="the user's"):
        case.calls(8)
    assert case.report.failures == {}


def test_another_thread_runs_as_kernels_while_one_decides() -> None:
    case = Case(calls=1)
    began, go_on = threading.Event(), threading.Event()

    def decide(sizes: Sizes) -> DecidedSize:
        began.set()
        assert go_on.wait(10)
        return DecidedSize(Slot(lambda _inputs: sizes), lambda: None)

    case.sized._decide = decide
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(case.calls(8)))
    thread.start()
    assert began.wait(10)

    assert case.calls(8) == [KERNELS]
    go_on.set()
    thread.join()
    assert results == case.calls(8) == [(8,)]
    assert case.report.fallbacks == {shapes.BEING_DECIDED: 1}


def test_the_first_call_of_another_thread_runs_as_kernels_too() -> None:
    case = Case(calls=1)
    began, go_on = threading.Event(), threading.Event()

    def begin() -> bool:
        began.set()
        return go_on.wait(10)

    case.sized._begin = begin
    thread = threading.Thread(target=case.calls, args=(8,))
    thread.start()
    assert began.wait(10)

    assert case.calls(8) == [KERNELS]
    go_on.set()
    thread.join()
    assert case.calls(8) == [(8,)]


def test_sizes_that_push_each_other_out_take_no_more_time_than_the_budget_has() -> None:
    """Of many sizes that come in turns, each setup costs more than it saves."""
    sizes, each_s = 8, 0.15
    case = Case(sizes=sizes, calls=3)
    case.each_s = each_s

    for size in range(20 * sizes):
        for _ in range(2 * shapes.IDLE_TICKS):
            case.calls(size % (2 * sizes))
            case.now_s += 0.005

    most_s = time_budget.ALLOWANCE_S + time_budget.SHARE * case.now_s + each_s
    assert sizes < len(case.decided) <= shapes.SETUPS_PER_SIZE * sizes
    assert len(case.decided) * each_s <= most_s
    assert case.most_open <= sizes
