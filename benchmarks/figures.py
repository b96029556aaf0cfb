"""Samples to figures: the median, how far samples lie from it, and how many there were."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of `n` samples and their median absolute deviation from it (`mad`, not scaled), in the samples' unit."""

    median: float
    mad: float
    n: int


def summarize(samples: Sequence[float]) -> Figure | None:
    """Return the figure for some samples; None for none."""
    if not samples:
        return None
    median = statistics.median(samples)
    mad = statistics.median(abs(sample - median) for sample in samples)
    return Figure(_rounded(median), _rounded(mad), len(samples))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that `percent` of all samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def _rounded(value: float) -> float:
    return round(value, 6)
