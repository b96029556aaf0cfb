"""Where the temporaries of a recording lie in its scratch memory: those that no two nodes need at a time share a place.

During the capture the allocator could do so only with what was let go of there. A library's workspace (32 MiB, cuBLAS's) is kept to
the end, whether one node uses it or none does. Pure arithmetic; knows neither torch nor CUDA.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.client.relocation import BLOCK, Table, blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pygraphd.client.relocation import Span

Use = tuple[int, int]
"""The positions of the first and the last node that has an address within a temporary."""
SMALL_BYTES = 64 << 10
"""Smaller temporaries share nothing: there are many, and they come to little."""


def one_after_the_other(nodes: Iterable[int], edges: Sequence[tuple[int, int]]) -> dict[int, int] | None:
    """Return the position of each node if each but one follows exactly one other; None if two may run at a time."""
    following = dict(edges)
    followers = set(following.values())
    firsts = [node for node in nodes if node not in followers]
    if len(firsts) != 1 or not len(edges) == len(following) == len(followers):
        return None
    positions, node = {firsts[0]: 0}, firsts[0]
    while (node := following.get(node, 0)) and node not in positions:
        positions[node] = len(positions)
    return positions if len(positions) == len(edges) + 1 else None


def uses(nodes: Iterable[Sequence[int]], positions: Mapping[int, int] | None) -> list[Use | None]:
    """Return the uses of temporaries, given the nodes that have addresses in each; None: no node has.

    Without `positions` all may be needed at a time.
    """
    if positions is None:
        return [(0, 0) if each else None for each in nodes]
    found = [[positions[node] for node in each] for each in nodes]
    return [(min(each), max(each)) if each else None for each in found]


def lay_out(spans: Sequence[Span], used: Sequence[Use | None]) -> tuple[tuple[int, ...], int]:
    """Return where each temporary begins in one allocation, and the whole size in bytes.

    What lay at a multiple of `BLOCK` does so again. What no node has an address in takes no memory, and begins at 0.
    """
    offsets, end = [0] * len(spans), 0
    taken: list[tuple[int, int, Use]] = []
    for index in sorted(range(len(spans)), key=lambda index: -spans[index].size):
        use, span = used[index], spans[index]
        if use is None:
            continue
        rest = span.start % BLOCK
        if span.size < SMALL_BYTES:
            start = end
        else:
            start = _first_gap(rest + span.size, [each for each in taken if _meet(each[2], use)])
            taken.append((start, start + blocks(rest + span.size) * BLOCK, use))
        offsets[index] = start + rest
        end = max(end, start + blocks(rest + span.size) * BLOCK)
    return tuple(offsets), end


def _meet(one: Use, other: Use) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def _first_gap(size: int, taken: list[tuple[int, int, Use]]) -> int:
    """Return the lowest start of so many bytes among ranges that may overlap."""
    start = 0
    for begin, end, _ in sorted(taken):
        if start + size <= begin:
            break
        start = max(start, end)
    return start


def as_one(table: Table, first: int, offsets: Sequence[int]) -> Table:
    """Return a table whose slots from `first` on, of temporaries, are one, in which these begin at `offsets`."""
    places = [
        (index, offset + begin)
        for slot, begin in zip(table.places[first:], offsets, strict=True)
        for index, offset in slot
    ]
    nodes = dict.fromkeys(node for slot in table.nodes[first:] for node in slot)
    return Table((*table.places[:first], tuple(places)), (*table.nodes[:first], tuple(nodes)))
