"""What a file of `regions` comes to, a line for each workload and way: memory, host time and GPU time over
those of PyTorch's own CUDA graphs, and launched."""

from __future__ import annotations

import contextlib
import json
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.table import NOTHING, aligned
from benchmarks.workloads import WORKLOADS, Mode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

REDUCE_OVERHEAD, GRAPH, KERNELS = "reduce-overhead", "graph", "kernels"
"""PyTorch's own CUDA graphs, ours, and none."""
_FORMER = {"trees": REDUCE_OVERHEAD, "relocate": GRAPH, "launch": KERNELS}
"""What files of before call them."""
RESERVED_OF_PYTORCH = {Mode.INFERENCE: 1.0, Mode.TRAINING: 1.1}
"""What our graphs may reserve of what PyTorch's do, if activations are not most of it."""
ACTIVATIONS_DOMINATE = frozenset({"resnet50-training-large"})
"""Where they are, ours may reserve no more than PyTorch's."""
LARGE_INPUTS = frozenset({"autoencoder-inference"})
"""Workloads with moving inputs so large that copying them shows: held against launched calls, which copy none."""
_HEAD = (
    *("workload", "way", "reserved MB", "of PyTorch's", "host us", "of PyTorch's"),
    *("GPU us", "of PyTorch's", "of kernels", "MHz", "again ms", ""),
)


@dataclass(frozen=True, slots=True)
class Way:
    """One workload run in one way: medians over its processes, of the host's time of each region and of the GPU's of all together."""

    workload: str
    way: str
    reserved_mb: float
    host_us: tuple[float, ...]
    gpu_us: float | None
    gpu_mhz: float | None
    """The GPU's clock meanwhile; older files do not say."""
    again_ms: tuple[float, ...] = ()
    """What recording each region once more took, with all that is done once in a process left out."""


Ways = dict[str, dict[str, Way]]
"""By workload, then by way."""


def read_regions(file: Path) -> list[dict[str, Any]] | None:
    """Return the records of a file of `regions`; None if it is none, which whoever reads other files may find to be one of these."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        records = json.loads(file.read_text())["records"]
        if records and all("way" in each for each in records):
            return [{**each, "way": _FORMER.get(each["way"], each["way"])} for each in records]
    return None


def ways(records: Sequence[Mapping[str, Any]]) -> Ways:
    """Sum records up; those that failed say nothing."""
    found: Ways = {}
    good = [each for each in records if "error" not in each]
    for workload, way in dict.fromkeys((each["workload"], each["way"]) for each in good):
        of_way = [each for each in good if (each["workload"], each["way"]) == (workload, way)]
        clocks = [each["gpu_mhz"]["median"] for each in of_way if each.get("gpu_mhz")]
        found.setdefault(workload, {})[way] = Way(
            workload,
            way,
            statistics.median(each["reserved_mb"] for each in of_way),
            _host_us(of_way),
            _median([gpu_us for each in of_way if (gpu_us := _gpu_us(each)) is not None]),
            _median(clocks),
            _again_ms(of_way),
        )
    return found


def _median(figures: Sequence[float]) -> float | None:
    return statistics.median(figures) if figures else None


def _host_us(records: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Return a figure for each region, the forward first; none if processes differ in how many there are, or something is missing."""
    of_regions = [[region.get("host_us") for region in each["regions"]] for each in records]
    if len({len(each) for each in of_regions}) > 1 or not all(all(each) for each in of_regions):
        return ()
    return tuple(
        statistics.median(figure["median"] for figure in figures if figure)
        for figures in zip(*of_regions, strict=True)
    )


def again_ms(region: Mapping[str, Any]) -> float | None:
    """Return what recording and verifying a region once more took, in ms; None if it was not."""
    costs = region.get("recorded_again")
    return sum(value for name, value in costs.items() if name.endswith("_ms")) if costs else None


def _again_ms(records: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Return a figure for each region; none if processes differ in how many there are, or something is missing."""
    of_regions = [[again_ms(region) for region in each["regions"]] for each in records]
    if len({len(each) for each in of_regions}) > 1 or any(None in each for each in of_regions):
        return ()
    return tuple(
        statistics.median(each for each in figures if each is not None)
        for figures in zip(*of_regions, strict=True)
    )


def _gpu_us(record: Mapping[str, Any]) -> float | None:
    figures = [region["gpu_us"] for region in record["regions"]]
    return sum(each["median"] for each in figures) if figures and all(figures) else None


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each, and which of our graphs reserve more than they may."""
    found = ways(records)
    rows = [_row(each, of_workload) for of_workload in found.values() for each in of_workload.values()]
    return "\n".join(
        [
            *aligned([_HEAD, *rows], {0, 1, len(_HEAD) - 1}),
            _reserved(found),
            *_launched(found),
            *_failed(records),
        ]
    )


def _failed(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{each['workload']} {each['way']}: {each['error']}" for each in records if "error" in each]


def _row(each: Way, of_workload: Mapping[str, Way]) -> tuple[str, ...]:
    more = "reserves MORE" if each.way == GRAPH and _reserves_more(of_workload) else ""
    return (
        *(
            each.workload,
            each.way,
            f"{each.reserved_mb:.0f}",
            _number(_reserved_of_pytorch(each, of_workload)),
        ),
        *(_together(f"{us:.0f}" for us in each.host_us), _together(_host_of_pytorch(each, of_workload))),
        *(
            NOTHING if each.gpu_us is None else f"{each.gpu_us:.0f}",
            _number(_gpu_of(REDUCE_OVERHEAD, each, of_workload)),
        ),
        _number(_gpu_of(KERNELS, each, of_workload)),
        *(
            NOTHING if each.gpu_mhz is None else f"{each.gpu_mhz:.0f}",
            _together(f"{ms:.0f}" for ms in each.again_ms),
        ),
        more,
    )


def _together(figures: Iterable[str]) -> str:
    return "+".join(figures) or NOTHING


def _host_of_pytorch(each: Way, of_workload: Mapping[str, Way]) -> list[str]:
    theirs = of_workload.get(REDUCE_OVERHEAD)
    if theirs is None or len(theirs.host_us) != len(each.host_us):
        return []
    return [f"{us / of:.2f}" for us, of in zip(each.host_us, theirs.host_us, strict=True)]


def _number(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"


def _reserved_of_pytorch(each: Way, of_workload: Mapping[str, Way]) -> float | None:
    theirs = of_workload.get(REDUCE_OVERHEAD)
    return each.reserved_mb / theirs.reserved_mb if theirs and theirs.reserved_mb else None


def _gpu_of(way: str, each: Way, of_workload: Mapping[str, Way]) -> float | None:
    other = of_workload.get(way)
    return each.gpu_us / other.gpu_us if other and other.gpu_us and each.gpu_us is not None else None


def _ours_of_pytorch(of_workload: Mapping[str, Way]) -> float | None:
    ours = of_workload.get(GRAPH)
    return _reserved_of_pytorch(ours, of_workload) if ours else None


def allowed(workload: str) -> float:
    """Return what share of PyTorch's reserved memory our graphs may reserve in a workload."""
    return 1.0 if workload in ACTIVATIONS_DOMINATE else RESERVED_OF_PYTORCH[WORKLOADS[workload].mode]


def _reserves_more(of_workload: Mapping[str, Way]) -> bool:
    ratio = _ours_of_pytorch(of_workload)
    return ratio is not None and ratio > allowed(next(iter(of_workload.values())).workload)


def _reserved(found: Ways) -> str:
    told = {name: ratio for name, each in found.items() if (ratio := _ours_of_pytorch(each)) is not None}
    more = [
        f"{name} {told[name]:.3f} (at most {allowed(name)})" for name in told if _reserves_more(found[name])
    ]
    return f"our graphs reserve more than they may in {len(more)} of {len(told)} workloads" + (
        f": {', '.join(more)}" if more else ""
    )


def _launched(found: Ways) -> list[str]:
    return [
        f"{name}: whether its inputs, which are large and move, cost anything is not known: nothing was measured with --ways {KERNELS}"
        for name, each in found.items()
        if name in LARGE_INPUTS and KERNELS not in each
    ]
