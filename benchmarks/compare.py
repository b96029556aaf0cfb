"""`python -m benchmarks compare`: a peer held against the better of its rivals, workload by workload, with the noise of either.

Noise is what processes of one peer differ by, of the two that are compared the more; of one process each it is not known.
"""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.table import NOTHING, aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.records import Record

RIVALS = ("default", "reduce-overhead")
_HEAD = ("workload", *RIVALS, "PEER", "over the better", "noise", "back to back", "")


class Verdict(enum.StrEnum):
    """How a peer does in one workload."""

    FASTER = "faster"
    NOISE = "within noise"
    UNKNOWN = "slower, noise not known"
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
    pipelined_ratio: float | None
    """Of the times of steps that are not waited for, over the better rival's in these."""
    verdict: Verdict


def compare(records: Sequence[Record], peer: str) -> list[Comparison]:
    """Compare a peer in each workload that has a record of it; records of several files are taken together."""
    workloads = dict.fromkeys(record.workload for record in records if record.peer == peer)
    return [_compared(workload, _by_peer(records, workload), peer) for workload in workloads]


def _by_peer(records: Sequence[Record], workload: str) -> dict[str, list[Record]]:
    by_peer: dict[str, list[Record]] = {}
    for each in records:
        if each.workload == workload:
            by_peer.setdefault(each.peer, []).append(each)
    return by_peer


def render(comparisons: Sequence[Comparison], peer: str) -> str:
    """Return a line for each workload, and what they come to."""
    head = tuple(peer if cell == "PEER" else cell for cell in _HEAD)
    rows = [head, *(_row(each, peer) for each in comparisons)]
    return "\n".join([*aligned(rows, {0, len(head) - 1}), _summary(comparisons)])


def _compared(workload: str, by_peer: dict[str, list[Record]], peer: str) -> Comparison:
    medians = {name: _medians_ms(of_peer) for name, of_peer in by_peer.items()}
    steps_ms = {name: statistics.median(each) for name, each in medians.items() if each}
    rivals = [name for name in RIVALS if name in steps_ms]
    # A rival is as good as the processes of it that ran; the peer in question has to run in all.
    has_failed = not all(each.repetition_medians_ms for each in by_peer[peer])
    if has_failed or not rivals:
        verdict = Verdict.FAILED if has_failed else Verdict.ALONE
        return Comparison(workload, steps_ms, None, None, None, verdict)
    best = min(rivals, key=steps_ms.__getitem__)
    ratio = steps_ms[peer] / steps_ms[best]
    noise = _noise([medians[peer], medians[best]])
    return Comparison(
        workload, steps_ms, ratio, noise, _pipelined(by_peer, peer, rivals), _verdict(ratio, noise)
    )


def _medians_ms(records: Sequence[Record]) -> list[float]:
    return [median for each in records for median in each.repetition_medians_ms]


def _noise(medians: Sequence[Sequence[float]]) -> float | None:
    return max((max(each) / min(each) - 1 for each in medians if len(each) > 1), default=None)


def _pipelined(by_peer: dict[str, list[Record]], peer: str, rivals: Sequence[str]) -> float | None:
    medians: dict[str, float] = {}
    for name in (peer, *rivals):
        if found := [each.pipelined_ms.median for each in by_peer[name] if each.pipelined_ms]:
            medians[name] = statistics.median(found)
    best = min((medians[name] for name in rivals if name in medians), default=None)
    return medians[peer] / best if best and peer in medians else None


def _verdict(ratio: float, noise: float | None) -> Verdict:
    if ratio <= 1:
        return Verdict.FASTER
    if noise is None:
        return Verdict.UNKNOWN
    return Verdict.NOISE if ratio - 1 <= noise else Verdict.SLOWER


def _row(each: Comparison, peer: str) -> tuple[str, ...]:
    steps = [f"{each.steps_ms[name]:.3f}" if name in each.steps_ms else NOTHING for name in (*RIVALS, peer)]
    noise = NOTHING if each.noise is None else f"{each.noise:.1%}"
    return (
        *(each.workload, *steps, _number(each.ratio), noise),
        *(_number(each.pipelined_ratio), str(each.verdict)),
    )


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _summary(comparisons: Sequence[Comparison]) -> str:
    counts = Counter(each.verdict for each in comparisons)
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    ratios = [each.ratio for each in comparisons if each.ratio is not None]
    most = f"; {statistics.median(ratios):.3f} in the median, {max(ratios):.3f} at most" if ratios else ""
    return f"{len(comparisons)} workloads: {said}{most}"
