"""Address arithmetic: spans that join, words that are found, memory that is laid out anew."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.replay.relocation_table import (
    BLOCK,
    PAGE,
    RelocationTable,
    SegmentRange,
    Share,
    Span,
    alignment,
    find,
    in_pieces,
    merge,
    outside,
    pack,
    scan,
)

SPANS = st.lists(
    st.builds(lambda start, size: Span(start, start + size), st.integers(1, 200), st.integers(0, 40))
)


def addresses(spans: list[Span]) -> set[int]:
    return {address for span in spans for address in range(span.start, span.end)}


@given(SPANS)
def test_merging_keeps_every_address_and_leaves_nothing_that_overlaps(spans: list[Span]) -> None:
    merged = merge(spans)

    assert addresses(merged) == addresses(spans)
    assert merged == sorted(merged)
    assert sum(span.size for span in merged) == len(addresses(merged))


@given(SPANS)
def test_spans_are_in_one_cluster_exactly_if_a_chain_of_overlaps_joins_them(spans: list[Span]) -> None:
    merged = merge(spans)

    for span in filter(lambda span: span.size, spans):
        cluster = merged[find(merged, span.start) or 0]
        assert cluster.start <= span.start
        assert span.end <= cluster.end
    # Two of them that only touch are not joined: each inner border of a cluster is crossed by a span.
    for cluster in merged:
        for border in range(cluster.start + 1, cluster.end):
            assert any(span.start < border < span.end for span in spans)


@given(SPANS, st.integers(0, 260))
def test_find_agrees_with_looking_at_each(spans: list[Span], address: int) -> None:
    merged = merge(spans)

    holding = [index for index, span in enumerate(merged) if span.start <= address < span.end]

    assert find(merged, address) == (holding[0] if holding else None)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 3), st.integers(1, 5000)), max_size=8))
def test_packed_spans_do_not_overlap_and_keep_their_alignment(parts: list[tuple[int, int, int]]) -> None:
    spans, address = [], 0
    for blocks, shift, size in parts:
        address += blocks * BLOCK * 16
        spans.append(Span(address + shift, address + shift + size))

    offsets, total = pack(spans)

    placed = [Span(offset, offset + span.size) for offset, span in zip(offsets, spans, strict=True)]
    assert len(merge(placed)) == len(placed)
    assert all(place.end <= total for place in placed)
    assert all(place.start % BLOCK == span.start % BLOCK for place, span in zip(placed, spans, strict=True))


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 5)), max_size=30))
def test_scan_finds_exactly_the_words_within_segments(found: list[tuple[int, int]]) -> None:
    segments = [
        SegmentRange(Span(100, 150), 0),
        SegmentRange(Span(150, 160), 1),
        SegmentRange(Span(300, 310), 2),
    ]
    words = [value for value, _ in found]
    candidates = [(range(index, index + 1), node) for index, (_, node) in enumerate(found)]

    table = scan(words, candidates, segments, count=3)

    expected: list[set[tuple[int, int]]] = [set(), set(), set()]
    for index, value in enumerate(words):
        for segment in segments:
            within = segment.span.start <= value < segment.span.end
            if within or (value == segment.span.end and not any(value == s.span.start for s in segments)):
                expected[segment.number].add((index, value - segment.span.start))
    assert [set(places) for places in table.words] == expected
    for slot, places in enumerate(table.words):
        assert set(table.nodes[slot]) == {found[index][1] for index, _ in places}


def test_the_end_of_a_page_is_nobodys_that_is_known() -> None:
    """Other memory of the device may begin there, as of a constant: moving with what ends there, it would be lost."""
    segments = [SegmentRange(Span(PAGE - 512, PAGE), 0), SegmentRange(Span(3 * PAGE, 3 * PAGE + 512), 1)]
    words = [PAGE - 1, PAGE, 3 * PAGE, 3 * PAGE + 512]

    table = scan(words, [(range(4), 0)], segments, count=2)

    assert table.words == (((0, 511),), ((2, 0), (3, 512)))
    assert outside(words, [(range(4), 0)], segments) == {PAGE}


def test_a_word_that_is_no_candidate_is_left_alone() -> None:
    table = scan([100] * 6, [(range(1, 6, 3), 0)], [SegmentRange(Span(100, 101), 0)], count=1)

    assert table.words == (((1, 0), (4, 0)),)


def test_without_segments_nothing_is_found() -> None:
    assert scan([0, 1, 100], [(range(3), 0)], [], count=0).words == ()


def test_alignment_is_a_power_of_two_up_to_what_libraries_ask_for() -> None:
    assert [alignment(address) for address in (1, 6, 48, 256, 4096, 0)] == [1, 2, 16, 256, 256, 256]


def test_slots_of_a_piece_lie_one_after_the_other_without_those_that_nobody_knows_of() -> None:
    table = RelocationTable((((0, 8),), ((1, 0), (2, 4)), (), ((3, 12),)), ((0,), (0, 1), (), (1, 2)))
    spans = [Span(BLOCK, BLOCK + 600), Span(9 * BLOCK, 20 * BLOCK), Span(30 * BLOCK + 256, 31 * BLOCK)]

    assert in_pieces(table, 1, spans, Share(1, BLOCK)) == (
        RelocationTable((((0, 8),), ((1, 0), (2, 4), (3, 2 * BLOCK + 256 + 12))), ((0,), (0, 1, 2))),
        [3 * BLOCK],
    )
    assert in_pieces(table, 1, spans, Share(2, BLOCK)) == (
        RelocationTable((((0, 8),), ((1, 0), (2, 4)), ((3, 256 + 12),)), ((0,), (0, 1), (1, 2))),
        [2 * BLOCK, BLOCK],
    )


def test_slots_that_nobody_knows_of_are_none() -> None:
    table = RelocationTable((((0, 8),), (), ()), ((0,), (), ()))

    assert in_pieces(table, 1, [Span(0, 600), Span(600, 800)], Share(1, BLOCK)) == (
        RelocationTable((((0, 8),),), ((0,),)),
        [],
    )
    assert in_pieces(table, 3, [], Share(1, BLOCK)) == (table, [])


@given(
    st.lists(st.integers(1, 100), max_size=40),
    st.integers(1, 8),
    st.integers(1, 50),
    st.none() | st.integers(1, 60),
)
def test_pieces_have_each_once_and_are_as_large_as_they_may_be_and_few(
    sizes: list[int], count: int, least: int, most: int | None
) -> None:
    share = Share(count, least, most)
    pieces, limit = share.pieces(sizes), share.limit(sum(sizes))

    assert sorted(number for piece in pieces for number in piece) == [*range(len(sizes))]
    assert all(sum(sizes[number] for number in piece) <= limit or len(piece) == 1 for piece in pieces)
    assert all(piece == sorted(piece) for piece in pieces)
    if most is None:
        # Any two pieces that were closed one after the other are more than one may be.
        assert len(pieces) <= 3 * count + 2
    else:
        assert limit <= most
