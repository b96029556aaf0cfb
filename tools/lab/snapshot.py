"""Sums of a snapshot of PyTorch's allocator: by pool, by class of segment, by owner. Needs neither torch nor CUDA.

A segment is what the allocator has from the driver, and what is *reserved* is all of them. It is cut into blocks, which are given
out. A free part of a segment that holds something else cannot go back, and serves only what fits into it.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SMALL, MIDDLE, OWN, GROWING = "small", "20 MB", "of its own", "expandable"
"""Classes of segments: 2 MB for allocations up to 1 MB, 20 MB for those up to 10 MB, and one segment for each larger one."""
_MIDDLE_BYTES = 20 << 20
DEFAULT_POOL = "default"
OTHERS = "others"
"""The owner of blocks without a named owner."""
_ALLOCATED, _FREE = "active_allocated", "inactive"

Segment = dict[str, Any]
"""As `torch.cuda.memory_snapshot` gives it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some segments, in bytes."""

    segments: int = 0
    reserved: int = 0
    allocated: int = 0
    pending: int = 0
    """Given back, while another stream may still be using it."""
    fragments: int = 0
    """Free, in segments that hold something."""
    largest_fragment: int = 0
    empty: int = 0
    """In segments that hold nothing."""

    def plus(self, other: Part) -> Part:
        """Return both together."""
        return Part(
            self.segments + other.segments,
            self.reserved + other.reserved,
            self.allocated + other.allocated,
            self.pending + other.pending,
            self.fragments + other.fragments,
            max(self.largest_fragment, other.largest_fragment),
            self.empty + other.empty,
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """A snapshot."""

    all: Part
    by_pool: dict[str, Part]
    by_class: dict[str, Part]
    by_owner: dict[str, int]
    """Allocated bytes."""


class Owners:
    """Owners of blocks: names by address. The first address in a block names its owner."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names
        self._places = sorted(names)

    def of(self, block: Mapping[str, Any]) -> str:
        """Return who owns a block."""
        index = bisect.bisect_left(self._places, block["address"])
        if index < len(self._places) and self._places[index] < block["address"] + block["size"]:
            return self._names[self._places[index]]
        return OTHERS


def summarize(segments: Sequence[Segment], owners: Owners) -> Summary:
    """Sum up a device's segments."""
    by_pool: dict[str, Part] = {}
    by_class: dict[str, Part] = {}
    by_owner: Counter[str] = Counter()
    whole = Part()
    for segment in segments:
        part = _part(segment)
        whole = whole.plus(part)
        for parts, key in ((by_pool, pool_of(segment)), (by_class, class_of(segment))):
            parts[key] = parts.get(key, Part()).plus(part)
        for block in segment["blocks"]:
            if block["state"] == _ALLOCATED:
                by_owner[owners.of(block)] += block["size"]
    return Summary(whole, by_pool, by_class, dict(by_owner.most_common()))


def _part(segment: Segment) -> Part:
    free = [block["size"] for block in segment["blocks"] if block["state"] == _FREE]
    allocated = sum(block["size"] for block in segment["blocks"] if block["state"] == _ALLOCATED)
    size = segment["total_size"]
    # Only the memory of an empty segment can go back to the driver.
    is_empty = sum(free) == size
    return Part(
        segments=1,
        reserved=size,
        allocated=allocated,
        pending=size - allocated - sum(free),
        fragments=0 if is_empty else sum(free),
        largest_fragment=0 if is_empty else max(free, default=0),
        empty=size if is_empty else 0,
    )


def pool_of(segment: Segment) -> str:
    """Return the name of the pool that a segment belongs to: those of CUDA graphs have two numbers."""
    numbers = tuple(segment["segment_pool_id"])
    return ".".join(map(str, numbers)) if any(numbers) else DEFAULT_POOL


def class_of(segment: Segment) -> str:
    """Return a segment's class."""
    if segment.get("is_expandable"):
        return GROWING
    if segment["segment_type"] == "small":
        return SMALL
    # An allocation of just under 20 MB has a segment of its own that is as large, as sizes are rounded up to
    # 2 MB. Such a segment is counted here, too.
    return MIDDLE if segment["total_size"] == _MIDDLE_BYTES else OWN


def brief(segments: Sequence[Segment], owners: Owners) -> list[str]:
    """Return a line for each segment with the bytes of its blocks in their order, for questions that the sums do not answer.

    Behind each is who owns it, in two letters, or `free`, or `wait` if another stream may still be using it.
    """
    return [
        f"{pool_of(each)}, {class_of(each)}, {each['total_size']}: "
        + " ".join(f"{block['size']}{_mark(block, owners)}" for block in each["blocks"])
        for each in sorted(segments, key=lambda each: int(each["address"]))
    ]


def _mark(block: Mapping[str, Any], owners: Owners) -> str:
    if block["state"] == _ALLOCATED:
        return owners.of(block)[:2]
    return "free" if block["state"] == _FREE else "wait"
