"""How much of the GPU's time after a call is hidden: by what the host is known to do meanwhile, and by no wait of its."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.slack import WAIT_US, add_slack
from pygraphd.client.timeline import Entry
from pygraphd.schema.messages import Deployment

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
HEAVY, SMALL = 1, 2
PAUSE_US = 5.0


def call(region: int, host_us: float, span_us: float, deployment: Deployment = KERNELS) -> Entry:
    return Entry(region, deployment, True, False, 0.0, host_us, span_us, lead_us=1.0)


def in_a_row(entries: list[Entry], pauses_us: list[float] | None = None) -> list[Entry]:
    """Let calls come one after the other, and say what comes after each."""
    now_us = 0.0
    for entry, pause_us in zip(entries, pauses_us or [PAUSE_US] * len(entries), strict=True):
        entry.began_us = now_us
        now_us += entry.host_us + pause_us
    add_slack([*itertools.pairwise(entries), (entries[-1], None)])
    return entries


def test_what_small_graphs_take_on_the_host_hides_a_heavy_one_before_them() -> None:
    heavy, *small = in_a_row([call(HEAVY, 30, 400), *[call(SMALL, 50, 10) for _ in range(4)]])

    assert heavy.after_us == 4 * (PAUSE_US + 40)
    assert heavy.shown_us == 400 - heavy.after_us
    assert [each.after_us for each in small] == [3 * 45, 2 * 45, 45, 0]


def test_how_they_will_be_deployed_is_not_known_so_that_their_shortest_time_counts() -> None:
    captured = call(SMALL, 12, 10, GRAPH)
    heavy, *_ = in_a_row([call(HEAVY, 30, 400), call(SMALL, 50, 10), captured])

    assert heavy.after_us == PAUSE_US + 2 + PAUSE_US + 2


def test_what_the_gpu_is_behind_with_gives_nothing() -> None:
    first, *_ = in_a_row([call(SMALL, 50, 10), *[call(HEAVY, 30, 400) for _ in range(4)]])

    assert first.after_us == PAUSE_US


@pytest.mark.parametrize(("waited_us", "hidden"), [(WAIT_US, True), (4 * WAIT_US, False)])
def test_a_long_pause_may_be_a_wait(waited_us: float, hidden: bool) -> None:
    entries = [call(HEAVY, 30, 400), call(SMALL, 50, 10), call(HEAVY, 30, 400), call(SMALL, 50, 10)]

    heavy, *_ = in_a_row(entries, [PAUSE_US, PAUSE_US, PAUSE_US + waited_us, PAUSE_US])

    assert entries[2].after_us == (PAUSE_US + 40 if hidden else 0)
    assert heavy.after_us == PAUSE_US + 40 + PAUSE_US


def test_where_the_gpu_was_always_done_the_host_may_have_waited() -> None:
    after = call(SMALL, 50, 10)
    after.apart = True

    heavy, _ = in_a_row([call(HEAVY, 30, 400), after])

    assert heavy.after_us == 0


TIMES = st.floats(0, 1e4)


@given(st.lists(st.tuples(st.sampled_from([HEAVY, SMALL]), TIMES, TIMES, TIMES, st.booleans()), min_size=1))
def test_no_more_is_hidden_than_the_host_does_until_the_end(
    calls: list[tuple[int, float, float, float, bool]],
) -> None:
    entries = [call(region, host_us, span_us) for region, host_us, span_us, _, _ in calls]
    for entry, (*_, apart) in zip(entries, calls, strict=True):
        entry.apart = apart
    in_a_row(entries, [pause_us for *_, pause_us, _ in calls])

    end_us = entries[-1].began_us + sum(max(each.host_us for each in entries) for _ in entries)
    assert all(0 <= each.after_us <= end_us - each.began_us + 1e-6 for each in entries)
