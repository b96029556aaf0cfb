"""Stored results, and what pages made of them have in common."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.records import Record, read_result, records_of
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Result:
    """A stored file."""

    name: str
    content: Mapping[str, Any]

    @property
    def old(self) -> str | None:
        """Why its figures are not of the newest version; None: they are."""
        return self.content.get("old")

    @property
    def records(self) -> list[Record]:
        """The records of a result of `run`, in the order in which workloads are listed."""
        # Result files have the order in which workloads were asked for, and merged ones that of the files.
        order = list(WORKLOADS)
        return sorted(records_of(self.content), key=lambda each: order.index(each.workload))

    def where(self, processes: Sequence[int]) -> str:
        """Return a paragraph with the machine, the number of processes for each figure, and the reason if the result is old."""
        known = self.content["environment"]
        versions = [
            f"{name} {known[name.lower()]}" for name in ("torch", "CUDA", "driver") if known.get(name.lower())
        ]
        # Those of the daemon's loads have no GPU.
        machine = [known[name] for name in ("gpu", "cpu") if known.get(name)]
        told = f"{', '.join([*machine, *versions])}. {_processes(processes)}".strip()
        return f"{told}\n\n**Old:** {self.old}." if self.old else told


def _processes(counts: Sequence[int]) -> str:
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    each = f"{least}" if least == most else f"{least} to {most}"
    return f"Processes for each figure: {each}."


def read_results(folder: Path, kind: str) -> list[Result]:
    """Return the files of a kind, one for each GPU; old ones last."""
    names = re.compile(rf"{kind}(-[a-z0-9]+)?")
    files = [file for file in sorted(folder.glob("*.json")) if names.fullmatch(file.stem)]
    return sorted((Result(file.stem, read_result(file)) for file in files), key=lambda each: bool(each.old))


def process_counts(records: Sequence[Record]) -> list[int]:
    """Return for each workload and variant that ran how many processes there were."""
    counts: dict[tuple[str, str], int] = {}
    for each in records:
        key = each.workload, each.variant
        counts[key] = counts.get(key, 0) + len(each.repetition_medians_ms)
    return [count for count in counts.values() if count]


def gpu_of(result: Result) -> str:
    """Return the name of a result's GPU."""
    return str(result.content["environment"]["gpu"]).removeprefix("NVIDIA ")


def milliseconds(ms: float) -> str:
    """Return a time with three digits that say something."""
    return f"{ms:.3f}" if ms < 1 else f"{ms:.2f}" if ms < 10 else f"{ms:.1f}"


def code(name: str) -> str:
    """Return a name in the type of code."""
    return f"`{name}`"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of cells in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
