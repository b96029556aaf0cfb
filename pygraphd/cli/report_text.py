"""The text of `pygraphd report`: four lines for all, then a table of the graphs, and below it the source lines and the reason of each."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from pygraphd.cli import render
from pygraphd.cli.render_explanations import SOURCES, notes_text
from pygraphd.cli.report import spent
from pygraphd.cli.wrapping import paragraph, wrapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pygraphd.cli.report import Report, Row

HEADER = ("#", "KIND", "RUNS AS", "KERNELS", "SHARE", "SAVES ms", "MiB", "DECIDED s")
MAX_PLACES = 3
_UNKNOWN = "-"


def report_text(report: Report) -> str:
    """Return the whole report."""
    blocks = [render.pairs(headline(report))]
    if report.rows:
        blocks.append(render.table(HEADER, [cells(report, *row) for row in enumerate(report.rows, start=1)]))
        blocks.append("\n".join(line for row in enumerate(report.rows, start=1) for line in _lines(*row)))
    return "\n\n".join([*blocks, *map(paragraph, remarks(report)), *notes_text(report.summary.notes)])


def headline(report: Report) -> list[tuple[str, str]]:
    """Return the four lines: coverage, gain and cost, and the run that they are of."""
    return [
        ("coverage", _coverage(report)),
        ("gain", _gain(report)),
        ("cost", _cost(report)),
        ("run", _run(report)),
    ]


def _run(report: Report) -> str:
    """Return program, pid and end: a run that was killed left no summary, and the newest is then of an earlier one."""
    summary = report.summary
    pid = "" if summary.pid is None else f", pid {summary.pid}"
    ended = "" if report.written_at is None else f", ended {_moment(report.written_at)}"
    return f"{summary.program or 'a program without a name'}{pid}{ended}"


def _moment(seconds_since_epoch: float) -> str:
    # A file may have any time, also one that no calendar has.
    try:
        moment = datetime.fromtimestamp(seconds_since_epoch, UTC).astimezone()
    except (OverflowError, ValueError, OSError):
        return "at a time that is not known"
    return f"{moment:%Y-%m-%d %H:%M:%S %Z}"


def _coverage(report: Report) -> str:
    found = report.coverage
    within, outside, graphs = found.kernels_in_graphs, found.kernels_outside, found.graphs
    if not report.rows:
        return "no graphs: the program compiled none"
    # Graphs that will be recorded count here: "none" would be wrong of them.
    if graphs + found.graphs_not_recorded:
        text = f"{within} of {within + outside} kernels a step in {render.plural(graphs, 'graph', 'graphs')}"
    else:
        text = f"none of {render.plural(len(report.rows), 'compiled graph', 'compiled graphs')} in a GRAPH"
        text += f"; {render.plural(outside, 'kernel', 'kernels')} a step" if outside else ""
    if found.graphs_not_recorded:
        text += f"; {render.plural(found.graphs_not_recorded, 'more graph', 'more graphs')} not recorded yet"
    if found.graphs_not_counted and within + outside:
        uncounted = render.plural(found.graphs_not_counted, "graph has", "graphs have")
        text += f"; {uncounted} kernels that are not counted"
    return text


def _gain(report: Report) -> str:
    if not report.compared:
        return "not known: no graph was measured"
    share = f", {report.gain_ms / report.without_ms:.1%}" if report.without_ms else ""
    known = f"{len(report.compared)} of {render.plural(len(report.rows), 'graph', 'graphs')} measured"
    return (
        f"{report.gain_ms:.3f} ms a step{share}: {report.without_ms:.3f} -> {report.with_ms:.3f} ms ({known})"
    )


def _cost(report: Report) -> str:
    parts = ", ".join(f"{seconds(ms)} {name}" for name, ms in spent(report.summary))
    once = f"{seconds(report.cost_ms)} once" + (f" ({parts})" if parts else "")
    steps = report.paid_back_after
    paid = f"; paid back after {render.plural(steps, 'step', 'steps')}" if steps is not None else ""
    most = max((row.facts.memory_bytes or 0 for row in report.rows if row.is_graph), default=0)
    return once + paid + (f"; up to {_mib(most)} MiB in a call" if most else "") + _recording(report)


def _recording(report: Report) -> str:
    """Return what recording asked for in GPU memory, what it was allowed, and what was not recorded for that."""
    memory = report.summary.memory
    if not memory.peak_requested_bytes:
        return ""
    allowed = f" of the {_mib(memory.limit_bytes)} MiB in PYGRAPH_MEMORY" if memory.limit_bytes else ""
    refused = render.plural(memory.refused_recordings, "recording", "recordings")
    failed = f"; {refused} refused for lack of memory" if memory.refused_recordings else ""
    return f"; recording asked for up to {_mib(memory.peak_requested_bytes)} MiB{allowed}{failed}"


def seconds(ms: float) -> str:
    """Return a time in seconds, or in milliseconds if it is below one second."""
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.1f} ms"


def cells(report: Report, number: int, row: Row) -> tuple[str, ...]:
    """Return the cells of a row under `HEADER`."""
    share, saved, decided = report.share(row), row.saved_ms, row.decided_s
    return (
        str(number),
        kind(row),
        # As in `cache inspect`: a provisional decision has a question mark.
        row.ran.deployment + ("" if row.ran.final else "?"),
        _UNKNOWN if row.kernels is None else str(row.kernels),
        _UNKNOWN if share is None else f"{share:.1%}",
        _UNKNOWN if saved is None else f"{saved:.3f}",
        _UNKNOWN if row.facts.memory_bytes is None else _mib(row.facts.memory_bytes),
        _UNKNOWN if decided is None else f"{decided:.1f}",
    )


def kind(row: Row) -> str:
    """Return kind, partition and sizes of a row, and the number of equal ones."""
    part = f" {row.facts.partition + 1}/{row.facts.partitions}" if row.facts.partitions > 1 else ""
    times = f", {row.times} alike" if row.times > 1 else ""
    return f"{row.ran.kind}{part}{render.sizes_text(row.ran.sizes)}{times}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _lines(number: int, row: Row) -> Iterator[str]:
    places = ", ".join(row.places[:MAX_PLACES]) + (", ..." if len(row.places) > MAX_PLACES else "")
    where = f"{row.module} ({places})" if row.module and places else row.module or places
    operators = (
        "" if row.facts.operators is None else f", {row.facts.operators} operators in the compiled graph"
    )
    yield wrapped(f"{number:>3}  {where or 'source not known'}", 5)
    yield wrapped(f"     {row.ran.deployment}: {row.reason} ({SOURCES[row.ran.source]})", 5)
    yield f"     graph {row.ran.graph[:12]}{operators}"


def remarks(report: Report) -> list[str]:
    """Return the definitions and limits of the figures."""
    said = []
    if report.rows:
        said.append(
            "A step is one call of each graph (the mean over its sizes); the program may call some more often. Kernels include copies and\n"
            "fills; what runs outside of compiled graphs is not counted. A call takes the longer of its host time and its span on the GPU.\n"
            "MiB: the memory that a call of a GRAPH allocates."
        )
    if any(row.reason for row in report.rows if not row.is_graph):
        words = shlex.join(["pygraphd", "doctor", *filter(None, [report.target])])
        said.append(f"To have more kernels in graphs: {words}")
    if report.summary.left_out:
        said.append(f"{report.summary.left_out} more graphs are only counted in the summary")
    if report.problem:
        said.append(report.problem)
    return said
