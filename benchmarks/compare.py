"""`python -m benchmarks compare`: variants of PyGraph against the better of plain PyTorch's, with the noise of either.

Noise is how far the processes of one variant lie apart, as a share of the fastest: of the two variants that are compared the
larger. It is not known of one process each.
"""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.table import NOTHING, aligned
from benchmarks.variants import OURS, VARIANTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.records import Record

BASELINES = ("default", "reduce-overhead")


class Kind(enum.StrEnum):
    """How a step is timed."""

    WAITED_FOR = "waited for"
    """The device is synchronised before and after each step."""
    BACK_TO_BACK = "back to back"
    """Steps are issued without waiting; the time is that of a window over its number of steps."""


class Verdict(enum.StrEnum):
    """How a variant does in one workload; `faster` and `SLOWER` are by more than the noise."""

    FASTER = "faster"
    FASTER_UNKNOWN = "faster (noise not known)"
    NOISE = "within noise"
    UNKNOWN = "slower (noise not known)"
    SLOWER = "SLOWER"
    ALONE = "nothing to compare"
    FAILED = "FAILED"


# Not `UNKNOWN`: one process of each variant does not show which of them is slower.
BAD = frozenset({Verdict.SLOWER, Verdict.FAILED})


@dataclass(frozen=True, slots=True)
class Times:
    """One workload's steps, timed in one way: the median of processes' medians in ms by variant, and the comparison."""

    ms: Mapping[str, float]
    ratio: float | None
    """Of the variant's time over that of the better baseline: below 1 is faster."""
    noise: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """A variant in one workload."""

    workload: str
    mode: str
    times: Mapping[Kind, Times]
    reserved_ratio: float | None
    """Peak reserved memory over that of the same compile mode without PyGraph."""

    @property
    def waited_for(self) -> Times:
        """Steps that are waited for."""
        return self.times[Kind.WAITED_FOR]

    @property
    def back_to_back(self) -> Times:
        """Steps that are not."""
        return self.times[Kind.BACK_TO_BACK]


def compare(records: Sequence[Record], variant: str) -> list[Comparison]:
    """Compare a variant in each workload that has a record of it; records of several files are taken together."""
    workloads = dict.fromkeys(record.workload for record in records if record.variant == variant)
    return [_compared(workload, records, variant) for workload in workloads]


def variants_to_compare(records: Sequence[Record]) -> list[str]:
    """Return the variants of PyGraph that have records."""
    found = {record.variant for record in records}
    return [name for name in OURS if name in found]


def process_medians_ms(records: Sequence[Record], kind: Kind) -> list[float]:
    """Return the median step of each process of some records."""
    if kind is Kind.WAITED_FOR:
        return [ms for each in records for ms in each.repetition_medians_ms]
    return [ms for each in records for ms in each.repetition_pipelined_ms]


def _compared(workload: str, records: Sequence[Record], variant: str) -> Comparison:
    by_variant: dict[str, list[Record]] = {}
    for each in records:
        if each.workload == workload:
            by_variant.setdefault(each.variant, []).append(each)
    ours = by_variant[variant]
    # A baseline is as good as the processes of it that ran; the variant in question has to run in all.
    has_failed = not all(each.repetition_medians_ms for each in ours)
    times = {kind: _times(by_variant, kind, variant, has_failed=has_failed) for kind in Kind}
    return Comparison(workload, ours[0].mode, times, _reserved_ratio(by_variant, variant))


def _times(
    by_variant: Mapping[str, Sequence[Record]],
    kind: Kind,
    variant: str,
    *,
    has_failed: bool,
) -> Times:
    # Process by process: by file, the only process of one would weigh as much as the many of another.
    medians = {name: process_medians_ms(found, kind) for name, found in by_variant.items()}
    ms = {name: statistics.median(each) for name, each in medians.items() if each}
    measured = [name for name in BASELINES if name in ms]
    if has_failed or not measured or variant not in ms:
        return Times(ms, None, None, Verdict.FAILED if has_failed else Verdict.ALONE)
    best = min(measured, key=ms.__getitem__)
    ratio, noise = ms[variant] / ms[best], spread(medians[variant], medians[best])
    return Times(ms, ratio, noise, _verdict(ratio, noise))


def spread(*processes: Sequence[float]) -> float | None:
    """Return by which share processes of one variant lie apart, of several variants the most; None if that is not known."""
    return max((max(each) / min(each) - 1 for each in processes if len(each) > 1), default=None)


def _verdict(ratio: float, noise: float | None) -> Verdict:
    if noise is None:
        return Verdict.FASTER_UNKNOWN if ratio <= 1 else Verdict.UNKNOWN
    # In both directions: a variant that is faster by less than the noise is not called so.
    if abs(ratio - 1) <= noise:
        return Verdict.NOISE
    return Verdict.FASTER if ratio < 1 else Verdict.SLOWER


def _reserved_ratio(by_variant: Mapping[str, Sequence[Record]], variant: str) -> float | None:
    # The plain variant of a mode has the mode's name.
    ours, plain = (
        max((each.reserved_mb or 0.0 for each in by_variant.get(name, ())), default=0.0)
        for name in (variant, str(VARIANTS[variant].compile))
    )
    return ours / plain if ours and plain else None


# --- for people ----------------------------------------------------------------------------------


def render(comparisons: Sequence[Comparison], variant: str) -> str:
    """Return a line for each workload, and one for each way of timing that sums them up."""
    columns = ("over the better", "noise", "", "back to back", "noise", "", "reserved")
    head = ("workload", *BASELINES, variant, *columns)
    rows = [head, *(_row(each, (*BASELINES, variant)) for each in comparisons)]
    # The workload and the two verdicts, counted from behind as the number of variants differs.
    text_columns = {0, len(head) - 5, len(head) - 2}
    return "\n".join([*aligned(rows, text_columns), *(_summary(comparisons, kind) for kind in Kind)])


def _row(each: Comparison, names: Sequence[str]) -> tuple[str, ...]:
    ms = each.waited_for.ms
    steps = [f"{ms[name]:.3f}" if name in ms else NOTHING for name in names]
    told = [
        cell
        for times in (each.waited_for, each.back_to_back)
        for cell in (_number(times.ratio), _share(times.noise), str(times.verdict))
    ]
    return (each.workload, *steps, *told, _number(each.reserved_ratio))


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _summary(comparisons: Sequence[Comparison], kind: Kind) -> str:
    found = [each.times[kind] for each in comparisons]
    counts = Counter(each.verdict for each in found)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    ratios = [each.ratio for each in found if each.ratio is not None]
    said += (
        f"; geometric mean {statistics.geometric_mean(ratios):.3f}, at most {max(ratios):.3f}"
        if ratios
        else ""
    )
    return f"{kind}, {len(found)} workloads: {said}"
