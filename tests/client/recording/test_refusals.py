"""Recordings that disagree are tried again a few times, with more buffers each time, and never without end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.recording.comparison import Disagreement
from pygraphd.client.recording.refusals import FIRST_LOOK, Disagreements, Lasts, Refusals

pytestmark = pytest.mark.torch

DIFFERS = Disagreement("output 0 differs", in_values=True)


@given(st.lists(st.frozensets(st.integers(0, 3)), min_size=12, max_size=12))
def test_whatever_is_unseen_each_time_it_comes_to_an_end(unseen: list[frozenset[int]]) -> None:
    """What shows up in no node may be another input each time."""
    found = Disagreements()
    said = [found.add((), DIFFERS, each) for each in unseen]

    assert said[0] is None  # by chance
    assert said.count(None) <= 1 + 4  # each further one has a buffer more
    assert said[said.index(next(filter(None, said)))] is Lasts.IN_THE_GRAPH


def test_another_reason_each_time_says_nothing_of_the_graph() -> None:
    found = Disagreements()
    found.add((), DIFFERS, frozenset())

    assert found.add((), Disagreement("output 1 differs"), frozenset()) is Lasts.IN_THIS_PROCESS


def test_what_has_agreed_since_may_disagree_once_more() -> None:
    found = Disagreements()
    found.add((), DIFFERS, frozenset())
    found.forget(())

    assert found.add((), DIFFERS, frozenset()) is None


def test_what_is_refused_for_now_is_looked_at_more_and_more_seldom() -> None:
    refusals = Refusals()
    due = [call for call in range(1, 300) if refusals.is_due(())]

    assert due == [FIRST_LOOK * 2**n for n in range(5)]
