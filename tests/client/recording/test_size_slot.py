"""Recordings that disagree are tried again once."""

from __future__ import annotations

import pytest

from pygraphd.client.recording.comparison import Disagreement
from pygraphd.client.recording.size_slot import Disagreements, Persistence

pytestmark = pytest.mark.torch

DIFFERS = Disagreement("output 0 differs", in_values=True)


def test_the_same_difference_twice_lies_in_the_graph() -> None:
    found = Disagreements()

    assert [found.add(DIFFERS) for _ in range(2)] == [Persistence.ONE_CALL, Persistence.PERMANENT]


def test_another_reason_each_time_says_nothing_of_the_graph() -> None:
    found = Disagreements()
    found.add(DIFFERS)

    assert found.add(Disagreement("output 1 differs")) is Persistence.PROCESS


def test_what_has_agreed_since_may_disagree_once_more() -> None:
    found = Disagreements()
    found.add(DIFFERS)
    found.latest = None

    assert found.add(DIFFERS) is Persistence.ONE_CALL
