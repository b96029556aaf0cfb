"""Readings of the allocator at marked points of a step, and their maxima over steps. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

BEFORE, FORWARD, BACKWARD, OPTIMISER = (
    "before forward",
    "after forward",
    "after backward",
    "after the optimiser",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes at a point, and the most since the point before: between `OPTIMISER` and `BEFORE`, inputs are drawn."""

    reserved: int
    allocated: int
    most_reserved: int
    most_allocated: int


def reading(stats: Mapping[str, int]) -> Reading:
    """Return the reading of `torch.cuda.memory_stats`."""
    return Reading(
        stats["reserved_bytes.all.current"],
        stats["allocated_bytes.all.current"],
        stats["reserved_bytes.all.peak"],
        stats["allocated_bytes.all.peak"],
    )


@dataclass(frozen=True, slots=True)
class Point:
    """A point of several steps: the maximum of each figure, and how far reserved and allocated bytes lie apart."""

    name: str
    most: Reading
    reserved_differs: int
    allocated_differs: int


def over_steps(steps: Sequence[Mapping[str, Reading]]) -> list[Point]:
    """Sum up the points of some steps."""
    return [_over(name, [step[name] for step in steps]) for name in steps[0]]


def _over(name: str, readings: Sequence[Reading]) -> Point:
    reserved = [each.reserved for each in readings]
    allocated = [each.allocated for each in readings]
    return Point(name, most(readings), max(reserved) - min(reserved), max(allocated) - min(allocated))


def most(readings: Sequence[Reading]) -> Reading:
    """Return the most of each figure."""
    return Reading(
        max(each.reserved for each in readings),
        max(each.allocated for each in readings),
        max(each.most_reserved for each in readings),
        max(each.most_allocated for each in readings),
    )
