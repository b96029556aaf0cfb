"""The part of docs/performance.md on steps of workloads: their time, peak memory and coverage, from `steps-GPU.json`."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from benchmarks.compare import BASELINES, Comparison, Kind, Times, Verdict, compare, variants_to_compare
from benchmarks.peak_memory import BOUNDS, PLAIN, peak_memory
from tools.lab.stored import Result, code, gpu_of, markdown_table, milliseconds, process_counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.records import Record

BY_HAND = "cuda-graph"
"""The variant that records the whole step by hand."""
_NONE = ""
_MODES = {"inference": ("inference",), "training": ("training",), "both": ("inference", "training")}


def steps_section(result: Result) -> str:
    """Return the section of one GPU."""
    records = result.records
    comparisons = {name: compare(records, name) for name in variants_to_compare(records)}
    counts = process_counts(records)
    return "\n\n".join(
        [
            f"## Steps on {gpu_of(result)}",
            result.where(counts),
            "Geometric means of PyGraph's time over the other's, over the workloads that both baselines and the variant run:",
            _means(comparisons),
            *(f"### {str(kind).capitalize()}\n\n{_times(records, comparisons, kind)}" for kind in Kind),
            "### Peak reserved memory\n\nIn MB, from the start of the process: what PyGraph reserves for a while to record and verify its graphs is in it.",
            _memory(records),
            *_memory_means(records),
            *_coverage(records),
        ]
    )


def _means(comparisons: Mapping[str, Sequence[Comparison]]) -> str:
    columns = [f"{kind}: over {name}" for kind in Kind for name in (*map(code, BASELINES), "the better")]
    rows = [
        [code(variant), mode, str(len(common)), *_row_of_means(variant, common)]
        for variant, found in comparisons.items()
        for mode, modes in _MODES.items()
        if (common := [each for each in found if each.mode in modes and is_complete(each)])
    ]
    return markdown_table(["variant", "mode", "workloads", *columns], rows)


def is_complete(each: Comparison) -> bool:
    """Return whether both baselines and the variant ran a workload, so that it counts in means."""
    return all(times.ratio is not None and set(BASELINES) <= set(times.ms) for times in each.times.values())


def _row_of_means(variant: str, common: Sequence[Comparison]) -> list[str]:
    return [
        f"{mean:.3f}"
        for kind in Kind
        for mean in (
            *(
                statistics.geometric_mean(
                    [each.times[kind].ms[variant] / each.times[kind].ms[name] for each in common]
                )
                for name in BASELINES
            ),
            statistics.geometric_mean([each.times[kind].ratio or 1.0 for each in common]),
        )
    ]


def _times(records: Sequence[Record], comparisons: Mapping[str, Sequence[Comparison]], kind: Kind) -> str:
    found = {(name, each.workload): each.times[kind] for name, all_ in comparisons.items() for each in all_}
    rows, tried = [], {(each.workload, each.variant) for each in records}
    peers = [*BASELINES, *(name for name in (BY_HAND,) if any(each.variant == name for each in records))]
    for workload in dict.fromkeys(each.workload for each in records):
        of_any = next(found[name, workload] for name in comparisons if (name, workload) in found)
        # A baseline that was not run leaves a gap, as `step_ms` would say that it fails.
        plain = [step_ms(of_any, name) if (workload, name) in tried else _NONE for name in peers]
        ours = [_ours(found.get((name, workload)), name) for name in comparisons]
        rows.append([workload, *plain, *ours])
    return markdown_table(["workload", *map(code, (*peers, *comparisons))], rows)


def step_ms(times: Times, name: str) -> str:
    """Return the time of a step as a variant, or that it fails."""
    return milliseconds(times.ms[name]) if name in times.ms else "fails"


def _ours(times: Times | None, name: str) -> str:
    if times is None:
        return _NONE
    if times.verdict is Verdict.FAILED or name not in times.ms:
        return "**fails**"
    if times.ratio is None:
        return milliseconds(times.ms[name])
    noise = "?" if times.noise is None else f"{times.noise:.0%}"
    text = f"{times.ratio:.2f} ±{noise}"
    return f"{milliseconds(times.ms[name])} ({f'**{text}**' if times.verdict is Verdict.SLOWER else text})"


def _memory(records: Sequence[Record]) -> str:
    names = [*BASELINES, *variants_to_compare(records)]
    most: dict[tuple[str, str], float] = {}
    for each in records:
        key = each.workload, each.variant
        # The largest and no median, since a process needs room for its peak.
        most[key] = max(most.get(key, 0.0), each.reserved_mb or 0.0)
    rows = [
        [workload, *(f"{mb:.0f}" if (mb := most.get((workload, name))) else _NONE for name in names)]
        for workload in dict.fromkeys(each.workload for each in records)
    ]
    return markdown_table(["workload", *map(code, names)], rows)


def _memory_means(records: Sequence[Record]) -> list[str]:
    """Return what the memory of PyGraph's variants comes to, and whether that keeps the bounds."""
    rows = [
        [
            code(variant),
            found.mode,
            str(len(found.ratios)),
            f"{found.mean:.3f}",
            f"{BOUNDS[found.mode]:.2f}",
            "yes" if found.is_kept else "**no**",
            f"{found.most[1]:.3f} ({found.most[0]})",
        ]
        for variant in variants_to_compare(records)
        for found in peak_memory(records, variant)
    ]
    if not rows:
        return []
    head = ["variant", "mode", "workloads", "geometric mean", "bound", "kept", "largest"]
    return [f"Over `{PLAIN}`, the process that reserved most of each:", markdown_table(head, rows)]


def _coverage(records: Sequence[Record]) -> list[str]:
    """Return the share of kernels in graphs of each workload as each variant."""
    found = {(each.workload, each.variant): each.coverage for each in records if each.coverage is not None}
    names = [
        each for each in (*BASELINES, *variants_to_compare(records)) if any(each == key[1] for key in found)
    ]
    rows = [
        [
            workload,
            *(f"{found[workload, name]:.0%}" if (workload, name) in found else _NONE for name in names),
        ]
        for workload in dict.fromkeys(each.workload for each in records)
        if any((workload, name) in found for name in names)
    ]
    if not rows:
        return []
    text = (
        "### Kernels in graphs\n\nThe share of one step's kernels that CUDA graphs launch. The optimizer is not compiled. PyGraph launches a "
        "graph of one kernel as that kernel, which does not count."
    )
    return [text, markdown_table(["workload", *map(code, names)], rows)]
