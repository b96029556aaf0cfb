"""Peak reserved memory of a variant over that of `reduce-overhead`, held to a bound in inference and in training."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.records import Record

PLAIN = "reduce-overhead"
BOUNDS = {"inference": 1.10, "training": 1.15}
"""The largest geometric mean over the workloads of a mode."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The peak memory of a variant in all workloads of one mode that the variant and `reduce-overhead` have run."""

    mode: str
    ratios: Mapping[str, float]
    """By workload: of the process that reserved most, over that of `reduce-overhead` that did."""

    @property
    def mean(self) -> float:
        """The geometric mean of the ratios."""
        return statistics.geometric_mean(self.ratios.values())

    @property
    def most(self) -> tuple[str, float]:
        """The workload of the largest ratio, and that ratio."""
        return max(self.ratios.items(), key=lambda each: each[1])

    @property
    def is_kept(self) -> bool:
        """Whether the mean keeps the bound."""
        return self.mean <= BOUNDS[self.mode]


def peak_memory(records: Sequence[Record], variant: str) -> list[PeakMemory]:
    """Return the peak memory of a variant in each mode in which there is something to compare."""
    most: dict[tuple[str, str], float] = {}
    for each in records:
        # A process that failed has not come to its peak.
        if each.repetition_medians_ms and each.reserved_mb:
            key = each.workload, each.variant
            most[key] = max(most.get(key, 0.0), each.reserved_mb)
    by_mode: dict[str, dict[str, float]] = {}
    for each in records:
        ours, plain = most.get((each.workload, variant)), most.get((each.workload, PLAIN))
        if ours and plain and each.mode in BOUNDS:
            by_mode.setdefault(each.mode, {})[each.workload] = ours / plain
    return [PeakMemory(mode, by_mode[mode]) for mode in BOUNDS if mode in by_mode]


def line(found: PeakMemory) -> str:
    """Return a line for people."""
    (workload, most), bound = found.most, BOUNDS[found.mode]
    verdict = "kept" if found.is_kept else "BROKEN"
    return (
        f"peak memory over {PLAIN}, {found.mode}, {len(found.ratios)} workloads: geometric mean {found.mean:.3f}, "
        f"at most {most:.3f} ({workload}); bound of the mean {bound:.2f}: {verdict}"
    )
