"""What a record says beside what readers of every version know: it has a place of its own in the result file."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.trial import Trial


COUNTED = ("captured", "staged", "fallbacks", "failures")
"""Recordings made, inputs that they copy, calls that were launched, and what of ours did not work, both by reason."""


@dataclass(frozen=True, slots=True)
class Details:
    """Medians are over repetitions; None: not known, as in older files, or not of this peer."""

    compiled_together: bool = False
    """Whether others compiled beside: `compile_s` then says more than it takes alone."""
    lookup_s: float | None = None
    checking_s: float | None = None
    recording_s: float | None = None
    repetition_pipelined_ms: list[float] | None = None
    """The median window of each process."""
    counted: list[dict[str, Any]] | None = None
    """What the summary of each process of PyGraph's says of `COUNTED`."""


def details_of(trials: Sequence[Trial], *, together: bool) -> Details:
    """Return the details for the trials of one workload and peer."""
    summaries = [trial.summary for trial in trials if trial.summary]
    windows = [trial.answer.pipelined_ms for trial in trials if trial.answer and trial.answer.pipelined_ms]
    return Details(
        compiled_together=together,
        lookup_s=_seconds(summaries, "lookup_ms"),
        checking_s=_seconds(summaries, "checking_ms"),
        recording_s=_seconds(summaries, "recording_ms"),
        repetition_pipelined_ms=[round(statistics.median(each), 6) for each in windows],
        counted=[{name: each.get(name) for name in COUNTED} for each in summaries] or None,
    )


def _seconds(summaries: Sequence[Mapping[str, Any]], name: str) -> float | None:
    # In milliseconds a lookup is a few: four digits would leave little of it.
    known = [summary[name] / 1e3 for summary in summaries if name in summary]
    return round(statistics.median(known), 6) if known else None


def read_details(values: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Details:
    """Return what a file says, None if it says nothing; its settings know of older files what compiled beside.

    Fields of later versions are left out.
    """
    # Runs whose settings do not say so are of a time when one process ran after the other.
    found = {"compiled_together": bool(settings.get("compiled_together")), **(values or {})}
    return Details(
        **{each.name: found[each.name] for each in dataclasses.fields(Details) if each.name in found}
    )
