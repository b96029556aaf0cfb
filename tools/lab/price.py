"""`python -m tools.lab price`: what PyGraph takes of a process for its decisions, as a share of the time to compile.

Cold: measuring. Warm: looking up and checking, and measuring what the compiler has made otherwise this time; beside it, with recording
graphs too, which nothing is held against: whoever captures has to, PyTorch as well, and that is part of the time to the first
steps. The time to compile is that of a process that began with empty caches and had no others compiling beside it, which would make the
share look smaller; of all others it is not known.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.records import Record
from benchmarks.table import NOTHING, aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

BESIDE = "compiled beside others"
NOT_COMPILED = "no time to compile with empty caches"
NOT_COUNTED = "not counted"
NOT_KNOWN = "not known"
HOW = "run --caches fresh --peers default,pygraph-cold,pygraph-warm"
"""What takes the data."""


@dataclass(frozen=True, slots=True)
class Start:
    """A way to begin: the peer that shows it, and the share that its price may take in the median over workloads."""

    name: str
    peer: str
    limit: float | None
    """None: it is told, and may be anything."""
    spent_s: Callable[[Record], float | None]
    """The price; None if it was not counted."""


def _measuring_s(record: Record) -> float | None:
    return record.measuring_s


def _without_recording_s(record: Record) -> float | None:
    # A graph that was compiled with empty caches may be another one, which nobody knows yet.
    return _sum_s(record.details.lookup_s, record.details.checking_s, record.measuring_s)


def _with_recording_s(record: Record) -> float | None:
    # At most so much: what is recorded while measuring is in both.
    return _sum_s(_without_recording_s(record), record.details.recording_s)


def _sum_s(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


STARTS = (
    Start("cold", "pygraph-cold", 0.05, _measuring_s),
    Start("warm", "pygraph-warm", 0.005, _without_recording_s),
    Start("warm, recording", "pygraph-warm", None, _with_recording_s),
)


@dataclass(frozen=True, slots=True)
class Price:
    """One workload and one way to begin; either `share` is known, or `unknown` says why not."""

    workload: str
    spent_s: float | None
    compile_s: float | None
    share: float | None
    unknown: str | None


def prices(records: Sequence[Record], start: Start) -> list[Price]:
    """Return the price in each workload that has a record of it; of several records, the median of those that say."""
    workloads = dict.fromkeys(each.workload for each in records if each.peer == start.peer)
    return [
        _price(name, [each for each in records if (each.workload, each.peer) == (name, start.peer)], start)
        for name in workloads
    ]


def _price(workload: str, records: Sequence[Record], start: Start) -> Price:
    parts = [_parts(each, start) for each in records]
    known = [each for each in parts if not isinstance(each, str)]
    if not known:
        unknown = next(each for each in parts if isinstance(each, str))
        return Price(workload, start.spent_s(records[0]), records[0].compile_s, None, unknown)
    spent_s, compile_s = (statistics.median(each) for each in zip(*known, strict=True))
    share = statistics.median(spent_s / compile_s for spent_s, compile_s in known)
    return Price(workload, spent_s, compile_s, share, None)


def _parts(record: Record, start: Start) -> tuple[float, float] | str:
    """Return what was spent and what compiling took, or why the one cannot be held against the other."""
    if record.details.compiled_together:
        return BESIDE
    if not record.compile_s:
        return NOT_COMPILED
    spent_s = start.spent_s(record)
    return NOT_COUNTED if spent_s is None else (spent_s, record.compile_s)


def median(found: Sequence[Price]) -> float | None:
    """Return the median over workloads whose price is known."""
    shares = [each.share for each in found if each.share is not None]
    return statistics.median(shares) if shares else None


def render(records: Sequence[Record]) -> str:
    """Return a line for each workload and way to begin, and what they come to."""
    head = ("workload", "start", "spent s", "compile s", "share")
    rows = [_row(each, start) for start in STARTS for each in prices(records, start)]
    return "\n".join([*aligned([head, *rows], {0, 1}), *(_summary(records, start) for start in STARTS)])


def _row(each: Price, start: Start) -> tuple[str, ...]:
    share = NOT_KNOWN if each.share is None else f"{each.share:.2%}"
    return (each.workload, start.name, _seconds(each.spent_s, 4), _seconds(each.compile_s, 1), share)


def _seconds(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"


def _summary(records: Sequence[Record], start: Start) -> str:
    found = prices(records, start)
    reasons = Counter(each.unknown for each in found if each.unknown)
    left_out = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return f"{start.name}: {_verdict(found, start)}" + (f"; left out: {left_out}" if left_out else "")


def _verdict(found: Sequence[Price], start: Start) -> str:
    share = median(found)
    if share is None:
        return NOT_KNOWN
    count = sum(each.share is not None for each in found)
    told = f"{share:.2%} in the median of {count} workloads"
    if start.limit is None:
        return told
    held = "within" if share <= start.limit else "MORE THAN"
    return f"{told}, {held} the {start.limit:.1%} allowed"


def too_dear(records: Sequence[Record]) -> bool:
    """Whether a median that is known is over its limit."""
    medians = [(median(prices(records, start)), start.limit) for start in STARTS]
    return any(share is not None and limit is not None and share > limit for share, limit in medians)


def is_known(records: Sequence[Record]) -> bool:
    """Whether any median is known."""
    return any(median(prices(records, start)) is not None for start in STARTS)
