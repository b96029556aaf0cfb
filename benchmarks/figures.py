"""Samples to figures: the median, how far samples lie from it, and how many there were; and figures that are held to a bound."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Figure:
    """The median of `n` samples and their median absolute deviation from it (`mad`, not scaled), in the samples' unit."""

    median: float
    mad: float
    n: int


@dataclass(frozen=True, slots=True)
class Bound:
    """One figure, and the largest value that it may have."""

    name: str
    value: float
    most: float

    @property
    def is_kept(self) -> bool:
        """Whether the figure is within the bound."""
        return self.value <= self.most

    def __str__(self) -> str:
        return f"{'kept' if self.is_kept else 'BROKEN':7} {self.name}: {self.value:g} of {self.most:g}"

    def as_record(self) -> dict[str, Any]:
        """Return the bound as result files have it."""
        return {**asdict(self), "is_kept": self.is_kept}


def summarize(samples: Sequence[float]) -> Figure | None:
    """Return the figure for some samples; None for none."""
    if not samples:
        return None
    median = statistics.median(samples)
    # No standard deviation, which a few steps that something has disturbed would decide.
    mad = statistics.median(abs(sample - median) for sample in samples)
    return Figure(_rounded(median), _rounded(mad), len(samples))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the smallest sample that `percent` of all samples do not exceed (nearest rank)."""
    ordered = sorted(samples)
    # No interpolation: the figure is a time that was seen, also where there are few samples.
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(int(rank), 1) - 1]


def _rounded(value: float) -> float:
    return round(value, 6)
