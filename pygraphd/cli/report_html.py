"""The page of `pygraphd report --html`: one file that refers to nothing else, in light and dark, and fit to print."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import stat
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pygraphd.cli.render_explanations import NOTE_LABELS, SOURCES
from pygraphd.cli.report_plots import COLOURS, payback_plot, step_plot
from pygraphd.cli.report_text import cells, headline, kind, remarks
from pygraphd.errors import CommandError, UsageError
from pygraphd.schema.ownership import is_irregular, replace_file

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pygraphd.cli.report import Report, Row

_BEGINS = b"<!doctype html>"
"""The first bytes of a page."""
WAIT_S = 10.0
"""Seconds that the reader of a pipe may take for a page."""
_PALETTE = ("8f939c", "4269d0", "c98a00", "e0533d", "2f9e8f", "6a9a3a", "d0608f", "8a56d8", "5b8fc7")
"""The colours of `report_plots`: grey for the rest, then one for each graph. They keep 3:1 against both backgrounds."""
_HEADER = (
    ("#", ""),
    ("graph", "graph"),
    ("runs as", ""),
    ("kernels", "n"),
    ("share", "n"),
    ("saves ms a step", "n"),
    ("MiB a call", "n"),
    ("decided after s", "n"),
    ("why", "why"),
)
# The rules for print come last: of rules of equal weight, CSS takes the later one.
_STYLE = """
:root { color-scheme: light dark; --back: #fff; --ink: #1c1e21; --soft: #5c626b; --rule: #d9dce1; --panel: #f5f6f8; --gain: #1f8a4c; --cost: #c2452f; }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181c; --ink: #e8eaed; --soft: #a3a9b3; --rule: #363a42; --panel: #1f2228; --gain: #4cc27f; --cost: #f0836d; }
}
body { margin: 0 auto; padding: 1.5rem; max-width: 80rem; background: var(--back); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p, .small { color: var(--soft); } .small { font-size: .85em; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; padding: 1rem; background: var(--panel); border: 1px solid var(--rule); border-radius: 6px; }
dt { color: var(--soft); } dd { margin: 0; font-variant-numeric: tabular-nums; overflow-wrap: anywhere; }
figure { margin: 0; max-width: 48rem; } figcaption { color: var(--soft); font-size: .85em; }
svg { width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .on { fill: #fff; font-weight: 600; } .axis { stroke: var(--soft); } .grid { stroke: var(--rule); stroke-dasharray: 3 4; }
.gain { stroke: var(--gain); stroke-width: 2.5; } .gain-dot { fill: var(--gain); } .cost { stroke: var(--cost); stroke-width: 2.5; stroke-dasharray: 8 4; }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .92em; }
th, td { text-align: left; vertical-align: top; padding: .4rem .6rem; border-bottom: 1px solid var(--rule); }
th { color: var(--soft); font-weight: 600; } td:first-child { white-space: nowrap; } .graph { min-width: 14rem; } .why { min-width: 11rem; } .n { text-align: right; font-variant-numeric: tabular-nums; }
.chip { display: inline-block; width: .7em; height: .7em; border-radius: 2px; margin-right: .4em; }
@media print {
  :root { color-scheme: light; --back: #fff; --ink: #000; --soft: #444; --rule: #bbb; --panel: #fff; --gain: #1f8a4c; --cost: #c2452f; }
  * { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  figure, tr, dl { break-inside: avoid; }
  body { font-size: 11px; padding: 0; } .wide { overflow: visible; } .graph, .why { min-width: 0; }
}
"""


def page(report: Report) -> str:
    """Return the HTML of a report."""
    program = report.summary.program or "a program"
    title = f"PyGraph report: {program}"
    pid = "" if report.summary.pid is None else f" (pid {report.summary.pid})"
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in headline(report))
    # The policy lets nothing be loaded or run: names and reasons of a summary may be any text.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_STYLE}{_colours()}</style>
</head>
<body>
<h1>{escape(title)}{escape(pid)}</h1>
<p>{escape(_environments(report))}</p>
<dl>{facts}</dl>
{_figure("Where a step's time goes", step_plot(report), "Time in compiled graphs; the numbers are those of the table.")}
{_figure("Gain against cost", payback_plot(report), "Saved and taken in all, in one process.")}
{_table(report)}
{_notes(report)}
{"".join(f"<p>{escape(text)}</p>" for text in remarks(report))}
</body>
</html>
"""


def _is_no_page(path: Path) -> bool:
    """Return whether a file holds something else than a page, which must not be lost."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        begins = file.read(len(_BEGINS)).lower()
    # Of an empty file, nothing would be lost.
    return bool(begins) and begins != _BEGINS


def write(path: Path, text: str) -> None:
    """Write a page to a file, all at once, or into a device or a pipe; raises UsageError where there can be none, CommandError.

    Only another page is replaced: `--html` may have been given the summary to read.
    """
    # Python has lone surrogates for the bytes of file names that are not UTF-8, and they cannot be encoded.
    data = text.encode("utf-8", "replace")
    try:
        if is_irregular(path):
            _pour(path, data)
        elif _is_no_page(path):
            raise UsageError(
                f"{path}: is no page, and would be replaced by one; --html takes the file to write"
            )
        else:
            # A new file takes the place of the old one, with the same rights.
            mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
            # Behind a link: to rename a file to it would replace the link itself.
            replace_file(Path(os.path.realpath(path)), data, mode)
    except IsADirectoryError as error:
        raise UsageError(f"{path}: is a folder; give the name of a file in it") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        folder = Path(os.path.realpath(path)).parent if path.parent.is_dir() else path.parent
        raise UsageError(f"{path}: cannot be written, as there is no folder {folder}") from error
    except OSError as error:
        why = "nobody reads it" if error.errno == errno.ENXIO else error.strerror or error
        raise CommandError(f"{path}: cannot be written: {why}") from error


def _pour(path: Path, data: bytes) -> None:
    """Write data into a device or a pipe, whose reader may take `WAIT_S` for all of it; raises OSError."""
    # O_NONBLOCK: a pipe that nobody reads is ENXIO at once (fifo(7)). O_NOCTTY: no terminal becomes ours.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        deadline, left = time.monotonic() + WAIT_S, memoryview(data)
        while left:
            _, ready, _ = select.select([], [descriptor], [], max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError(errno.ETIMEDOUT, f"its reader took more than {WAIT_S:g} s", str(path))
            with contextlib.suppress(BlockingIOError):
                left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def in_ascii(text: str) -> str:
    """Return the same page for a stream of any encoding: references stand for characters beyond ASCII."""
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


def _colours() -> str:
    return "\n".join(
        f".c{number} {{ fill: #{colour}; background: #{colour}; }}"
        for number, colour in enumerate(_PALETTE[: COLOURS + 1])
    )


def _environments(report: Report) -> str:
    each = (
        ", ".join(f"{name} {value}" for name, value in environment.factors().items() if value)
        for environment in report.summary.environments.values()
    )
    return "; ".join(each)


def _figure(title: str, plot: str, caption: str) -> str:
    if not plot:
        return f"<h2>{escape(title)}</h2><p>Not known: too little was measured, or nothing is saved.</p>"
    return f"<h2>{escape(title)}</h2><figure>{plot}<figcaption>{escape(caption)}</figcaption></figure>"


def _table(report: Report) -> str:
    if not report.rows:
        return ""
    head = "".join(f'<th class="{name}">{escape(text)}</th>' for text, name in _HEADER)
    rows = "\n".join(_row(report, *row) for row in enumerate(report.rows, start=1))
    return f'<h2>Graphs</h2><div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _row(report: Report, number: int, row: Row) -> str:
    chip = f'<span class="chip c{number if number <= COLOURS else 0}"></span>'
    _, _, deployment, *figures = cells(report, number, row)
    what = f"<b>{escape(row.module or kind(row))}</b>" + (f" {escape(kind(row))}" if row.module else "")
    places = "".join(f'<div class="small">{escape(place)}</div>' for place in row.places)
    why = f'{escape(row.reason)}<div class="small">{escape(SOURCES[row.ran.source])}; graph {escape(row.ran.graph[:12])}</div>'
    numbers = "".join(f'<td class="n">{escape(figure)}</td>' for figure in figures)
    return f"<tr><td>{chip}{number}</td><td>{what}{places}</td><td>{escape(deployment)}</td>{numbers}<td>{why}</td></tr>"


def _notes(report: Report) -> str:
    said = [
        f"<dt>{escape(NOTE_LABELS[name])}</dt><dd>{escape(reason)}{f' ({times} times)' if times > 1 else ''}</dd>"
        for name, reasons in report.summary.notes.items()
        for reason, times in _most_frequent(reasons)
    ]
    return f"<h2>Beside the graphs</h2><dl>{''.join(said)}</dl>" if said else ""


def _most_frequent(reasons: dict[str, int]) -> Iterable[tuple[str, int]]:
    return sorted(reasons.items(), key=lambda item: -item[1])
