"""Waits between attempts."""

from __future__ import annotations

from pygraphd.client.common.backoff import Backoff


def test_waits_grow_up_to_the_longest() -> None:
    backoff, now, waits = Backoff(0.5, longest=3.0, now=10.0), 10.0, []
    for _ in range(5):
        began = now
        while not backoff.is_due(now):
            now += 0.25
        waits.append(now - began)
        backoff.postpone(now)

    assert waits == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_an_attempt_that_comes_late_is_waited_for_from_then_on() -> None:
    backoff = Backoff(1.0)

    backoff.postpone(100.0)

    assert [backoff.is_due(now) for now in (101.0, 102.0)] == [False, True]


def test_calls_are_counted() -> None:
    backoff = Backoff(2, 4)

    assert [call for call in range(1, 50) if backoff.count()] == [2, 10, 42]
