"""Finds the words of a recording that are addresses, by pure arithmetic on address ranges. Needs neither torch nor CUDA.

A *segment* is what moves as one: a group of inputs that overlap, the storage of an output, or a piece of scratch memory. Segments are
numbered. A `RelocationTable` has for each of them the words that hold an address in it, and the nodes that these words belong to.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

BLOCK = 512
"""The allocator's granularity, in bytes: every allocation begins at a multiple of it."""
PAGE = 2 << 20
"""The device's granularity: the allocator's memory ends at a multiple of it, and other memory may begin there."""
MAX_ALIGNMENT = 256
"""Libraries choose kernels by alignment up to this many bytes, and by no more."""
IN_PLACE = -1
"""The number of the segment that does not move."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Addresses from `start` up to and without `end`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SegmentRange:
    """A range of addresses in the segment of this number, `base` bytes from where that begins."""

    span: Span
    number: int
    base: int = 0


# To compare spans themselves takes ten times as long, and there are thousands.
_span_begins = operator.attrgetter("start")
_segment_begins = operator.attrgetter("span.start")


@dataclass(frozen=True, slots=True)
class RelocationTable:
    """For each segment: its words as (index, bytes from the segment's base), and the nodes that these belong to."""

    words: tuple[tuple[tuple[int, int], ...], ...]
    nodes: tuple[tuple[int, ...], ...]
    ambiguous: tuple[int, ...] = ()
    """The words within structures: padding may hold a number that only looks like an address; see `false_pointers`."""


def scan(
    words: Sequence[int],
    candidates: Iterable[tuple[range, int]],
    ranges: Iterable[SegmentRange],
    count: int,
    without: Container[int] = (),
) -> RelocationTable:
    """Return the words that hold an address within one of `ranges`, which must not overlap, or the address at its end.

    The end of one range may be the start of another, which then has the address; at a page border it is in none. `candidates` are the
    words to look at, as (indices, node): those of one argument or copy. Words in `without` hold no address. There are `count` segments.
    """
    ordered = sorted(ranges, key=_segment_begins)
    starts = [each.span.start for each in ordered]
    # Most words are sizes, strides and scales: tens of thousands in a large graph.
    low, high = (starts[0], ordered[-1].span.end) if ordered else (1, 0)
    found: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    nodes: list[dict[int, None]] = [{} for _ in range(count)]
    ambiguous: list[int] = []
    for indices, node in candidates:
        for index in indices:
            value = words[index]
            if not low <= value <= high:
                continue
            at = ordered[bisect.bisect_right(starts, value) - 1]
            if _is_beyond(value, at.span.end) or at.number == IN_PLACE or index in without:
                continue
            found[at.number].append((index, value - at.span.start + at.base))
            nodes[at.number][node] = None
            # A single word is an argument by itself, and the words of a copy lie apart: neither has padding.
            if len(indices) > 1 and indices.step == 1:
                ambiguous.append(index)
    return RelocationTable(tuple(map(tuple, found)), tuple(map(tuple, nodes)), tuple(ambiguous))


def in_pieces(
    table: RelocationTable, first: int, spans: Sequence[Span], share: Share
) -> tuple[RelocationTable, list[int]]:
    """Join the segments from `first` on, which lie in `spans`, to pieces; return the new table and the sizes of the pieces in bytes.

    In a piece, spans lie one after the other. A span in which no word holds an address is left out: no kernel reaches it.
    """
    used = [index for index, words in enumerate(table.words[first:]) if words]
    words, nodes, sizes = [*table.words[:first]], [*table.nodes[:first]], []
    # Spans never share memory, even if one is dead before the other begins. A kernel may reach a tensor by an address
    # that an earlier kernel wrote into memory, and so need it for longer than its nodes show.
    for piece in share.pieces([blocks(spans[index].size) * BLOCK for index in used]):
        members = [used[number] for number in piece]
        offsets, size = pack([spans[index] for index in members])
        words.append(
            tuple(
                (word, offset + begin)
                for index, begin in zip(members, offsets, strict=True)
                for word, offset in table.words[first + index]
            )
        )
        found = (table.nodes[first + index] for index in members)
        # A node with addresses in several of the spans is written once.
        nodes.append(tuple(dict.fromkeys(itertools.chain.from_iterable(found))))
        sizes.append(size)
    return RelocationTable(tuple(words), tuple(nodes), table.ambiguous), sizes


@dataclass(frozen=True, slots=True)
class Share:
    """How memory is cut into pieces: about how many, with the smallest and the largest size in bytes."""

    count: int
    least: int
    most: int | None = None

    def limit(self, total: int) -> int:
        """Return the largest size of a piece of `total` bytes."""
        limit = max(self.least, total // self.count)
        return limit if self.most is None else min(limit, self.most)

    def pieces(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return the pieces, as indices of `sizes`: a size above the limit is alone, others share a piece until it is full."""
        limit = self.limit(sum(sizes))
        pieces: list[list[int]] = []
        open_piece, taken = -1, 0
        for number, size in enumerate(sizes):
            if size > limit:
                pieces.append([number])
                continue
            if open_piece < 0 or taken + size > limit:
                open_piece, taken = len(pieces), 0
                pieces.append([])
            pieces[open_piece].append(number)
            taken += size
        return pieces


def _is_beyond(value: int, end: int) -> bool:
    # At the border of a page other memory may begin, as that of a constant, whose address must not move.
    return value > end or (value == end and not value % PAGE)


def outside(
    words: Sequence[int], candidates: Iterable[tuple[range, int]], segments: Iterable[SegmentRange]
) -> set[int]:
    """Return the values of the candidates that are no address within `segments`, which must not overlap; see `scan`."""
    ordered = sorted(segments, key=_segment_begins)
    starts = [segment.span.start for segment in ordered]
    ends = [-1, *(segment.span.end for segment in ordered)]
    values: set[int] = set()
    for indices, _ in candidates:
        values.update(words[indices.start : indices.stop : indices.step])
    return {value for value in values if _is_beyond(value, ends[bisect.bisect_right(starts, value)])}


def merge(spans: Iterable[Span]) -> list[Span]:
    """Join spans that overlap, transitively; spans that only touch stay apart. Empty ones are left out."""
    merged: list[Span] = []
    for span in sorted(spans, key=_span_begins):
        if not span.size:
            continue
        if merged and span.start < merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def find(spans: Sequence[Span], address: int) -> int | None:
    """Return the index of the span that holds an address; `spans` are sorted and disjoint."""
    index = bisect.bisect_right(spans, address, key=_span_begins) - 1
    return index if index >= 0 and address < spans[index].end else None


def pack(spans: Sequence[Span]) -> tuple[tuple[int, ...], int]:
    """Lay spans one after the other in one allocation; return the offset of each, and the whole size, in bytes.

    A span at a multiple of `BLOCK` has such an offset again, and none is aligned worse than before.
    """
    offsets, end = [], 0
    for span in spans:
        start = end + span.start % BLOCK
        offsets.append(start)
        end = blocks(start + span.size) * BLOCK
    return tuple(offsets), end


def blocks(size: int) -> int:
    """Return the number of the allocator's blocks that `size` bytes take."""
    return -(-size // BLOCK)


def alignment(address: int) -> int:
    """Return the largest power of two, up to `MAX_ALIGNMENT`, that divides an address."""
    return min(address & -address, MAX_ALIGNMENT) or MAX_ALIGNMENT
