"""A checkout with made-up results, and the cells of the pages that are made of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from benchmarks.records import Record, write_result
from tools.lab.report import BEGIN, END

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENT = {"gpu": "NVIDIA H100", "torch": "2.11.0", "cpu": "a CPU", "commit": "abc"}


def record(
    workload: str, variant: str, *medians: float, windows: list[float] | None = None, **more: Any
) -> Record:
    """Return a record with these medians of its processes."""
    mode = "training" if workload.endswith("training") else "inference"
    return Record(
        workload,
        mode,
        1,
        variant,
        repetition_medians_ms=list(medians),
        repetition_pipelined_ms=windows or [],
        **more,
    )


RECORDS = [
    record("bert-training", "default", 20.0, 20.0, windows=[18.0]),
    record("bert-training", "reduce-overhead", 8.0, 8.0, windows=[7.0]),
    record("bert-training", "pygraph-cold", 9.0, 9.0, windows=[6.0]),
    record("bert-training", "pygraph-default", 4.0, 4.4, windows=[3.0]),
    record("dlrm-inference", "default", 1.0),
    record("dlrm-inference", "reduce-overhead"),
    record("dlrm-inference", "pygraph-cold"),
    record("dlrm-inference", "pygraph-default", 0.25, reserved_mb=300.0),
    record("bert-inference", "default", 2.0, windows=[2.0]),
    record("bert-inference", "reduce-overhead", 0.5, windows=[0.4]),
    record("bert-inference", "pygraph-cold", 0.25, windows=[0.2]),
]


def checkout(folder: Path, records: list[Record] = RECORDS, **more: Any) -> Path:
    """Make a checkout with these results, and pages that have room for them."""
    results = folder / "benchmarks/results"
    results.mkdir(parents=True)
    (folder / "docs").mkdir()
    (folder / "README.md").write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    (folder / "docs/team.md").write_text(f"{BEGIN}\n\n{END}\n")
    write_result(results / "steps-h100.json", ENVIRONMENT, {}, records)
    content = json.loads((results / "steps-h100.json").read_text())
    (results / "steps-h100.json").write_text(json.dumps({**content, **more}))
    return folder


def cells(page: str, heading: str, first: str) -> list[str]:
    """Return the cells of the line under a heading whose first cell is given."""
    below = page.partition(heading)[2]
    return next(
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in below.splitlines()
        if line.startswith(f"| {first} |")
    )
