"""Recordings that disagree are tried again a few times, with more buffers each time, and never without end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.recording.comparison import Disagreement
from pygraphd.client.recording.size_slot import Disagreements, Persistence

pytestmark = pytest.mark.torch

DIFFERS = Disagreement("output 0 differs", in_values=True)


@given(st.lists(st.frozensets(st.integers(0, 3)), min_size=12, max_size=12))
def test_whatever_is_unseen_each_time_it_comes_to_an_end(unseen: list[frozenset[int]]) -> None:
    """What shows up in no node may be another input each time."""
    found = Disagreements()
    said = [found.add(DIFFERS, each) for each in unseen]

    again = [each for each in said if each is Persistence.ONE_CALL]
    assert said[0] is Persistence.ONE_CALL  # by chance
    assert len(again) <= 1 + 4  # each further one has a buffer more
    assert next(each for each in said if each is not Persistence.ONE_CALL) is Persistence.PERMANENT


def test_another_reason_each_time_says_nothing_of_the_graph() -> None:
    found = Disagreements()
    found.add(DIFFERS, frozenset())

    assert found.add(Disagreement("output 1 differs"), frozenset()) is Persistence.PROCESS


def test_what_has_agreed_since_may_disagree_once_more() -> None:
    found = Disagreements()
    found.add(DIFFERS, frozenset())
    found.latest = None

    assert found.add(DIFFERS, frozenset()) is Persistence.ONE_CALL
