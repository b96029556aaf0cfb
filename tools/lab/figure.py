"""`python -m tools.lab figure`: a PNG of each step's time from the first steps on, out of a result file of `run --each-step`.

One panel a workload, one line a variant: what finding out costs, and what runs when it is decided.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from benchmarks.errors import BenchmarkError
from benchmarks.records import read_result, records_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

    from benchmarks.records import Record

COLUMNS = 2
WIDTH_IN, HEIGHT_IN = 5.5, 2.8
COLOURS = {
    "eager": "#9a9a9a",
    "default": "#1f77b4",
    "default-again": "#17becf",
    "cuda-graph": "#000000",
    "reduce-overhead": "#ff7f0e",
    "pygraph-cold": "#d62728",
    "pygraph-warm": "#2ca02c",
    "pygraph-default": "#9467bd",
    "pygraph-default-warm": "#8c564b",
}
"""One for each variant, the same in every figure."""


def draw(file: Path, out: Path) -> None:
    """Draw a result file to `out`; raises BenchmarkError if it has no steps to draw, or matplotlib is missing."""
    content = read_result(file)
    records, warm_up = records_of(content), int(content["settings"]["warm_up"])
    workloads = list(dict.fromkeys(record.workload for record in records if record.each_step_ms))
    if not workloads:
        raise BenchmarkError("no record has its steps: measure them with `run --each-step`")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BenchmarkError("matplotlib is missing; install it with: pip install matplotlib") from error
    columns = min(COLUMNS, len(workloads))
    rows = -(-len(workloads) // columns)
    figure = Figure(figsize=(columns * WIDTH_IN, rows * HEIGHT_IN), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, workload in zip(panels, workloads, strict=False):
        _panel(panel, [record for record in records if record.workload == workload], warm_up + 1)
    for panel in panels[len(workloads) :]:
        panel.set_axis_off()
    lines = _variants(panels)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False)
    environment = content["environment"]
    title = f"{environment['gpu'] or environment['cpu']}, torch {environment['torch']}"
    figure.suptitle(title, fontsize="medium")
    figure.savefig(out, dpi=110, format="png", metadata={"Software": ""})


def medians(each_step_ms: Sequence[Sequence[float]]) -> list[float]:
    """Return for each step the median over the repetitions that got as far."""
    longest = max(map(len, each_step_ms))
    return [statistics.median(steps[i] for steps in each_step_ms if i < len(steps)) for i in range(longest)]


def _variants(panels: Sequence[Axes]) -> dict[str, Artist]:
    """Return a line for each variant of any panel: one that fails with a workload is not in the panel of that."""
    drawn = {str(line.get_label()): line for panel in panels for line in panel.lines}
    return {variant: drawn[variant] for variant in COLOURS if variant in drawn}


def _panel(panel: Axes, records: Sequence[Record], first: int) -> None:
    from matplotlib.ticker import LogLocator

    for record in records:
        if record.each_step_ms:
            times = medians(record.each_step_ms)
            steps = range(first, first + len(times))
            panel.plot(steps, times, label=record.variant, color=COLOURS[record.variant], lw=1)
    panel.set_title(records[0].workload, fontsize="small")
    panel.set_yscale("log")
    panel.yaxis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))  # all nine would be written over each other
    panel.yaxis.set_major_formatter("{x:g}")
    panel.yaxis.set_minor_formatter("{x:g}")
    panel.tick_params(labelsize="x-small", which="both")
    panel.set_xlabel("step", fontsize="small")
    panel.set_ylabel("ms, waited for", fontsize="small")
    panel.grid(visible=True, which="both", lw=0.3)
