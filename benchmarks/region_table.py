"""Sums of a result of `regions`: a line for each workload and way, with ratios to PyTorch's own CUDA graphs and to plain kernels."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.table import NOTHING, aligned

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

REDUCE_OVERHEAD, GRAPH, KERNELS = "reduce-overhead", "graph", "kernels"
"""PyTorch's own CUDA graphs, PyGraph's, and none: kernel by kernel."""
WAYS = (REDUCE_OVERHEAD, GRAPH, KERNELS)
_HEAD = (
    *("workload", "way", "reserved MB", "of PyTorch's", "host us", "of PyTorch's"),
    *("GPU us", "of PyTorch's", "of kernels", "MHz", "recorded in ms"),
)


@dataclass(frozen=True, slots=True)
class Way:
    """One workload run in one way: medians over its processes. None or empty: not known."""

    workload: str
    way: str
    reserved_mb: float
    host_us: tuple[float, ...]
    """Of each region, in the order in which they are compiled."""
    gpu_us: float | None
    """Of all regions together."""
    gpu_mhz: float | None
    recording_ms: tuple[float, ...] = ()
    """Time to record and verify each region."""


Ways = dict[str, dict[str, Way]]
"""By workload, then by way."""


def read_regions(file: Path) -> list[dict[str, Any]] | None:
    """Return the records of a result of `regions`; None if the file is none."""
    # Whatever is wrong with the file, the reader of `run`'s files is asked next, and says it.
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        records: list[dict[str, Any]] = json.loads(file.read_text())["records"]
        if records and all("way" in each for each in records):
            return records
    return None


def process_counts(records: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return for each workload and way the number of processes."""
    return list(Counter((each["workload"], each["way"]) for each in records).values())


def ways(records: Sequence[Mapping[str, Any]]) -> Ways:
    """Sum records up; those that failed are left out."""
    found: Ways = {}
    good = [each for each in records if "error" not in each]
    for workload, way in dict.fromkeys((each["workload"], each["way"]) for each in good):
        of_way = [each for each in good if (each["workload"], each["way"]) == (workload, way)]
        found.setdefault(workload, {})[way] = Way(
            workload,
            way,
            statistics.median(each["reserved_mb"] for each in of_way),
            _of_regions(
                [[_of_figure(region.get("host_us")) for region in each["regions"]] for each in of_way]
            ),
            _median([_gpu_us(each) for each in of_way]),
            _median([_of_figure(each.get("gpu_mhz")) for each in of_way]),
            _of_regions([[_recording_ms(region) for region in each["regions"]] for each in of_way]),
        )
    return found


def _of_figure(figure: Mapping[str, float] | None) -> float | None:
    return figure["median"] if figure else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [each for each in values if each is not None]
    return statistics.median(known) if known else None


def _of_regions(processes: Sequence[Sequence[float | None]]) -> tuple[float, ...]:
    """Return the median of each region; nothing if processes differ in their number of regions, or a value is missing."""
    if len({len(each) for each in processes}) > 1:
        return ()
    medians = [_median(values) for values in zip(*processes, strict=True) if None not in values]
    return tuple(each for each in medians if each is not None) if len(medians) == len(processes[0]) else ()


def _recording_ms(region: Mapping[str, Any]) -> float | None:
    costs = region.get("recording")
    return sum(value for name, value in costs.items() if name.endswith("_ms")) if costs else None


def _gpu_us(record: Mapping[str, Any]) -> float | None:
    figures = [region["gpu_us"] for region in record["regions"]]
    # A sum that lacks a region would look smaller than it is.
    return sum(each["median"] for each in figures) if figures and all(figures) else None


# --- for people ----------------------------------------------------------------------------------


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each workload and way, and the errors of processes that failed."""
    rows = [
        _row(each, of_workload) for of_workload in ways(records).values() for each in of_workload.values()
    ]
    failed = [f"{each['workload']} {each['way']}: {each['error']}" for each in records if "error" in each]
    return "\n".join([*aligned([_HEAD, *rows], {0, 1}), *failed])


def _row(each: Way, of_workload: Mapping[str, Way]) -> tuple[str, ...]:
    theirs, kernels = of_workload.get(REDUCE_OVERHEAD), of_workload.get(KERNELS)
    return (
        each.workload,
        each.way,
        f"{each.reserved_mb:.0f}",
        _ratio(each.reserved_mb, theirs.reserved_mb if theirs else None),
        _joined(f"{us:.0f}" for us in each.host_us),
        _joined(_host_ratios(each, theirs)),
        _number(each.gpu_us),
        _ratio(each.gpu_us, theirs.gpu_us if theirs else None),
        _ratio(each.gpu_us, kernels.gpu_us if kernels else None),
        _number(each.gpu_mhz),
        _joined(f"{ms:.0f}" for ms in each.recording_ms),
    )


def _joined(figures: Iterable[str]) -> str:
    return "+".join(figures) or NOTHING


def _host_ratios(each: Way, theirs: Way | None) -> list[str]:
    if theirs is None or len(theirs.host_us) != len(each.host_us):
        return []
    return [f"{us / of:.2f}" for us, of in zip(each.host_us, theirs.host_us, strict=True)]


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0f}"


def _ratio(value: float | None, of: float | None) -> str:
    return f"{value / of:.3f}" if value is not None and of else NOTHING
