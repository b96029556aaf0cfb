"""Which words of a recording are addresses, and of what: pure arithmetic on address ranges; knows neither torch nor CUDA.

Everything that can move by itself has a *slot*: a group of inputs that overlap, an output's storage, a piece of scratch memory. A
`Table` says for each slot which words follow it, and which nodes have to be written then.
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
"""The slot of what does not move."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Addresses from `start` up to and without `end`."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of addresses that lies in a slot's memory, `base` bytes from where that begins."""

    span: Span
    slot: int
    base: int = 0


# To compare spans themselves takes ten times as long, and there are thousands.
_span_begins = operator.attrgetter("start")
_segment_begins = operator.attrgetter("span.start")


@dataclass(frozen=True, slots=True)
class Table:
    """For each slot: its words as (index, offset from the slot's base), and the nodes that these belong to."""

    places: tuple[tuple[tuple[int, int], ...], ...]
    nodes: tuple[tuple[int, ...], ...]
    doubtful: tuple[int, ...] = ()
    """Of these words those in a structure, whose gaps may hold what only looks like an address; see `false_pointers`."""

    def unseen(self) -> frozenset[int]:
        """Return the slots that show up in no node: unused, or reached in a way that relocation cannot see."""
        return frozenset(slot for slot, places in enumerate(self.places) if not places)


def scan(
    words: Sequence[int],
    candidates: Iterable[tuple[range, int]],
    segments: Iterable[Segment],
    slots: int,
    without: Container[int] = (),
) -> Table:
    """Find the words that hold addresses within `segments`, which must not overlap, or the address where one ends.

    Where another segment begins there, it is that one's; and at the border of a page, nobody's that is known. `candidates` are the
    words to look at, as (indices, node): those of an argument, or apart those of a copy. Words `without` are known to hold none.
    """
    ordered = sorted(segments, key=_segment_begins)
    starts = [segment.span.start for segment in ordered]
    # Most words are sizes, strides and scales: tens of thousands in a large graph.
    low, high = (starts[0], ordered[-1].span.end) if ordered else (1, 0)
    places: list[list[tuple[int, int]]] = [[] for _ in range(slots)]
    nodes: list[dict[int, None]] = [{} for _ in range(slots)]
    doubtful: list[int] = []
    for indices, node in candidates:
        for index in indices:
            value = words[index]
            if not low <= value <= high:
                continue
            segment = ordered[bisect.bisect_right(starts, value) - 1]
            if _is_beyond(value, segment.span.end) or segment.slot == IN_PLACE or index in without:
                continue
            places[segment.slot].append((index, value - segment.span.start + segment.base))
            nodes[segment.slot][node] = None
            if len(indices) > 1 and indices.step == 1:
                doubtful.append(index)
    return Table(tuple(map(tuple, places)), tuple(map(tuple, nodes)), tuple(doubtful))


def in_pieces(table: Table, first: int, spans: Sequence[Span], share: Share) -> tuple[Table, list[int]]:
    """Return a table whose slots from `first` on, in `spans`, are pieces in which these lie one after the other, and their sizes in bytes.

    A span that no word points into is left out: nothing in the graph knows where it is.
    """
    seen = [place for place, places in enumerate(table.places[first:]) if places]
    places, nodes, sizes = [*table.places[:first]], [*table.nodes[:first]], []
    for piece in share.pieces([blocks(spans[place].size) * BLOCK for place in seen]):
        slots = [seen[number] for number in piece]
        offsets, size = pack([spans[place] for place in slots])
        places.append(
            tuple(
                (index, offset + begin)
                for place, begin in zip(slots, offsets, strict=True)
                for index, offset in table.places[first + place]
            )
        )
        found = (table.nodes[first + place] for place in slots)
        nodes.append(tuple(dict.fromkeys(itertools.chain.from_iterable(found))))
        sizes.append(size)
    return Table(tuple(places), tuple(nodes), table.doubtful), sizes


@dataclass(frozen=True, slots=True)
class Share:
    """Into how many pieces something is to be cut, about, and how large each may be at least and at most, in bytes."""

    count: int
    least: int
    most: int | None = None

    def limit(self, total: int) -> int:
        """Return how large a piece of so much may be."""
        limit = max(self.least, total // self.count)
        return limit if self.most is None else min(limit, self.most)

    def pieces(self, sizes: Sequence[int]) -> list[list[int]]:
        """Return which of these go together, by number: those that are larger than a piece may be alone, others as many as there is room for."""
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
    return value > end or (value == end and not value % PAGE)


def _at(words: Sequence[int], indices: range) -> Sequence[int]:
    return words[indices.start : indices.stop : indices.step]


def outside(
    words: Sequence[int], candidates: Iterable[tuple[range, int]], segments: Iterable[Segment]
) -> set[int]:
    """Return the values of candidates that are no addresses within `segments`, which must not overlap; see `scan`."""
    ordered = sorted(segments, key=_segment_begins)
    starts = [segment.span.start for segment in ordered]
    ends = [-1, *(segment.span.end for segment in ordered)]
    values: set[int] = set()
    for indices, _ in candidates:
        values.update(_at(words, indices))
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
    """Lay spans one after the other in one allocation; return where each begins, and the whole size in bytes.

    What lay at a multiple of `BLOCK` does so again, and nothing is aligned worse than it was.
    """
    offsets, end = [], 0
    for span in spans:
        start = end + span.start % BLOCK
        offsets.append(start)
        end = blocks(start + span.size) * BLOCK
    return tuple(offsets), end


def blocks(size: int) -> int:
    """Return how many of the allocator's blocks `size` bytes take."""
    return -(-size // BLOCK)


def alignment(address: int) -> int:
    """Return the power of two, `MAX_ALIGNMENT` at most, that an address is a multiple of."""
    return min(address & -address, MAX_ALIGNMENT) or MAX_ALIGNMENT
