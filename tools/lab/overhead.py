"""`python -m tools.lab overhead`: the time of PyGraph's decisions in a process, as a share of the time to compile.

The time to compile is that of a process that began with empty caches and had no other compiling beside it. Of all other processes
the share is not known: it would look smaller than it is.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.records import Record
from benchmarks.table import NOTHING, aligned

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes time when a process starts: the variant that shows it, and its seconds in a record of that."""

    name: str
    variant: str
    spent_s: Callable[[Record], float | None]


def _sum_s(*seconds: float | None) -> float | None:
    known = [each for each in seconds if each is not None]
    # A sum that lacks a part would look smaller than it is.
    return sum(known) if len(known) == len(seconds) else None


def _warm_s(record: Record) -> float | None:
    # A graph that was compiled anew may be another one, which has to be measured.
    return _sum_s(record.lookup_s, record.checking_s, record.measuring_s)


PARTS = (
    Part("measuring, empty cache", "pygraph-cold", lambda record: record.measuring_s),
    Part("looking up and checking, filled cache", "pygraph-warm", _warm_s),
    # Time that is both recording and measuring counts twice.
    Part(
        "the same and recording", "pygraph-warm", lambda record: _sum_s(_warm_s(record), record.recording_s)
    ),
)


@dataclass(frozen=True, slots=True)
class Overhead:
    """One part of one workload; seconds are medians over the records that say both."""

    workload: str
    spent_s: float
    compile_s: float

    @property
    def share(self) -> float:
        """The part as a share of the time to compile."""
        return self.spent_s / self.compile_s


def overheads(records: Sequence[Record], part: Part) -> list[Overhead]:
    """Return the overhead in each workload for which it is known."""
    known: dict[str, list[tuple[float, float]]] = {}
    for each in records:
        spent_s = part.spent_s(each) if each.variant == part.variant else None
        if spent_s is not None and each.compile_s and not each.compiled_together:
            known.setdefault(each.workload, []).append((spent_s, each.compile_s))
    return [
        Overhead(workload, *(statistics.median(values) for values in zip(*found, strict=True)))
        for workload, found in known.items()
    ]


def render(records: Sequence[Record]) -> str:
    """Return a line for each workload and part, and the median of each part."""
    head = ("workload", "part", "spent s", "compile s", "share")
    found = {part.name: overheads(records, part) for part in PARTS}
    rows = [
        (each.workload, name, f"{each.spent_s:.4f}", f"{each.compile_s:.1f}", f"{each.share:.2%}")
        for name, of_part in found.items()
        for each in of_part
    ]
    medians = [f"{name}: {_median(of_part)}" for name, of_part in found.items()]
    return "\n".join([*aligned([head, *rows], {0, 1}), *medians])


def _median(found: Sequence[Overhead]) -> str:
    if not found:
        return NOTHING
    return f"{statistics.median(each.share for each in found):.2%} in the median of {len(found)} workloads"
