"""`python -m benchmarks compare`: peers held against the better of their rivals, workload by workload, with the noise of either.

Noise is what processes of one peer differ by, of the two that are compared the more; of one process each it is not known. Back to
back, where it is not known what processes differ by, the error of the median of their windows stands for it, which is less.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.peers import OURS, PEERS
from benchmarks.table import NOTHING, aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.records import Record

RIVALS = ("default", "reduce-overhead")
_ERROR = 1.86
"""Of a median, in median absolute deviations over the root of the number of samples, if these are distributed normally."""


class Verdict(enum.StrEnum):
    """How a peer does in one workload."""

    FASTER = "faster"
    FASTER_UNKNOWN = "faster (noise not known)"
    NOISE = "within noise"
    UNKNOWN = "slower (noise not known)"
    SLOWER = "SLOWER"
    ALONE = "no rival runs"
    FAILED = "FAILED"


BAD = frozenset({Verdict.SLOWER, Verdict.FAILED})


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload: the median of processes' median steps in ms by peer, and shares of the better rival's."""

    workload: str
    steps_ms: dict[str, float]
    ratio: float | None
    noise: float | None
    """0.1: processes of one peer differ by a tenth."""
    verdict: Verdict
    pipelined_ratio: float | None = None
    """Of the times of steps that are not waited for, over the better rival's in these."""
    pipelined_noise: float | None = None
    pipelined_verdict: Verdict | None = None
    """None if there is nothing to compare."""
    reserved_ratio: float | None = None
    """Of reserved memory, over that of the same mode without PyGraph; what a cold process reserves to find out is in it."""


def compare(records: Sequence[Record], peer: str, rivals: Sequence[str] = RIVALS) -> list[Comparison]:
    """Compare a peer in each workload that has a record of it; records of several files are taken together."""
    workloads = dict.fromkeys(record.workload for record in records if record.peer == peer)
    return [_compared(workload, _by_peer(records, workload), peer, rivals) for workload in workloads]


def peers_to_compare(records: Sequence[Record]) -> list[str]:
    """Return the peers of PyGraph that have records."""
    found = {record.peer for record in records}
    return [name for name in OURS if name in found]


def _by_peer(records: Sequence[Record], workload: str) -> dict[str, list[Record]]:
    by_peer: dict[str, list[Record]] = {}
    for each in records:
        if each.workload == workload:
            by_peer.setdefault(each.peer, []).append(each)
    return by_peer


def render(comparisons: Sequence[Comparison], peer: str, rivals: Sequence[str] = RIVALS) -> str:
    """Return a line for each workload, and what they come to."""
    columns = ("over the better", "noise", "", "back to back", "noise", "", "reserved")
    head = ("workload", *rivals, peer, *columns)
    rows = [head, *(_row(each, (*rivals, peer)) for each in comparisons)]
    text_columns = {0, len(head) - 5, len(head) - 2}
    return "\n".join([*aligned(rows, text_columns), _summary(comparisons), _back_to_back(comparisons)])


def _compared(
    workload: str, by_peer: dict[str, list[Record]], peer: str, rivals: Sequence[str]
) -> Comparison:
    medians = {name: _medians_ms(of_peer) for name, of_peer in by_peer.items()}
    steps_ms = {name: statistics.median(each) for name, each in medians.items() if each}
    rivals = [name for name in rivals if name in steps_ms]
    # A rival is as good as the processes of it that ran; the peer in question has to run in all.
    has_failed = not all(each.repetition_medians_ms for each in by_peer[peer])
    if has_failed or not rivals:
        return Comparison(workload, steps_ms, None, None, Verdict.FAILED if has_failed else Verdict.ALONE)
    best = min(rivals, key=steps_ms.__getitem__)
    ratio = steps_ms[peer] / steps_ms[best]
    noise = _noise([medians[peer], medians[best]])
    return Comparison(
        workload,
        steps_ms,
        ratio,
        noise,
        _verdict(ratio, noise),
        *_pipelined(by_peer, peer, rivals),
        _reserved(by_peer, peer),
    )


def _medians_ms(records: Sequence[Record]) -> list[float]:
    return [median for each in records for median in each.repetition_medians_ms]


def _noise(medians: Sequence[Sequence[float]]) -> float | None:
    return max((max(each) / min(each) - 1 for each in medians if len(each) > 1), default=None)


def _pipelined(
    by_peer: dict[str, list[Record]], peer: str, rivals: Sequence[str]
) -> tuple[float | None, float | None, Verdict | None]:
    """Return ratio, noise and verdict of the windows."""
    medians: dict[str, float] = {}
    for name in (peer, *rivals):
        if found := _windows_ms(by_peer[name]):
            medians[name] = statistics.median(found)
    measured = [name for name in rivals if name in medians]
    if peer not in medians or not measured:
        return None, None, None
    best = min(measured, key=medians.__getitem__)
    ratio = medians[peer] / medians[best]
    either = [_noise_of_windows(by_peer[name]) for name in (peer, best)]
    noise = max((each for each in either if each is not None), default=None)
    return ratio, noise, _verdict(ratio, noise)


def _windows_ms(records: Sequence[Record]) -> list[float]:
    """Return the median windows of processes as for steps; of files of before these were kept, those of records."""
    return _of_processes_ms(records) or [each.pipelined_ms.median for each in records if each.pipelined_ms]


def _of_processes_ms(records: Sequence[Record]) -> list[float]:
    """Return the median windows of all processes; none if those of any are not known."""
    processes = [_processes_ms(each) for each in records if each.pipelined_ms]
    return [median for each in processes for median in each or ()] if all(processes) else []


def _noise_of_windows(records: Sequence[Record]) -> float | None:
    medians = _of_processes_ms(records)
    if len(medians) > 1:
        return _noise([medians])
    # Files of before the medians of processes were kept have no more than this.
    figures = [each.pipelined_ms for each in records if each.pipelined_ms]
    errors = [_ERROR * each.mad / math.sqrt(each.n) / each.median for each in figures if each.n > 1]
    return max(errors, default=None)


def _processes_ms(record: Record) -> list[float] | None:
    """Return the median windows of a record's processes; None if they are not known."""
    if record.details.repetition_pipelined_ms is None and len(record.repetition_medians_ms) == 1:
        return [record.pipelined_ms.median] if record.pipelined_ms else None
    return record.details.repetition_pipelined_ms


def _reserved(by_peer: dict[str, list[Record]], peer: str) -> float | None:
    ours, plain = (
        max((each.reserved_mb or 0.0 for each in by_peer.get(name, ())), default=0.0)
        for name in (peer, str(PEERS[peer].compile))
    )
    return ours / plain if ours and plain else None


def _verdict(ratio: float, noise: float | None) -> Verdict:
    if noise is None:
        return Verdict.FASTER_UNKNOWN if ratio <= 1 else Verdict.UNKNOWN
    if abs(ratio - 1) <= noise:
        return Verdict.NOISE
    return Verdict.FASTER if ratio < 1 else Verdict.SLOWER


def _row(each: Comparison, names: Sequence[str]) -> tuple[str, ...]:
    steps = [f"{each.steps_ms[name]:.3f}" if name in each.steps_ms else NOTHING for name in names]
    waited_for = (_number(each.ratio), _share(each.noise), str(each.verdict))
    verdict = str(each.pipelined_verdict or NOTHING)
    back_to_back = (_number(each.pipelined_ratio), _share(each.pipelined_noise), verdict)
    return (each.workload, *steps, *waited_for, *back_to_back, _number(each.reserved_ratio))


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _summary(comparisons: Sequence[Comparison]) -> str:
    counts = Counter(each.verdict for each in comparisons)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    ratios = [each.ratio for each in comparisons if each.ratio is not None]
    most = f"; {statistics.median(ratios):.3f} in the median, {max(ratios):.3f} at most" if ratios else ""
    return f"{len(comparisons)} workloads: {said}{most}"


def _back_to_back(comparisons: Sequence[Comparison]) -> str:
    """Say which lose in steps that are not waited for: it is no part of the exit code unless it was asked for."""
    told = [each for each in comparisons if each.pipelined_verdict is not None]
    lost = [each for each in told if each.pipelined_verdict is Verdict.SLOWER]
    names = ", ".join(f"{each.workload} {_number(each.pipelined_ratio)}" for each in lost)
    unknown = sum(each.pipelined_noise is None for each in told)
    return (
        f"back to back: {len(lost)} of {len(told) - unknown} lose beyond noise"
        + (f": {names}" if names else "")
        + (f"; of {unknown} others the noise is not known" if unknown else "")
    )
