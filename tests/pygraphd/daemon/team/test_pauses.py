"""When the team is asked: pauses after failures, and each graph once for some time."""

from __future__ import annotations

import pytest

from pygraphd.daemon.team import wanted as module
from pygraphd.daemon.team.backoff import Backoff
from pygraphd.daemon.team.wanted import AGAIN_S, Batch, Wanted

ENVIRONMENT, OTHER = "e" * 64, "f" * 64


class Clock:
    """A clock that stands still until it is set."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def wanted(clock: Clock) -> Wanted:
    return Wanted(clock)


def test_pauses_double_up_to_the_longest_and_end_with_success(clock: Clock) -> None:
    backoff = Backoff(1.0, 10.0, clock, lambda: 1.0)
    assert backoff.wait_s == 0
    waits = []
    for _ in range(6):
        backoff.failed()
        waits.append(backoff.wait_s)
        clock.now += backoff.wait_s
        assert backoff.wait_s == 0
        assert backoff.has_failed
    assert waits == pytest.approx([1, 2, 4, 8, 10, 10])
    backoff.succeeded()
    assert not backoff.has_failed


def test_pauses_are_spread(clock: Clock) -> None:
    soon, late = Backoff(8.0, 10.0, clock, lambda: 0.0), Backoff(8.0, 10.0, clock, lambda: 1.0)
    soon.failed()
    late.failed()
    assert (soon.wait_s, late.wait_s) == (4.0, 8.0)


def test_each_graph_is_asked_for_once_until_some_time_after_the_answer(clock: Clock, wanted: Wanted) -> None:
    assert wanted.add(ENVIRONMENT, ["a", "b"])
    assert not wanted.add(ENVIRONMENT, ["b"])
    assert wanted.take() == Batch(ENVIRONMENT, ("a", "b"))
    assert not wanted.add(ENVIRONMENT, ["a"])
    assert wanted.take() is None
    wanted.answered(Batch(ENVIRONMENT, ("a", "b")))
    clock.now += AGAIN_S - 1
    assert not wanted.add(ENVIRONMENT, ["a"])
    clock.now += 1
    assert wanted.add(ENVIRONMENT, ["a"])


def test_a_batch_has_one_environment(wanted: Wanted) -> None:
    wanted.add(ENVIRONMENT, ["a"])
    wanted.add(OTHER, ["a"])
    wanted.add(ENVIRONMENT, ["b"])
    assert [wanted.take(), wanted.take()] == [Batch(ENVIRONMENT, ("a", "b")), Batch(OTHER, ("a",))]


def test_what_could_not_be_asked_comes_first_again(wanted: Wanted) -> None:
    wanted.add(ENVIRONMENT, ["a"])
    batch = wanted.take()
    assert batch is not None
    wanted.add(OTHER, ["b"])
    wanted.put_back(batch)
    assert wanted.take() == batch


def test_a_graph_is_awaited_for_a_moment_and_until_the_answer(clock: Clock, wanted: Wanted) -> None:
    wanted.add(ENVIRONMENT, ["a", "b"])
    assert wanted.is_awaited(ENVIRONMENT, "a", 0.5)
    assert not wanted.is_awaited(OTHER, "a", 0.5)
    batch = wanted.take()
    assert batch is not None
    assert wanted.is_awaited(ENVIRONMENT, "a", 0.5)
    clock.now += 0.5
    assert not wanted.is_awaited(ENVIRONMENT, "a", 0.5)
    assert wanted.is_awaited(ENVIRONMENT, "a", 0.6)
    wanted.answered(batch)
    assert not wanted.is_awaited(ENVIRONMENT, "a", 0.6)


def test_few_are_kept(wanted: Wanted, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    monkeypatch.setattr(module, "MAX_ANSWERED", 1)
    wanted.add(ENVIRONMENT, ["a", "b", "c"])
    batch = Batch(ENVIRONMENT, ("b", "c"))
    assert wanted.take() == batch
    wanted.answered(batch)
    assert wanted.add(ENVIRONMENT, ["b"])
    assert not wanted.add(ENVIRONMENT, ["c"])
