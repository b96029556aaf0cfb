"""Temporaries that share memory: never two that a node may need at a time."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client import scratch
from pygraphd.client.relocation import BLOCK, Span, Table

KB = 1024
SPANS = st.lists(
    st.builds(
        lambda start, size: Span(start * 128, start * 128 + size),
        st.integers(1, 1000),
        st.one_of(st.integers(1, 4 * KB), st.integers(60 * KB, 400 * KB)),
    ),
    max_size=12,
)
USE = st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9)).map(lambda ends: (min(ends), max(ends)))


@given(SPANS, st.data())
def test_no_two_temporaries_that_are_needed_at_a_time_overlap(spans: list[Span], data: st.DataObject) -> None:
    used = data.draw(st.lists(USE, min_size=len(spans), max_size=len(spans)))

    offsets, size = scratch.lay_out(spans, used)

    there = [
        (begin, begin + span.size, use)
        for begin, span, use in zip(offsets, spans, used, strict=True)
        if use is not None
    ]
    for (begin, end, one), (other_begin, other_end, other) in itertools.combinations(there, 2):
        apart = end <= other_begin or other_end <= begin
        assert apart or one[1] < other[0] or other[1] < one[0]
    assert all(0 <= begin < end <= size for begin, end, _ in there)
    for begin, span, use in zip(offsets, spans, used, strict=True):
        assert begin % BLOCK == (span.start % BLOCK if use is not None else 0)
    most = sum(-(-(span.start % BLOCK + span.size) // BLOCK) * BLOCK for span in spans)
    assert size % BLOCK == 0
    assert size <= most


def test_a_workspace_of_one_node_lies_where_later_ones_do() -> None:
    mb = 1 << 20
    spans = [Span(0, 32 * mb), Span(32 * mb, 50 * mb), Span(50 * mb, 60 * mb), Span(60 * mb, 68 * mb)]

    offsets, size = scratch.lay_out(spans, [(0, 1), (2, 9), (3, 5), (4, 9)])

    assert size == 36 * mb
    assert offsets == (0, 0, 18 * mb, 28 * mb)


@given(st.lists(st.integers(1, 1000), min_size=1, unique=True), st.integers())
def test_nodes_in_a_row_have_the_positions_of_their_order(nodes: list[int], seed: int) -> None:
    edges = list(itertools.pairwise(nodes))
    shuffled, listed = list(edges), list(nodes)
    random.Random(seed).shuffle(shuffled)
    random.Random(seed).shuffle(listed)

    assert scratch.one_after_the_other(listed, shuffled) == {
        node: position for position, node in enumerate(nodes)
    }


def test_nodes_that_may_run_side_by_side_have_no_positions() -> None:
    assert scratch.one_after_the_other([1, 2, 3], [(1, 2)]) is None
    assert scratch.one_after_the_other([1, 2, 3], [(1, 2), (1, 3)]) is None
    assert scratch.one_after_the_other([1, 2, 3], [(1, 3), (2, 3)]) is None
    assert scratch.one_after_the_other([1, 2, 3], [(1, 2), (2, 3), (1, 3)]) is None
    assert scratch.one_after_the_other([1, 2, 3], [(2, 3), (3, 2)]) is None
    assert scratch.one_after_the_other([], []) is None


def test_without_positions_all_that_nodes_know_of_may_be_needed_at_a_time() -> None:
    assert scratch.uses([(0, 2), (), (1,)], None) == [(0, 0), None, (0, 0)]
    assert scratch.uses([(0, 2), (), (1,)], {0: 5, 1: 6, 2: 9}) == [(5, 9), None, (6, 6)]


def test_temporaries_become_one_slot() -> None:
    table = Table((((0, 8),), ((1, 0), (2, 4)), ((3, 12),)), ((0,), (0, 1), (1, 2)))

    assert scratch.as_one(table, 1, (512, 1024)) == Table(
        (((0, 8),), ((1, 512), (2, 516), (3, 1036))), ((0,), (0, 1, 2))
    )
