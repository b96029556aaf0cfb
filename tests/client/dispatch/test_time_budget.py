"""How much time recordings may take: an allowance, a small share of the time, and all of the time that graphs have saved."""

from __future__ import annotations

import functools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.dispatch.time_budget import (
    ALLOWANCE_S,
    ASKED_EVERY_S,
    CONSEQUENCES,
    EXPECTED_S,
    SAVED_EVERY_S,
    SHARE,
    Account,
    KernelsTime,
    TimeBudget,
)

SAVING_US = 4000.0


class Case:
    """A budget whose time is told, with one size that is recorded and replayed, after a first recording that was free."""

    def __init__(self, saving_us: float | None = SAVING_US) -> None:
        self.now_s = 0.0
        self.budget = TimeBudget(lambda: self.now_s)
        self.kernels = KernelsTime()
        self.first = Account(self.kernels, lambda: 1e6 * EXPECTED_S / CONSEQUENCES)
        self.budget.open(self.first, is_recorded=True, is_free=True)
        self.budget.is_spent()  # counts it
        self.recorded_s, self.replays, self.saving_us = 0.0, 0, saving_us
        self.account = Account(
            self.kernels, lambda: 1e6 * self.recorded_s, lambda: self.replays, lambda _: self.saving_us
        )
        self.budget.open(self.account, is_recorded=True)

    def record(self, seconds: float) -> None:
        """Record for so long that it costs `seconds`, and let the next count come."""
        self.recorded_s += seconds / CONSEQUENCES
        self.now_s += SAVED_EVERY_S

    def waits_s(self, step_s: float = SAVED_EVERY_S) -> float:
        """Return for how long a further size has to wait, if nothing is replayed meanwhile."""
        began_s = self.now_s
        while self.budget.is_spent():
            self.now_s += step_s
        return self.now_s - began_s


def test_a_recording_is_paid_by_a_share_of_the_time() -> None:
    case = Case()
    case.record(ALLOWANCE_S + 0.5)

    assert case.waits_s() == pytest.approx(0.5 / SHARE, abs=2 * SAVED_EVERY_S)


def test_the_time_that_graphs_save_pays_for_further_recordings_at_once() -> None:
    case = Case()
    case.record(ALLOWANCE_S + 0.5)
    assert case.budget.is_spent()
    case.replays = 126  # 4 ms each
    case.now_s += SAVED_EVERY_S

    assert not case.budget.is_spent()


@pytest.mark.parametrize("saving_us", [0.0, -100.0])
def test_graphs_that_take_as_long_as_kernels_pay_nothing(saving_us: float) -> None:
    case = Case(saving_us)
    case.record(ALLOWANCE_S + 0.5)
    case.replays = 10_000

    assert case.waits_s() == pytest.approx(0.5 / SHARE, abs=2 * SAVED_EVERY_S)


def test_calls_before_it_is_known_what_a_graph_saves_pay_once_it_is_known() -> None:
    case = Case(saving_us=None)
    case.record(ALLOWANCE_S + 0.5)
    case.replays, case.now_s = 126, SAVED_EVERY_S
    assert case.budget.is_spent()
    case.saving_us, case.now_s = SAVING_US, 2 * SAVED_EVERY_S

    assert not case.budget.is_spent()


def test_calls_are_counted_once_and_not_more_often_than_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = Case(), list[float]()

    def replays() -> int:
        asked.append(case.now_s)
        return 125

    monkeypatch.setattr(case.account, "_replays", replays)
    case.record(ALLOWANCE_S + 10)
    while case.now_s < 10 * SAVED_EVERY_S:
        assert case.budget.is_spent()
        case.now_s += SAVED_EVERY_S / 8

    assert asked == pytest.approx([SAVED_EVERY_S * each for each in range(1, 10)])
    after_s = case.now_s
    assert case.waits_s() == pytest.approx((10 - 0.5) / SHARE - after_s, abs=2 * SAVED_EVERY_S)


def test_of_calls_as_kernels_the_shortest_counts() -> None:
    """Others load kernels, wait for a full queue, or have a larger size."""
    kernels, given = KernelsTime(), list[float | None]()
    account = Account(kernels, saving_us=lambda least_us: given.append(least_us))
    account.saved_s()
    for host_us in (20_000.0, 300.0, 5000.0):
        kernels.note(host_us)
        account.saved_s()

    assert given == [None, 20_000.0, 300.0, 300.0]


def test_a_size_that_makes_room_has_paid_with_what_it_saved() -> None:
    case = Case()
    case.record(ALLOWANCE_S + 0.5)
    assert case.budget.is_spent()
    case.replays = 125
    case.budget.close(case.account)
    assert not case.budget.is_spent()
    case.replays = 10**6
    case.now_s += SAVED_EVERY_S
    case.budget.open(next_one := Account(case.kernels, lambda: 1e6), is_recorded=True)

    assert case.budget.is_spent()
    del next_one


def test_what_is_saved_beyond_the_debt_is_not_kept_for_later() -> None:
    """A program that ran well for a day is not to record for an hour when its sizes change."""
    case = Case()
    case.record(1e-6)
    case.replays, case.now_s = 10**6, 3600.0
    assert not case.budget.is_spent()
    case.record(ALLOWANCE_S + 0.5)
    case.now_s += SAVED_EVERY_S

    assert case.waits_s() == pytest.approx(0.5 / SHARE, abs=2 * SAVED_EVERY_S)


def test_as_many_sizes_are_set_up_at_once_as_the_allowance_has_room_for() -> None:
    case, accounts = Case(), list[Account]()
    case.budget.close(case.account)
    most = case.budget.setups_now()
    for _ in range(most):
        assert not case.budget.is_spent()
        accounts.append(Account(case.kernels))
        case.budget.open(accounts[-1], is_recorded=True)

    assert case.budget.is_spent()
    assert most == int(ALLOWANCE_S / EXPECTED_S) + 1
    assert case.budget.setups_now() == 0


def test_before_any_recording_was_timed_one_is_expected_at_a_time() -> None:
    """It may take seconds."""
    now_s = [0.0]
    budget, kernels = TimeBudget(lambda: now_s[0]), KernelsTime()
    budget.open(first := Account(kernels), is_recorded=True)
    assert budget.is_spent()
    now_s[0] = EXPECTED_S / SHARE + 0.1  # it never comes

    assert not budget.is_spent()
    del first


def test_a_first_recording_that_is_free_says_how_long_others_take() -> None:
    budget, kernels = TimeBudget(lambda: 0.0), KernelsTime()
    accounts = [Account(kernels, lambda: 2e6 / CONSEQUENCES) for _ in range(3)]
    for each in accounts:
        budget.open(each, is_recorded=True, is_free=True)
    assert budget.setups_now() == 1
    assert not budget.is_spent()


def test_a_size_that_is_given_up_gives_its_charge_back() -> None:
    case = Case()
    accounts = [Account(case.kernels) for _ in range(4)]
    for each in accounts:
        case.budget.open(each, is_recorded=True)
    assert case.budget.is_spent()
    case.budget.close(accounts.pop())
    case.budget.close(accounts.pop())
    assert not case.budget.is_spent()
    assert case.budget.setups_now() == 1


def test_a_charge_that_is_paid_and_given_back_is_not_kept_for_later() -> None:
    case = Case()
    case.now_s = 2 * EXPECTED_S / SHARE
    assert not case.budget.is_spent()
    case.budget.close(case.account)
    accounts = [Account(case.kernels) for _ in range(case.budget.setups_now())]
    for each in accounts:
        case.budget.open(each, is_recorded=True)

    assert len(accounts) == int(ALLOWANCE_S / EXPECTED_S) + 1
    assert case.budget.is_spent()


def test_what_was_paid_for_a_recording_before_it_was_made_counts() -> None:
    case = Case()
    case.now_s = 100.0
    assert not case.budget.is_spent()
    case.record(ALLOWANCE_S + 0.5)
    case.now_s += SAVED_EVERY_S

    assert case.waits_s() == pytest.approx((0.5 - EXPECTED_S) / SHARE, abs=2 * SAVED_EVERY_S)


def test_counts_take_a_small_share_of_the_time_however_many_sizes_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case, took_s = Case(), [0.0]

    def perf_counter() -> float:
        took_s[0] += 0.02
        return took_s[0]

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    counted_at = list[float]()

    def recorded_s() -> float:
        counted_at.append(case.now_s)
        return 0.0

    monkeypatch.setattr(case.first, "recorded_s", recorded_s)
    for number in range(80):
        case.now_s = number * 0.1
        case.budget.is_spent()

    assert len(counted_at) in {3, 4}  # each takes 20 ms, so that they come every 2 s


def test_a_size_that_cannot_be_asked_keeps_no_other_from_being_recorded() -> None:
    def fail() -> float:
        raise RuntimeError("broken")

    case = Case()
    case.budget.open(broken := Account(case.kernels, fail), is_recorded=True)
    case.now_s = SAVED_EVERY_S

    assert not case.budget.is_spent()
    assert [each() for each in case.budget._accounts if each() is broken] == []


def test_an_account_goes_with_whoever_holds_it() -> None:
    """Graphs come and go, and the budget of the process stays."""
    budget, kernels = TimeBudget(lambda: 0.0), KernelsTime()
    for _ in range(100):
        budget.open(Account(kernels), is_recorded=True, is_free=bool(_ % 2))

    assert len(budget._accounts) == 0


def test_a_recording_that_is_made_again_counts_again() -> None:
    """As for calls whose inputs are aligned otherwise."""
    case = Case()
    case.record(0.5)
    assert not case.budget.is_spent()
    case.record(ALLOWANCE_S)
    case.now_s += SAVED_EVERY_S

    assert case.budget.is_spent()


def test_a_size_that_is_decided_without_a_recording_costs_nothing() -> None:
    case = Case()
    others = [Account(case.kernels) for _ in range(100)]
    for each in others:
        case.budget.open(each, is_recorded=False)

    assert not case.budget.is_spent()


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 2), st.integers(0, 300)), max_size=60))
def test_recordings_never_take_more_than_the_time_pays(steps: list[tuple[float, float, int]]) -> None:
    """Whatever comes, a program loses the allowance, the share, one recording and what is made between two counts at most."""
    case, opened = Case(), list[Account]()
    spent_s = longest_s = saved_s = 0.0
    for pause_s, recording_s, replays in steps:
        case.now_s += pause_s
        case.replays += replays
        saved_s += replays * 4e-3
        if not case.budget.is_spent():
            opened.append(Account(case.kernels, functools.partial(float, 1e6 * recording_s / CONSEQUENCES)))
            case.budget.open(opened[-1], is_recorded=True)
            case.now_s += recording_s / CONSEQUENCES
            spent_s += recording_s
            longest_s = max(longest_s, recording_s)

    uncounted_s = CONSEQUENCES * SAVED_EVERY_S
    assert spent_s <= ALLOWANCE_S + SHARE * case.now_s + saved_s + longest_s + uncounted_s + 1e-6


def test_each_call_of_a_size_that_waits_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    case, asked = Case(), list[float]()
    case.record(ALLOWANCE_S + 10)

    def debt_s() -> float:
        asked.append(case.now_s)
        return 100.0

    monkeypatch.setattr(case.budget, "_debt_s", debt_s)
    for _ in range(100):
        assert case.budget.is_spent()
        case.now_s += ASKED_EVERY_S / 10

    assert len(asked) in range(9, 12)
