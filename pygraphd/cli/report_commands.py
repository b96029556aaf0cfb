"""The commands `pygraphd report` and `pygraphd doctor`. Neither starts the daemon or needs one."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pygraphd.errors import Exit, UsageError
from pygraphd.schema.locations import locate

if TYPE_CHECKING:
    from pygraphd.schema.locations import Locations

_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def report(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE|PID|last",
            help="A file written for PYGRAPH_SUMMARY, the process that wrote one, or the newest one.",
        ),
    ] = "last",
    html: Annotated[str, typer.Option("--html", metavar="OUT", help="Write a page with plots.")] = "",
    json: _AsJson = False,
) -> None:
    """Report what CUDA graphs did for a program: how much of a step they hold, what they save, and what that cost."""
    from pygraphd.cli import render, report_html, summary_files
    from pygraphd.cli.report import report as make_report
    from pygraphd.cli.report_text import report_text
    from pygraphd.cli.summaries import read_summary

    locations = locate()
    made = make_report(read_summary(summary_files.find(target, locations, os.environ)), locations)
    if html:
        report_html.write(Path(html), report_html.page(made))
    sys.stdout.write(f"{render.as_json(made.as_json()) if json else report_text(made)}\n")


def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[SCRIPT|SUMMARY]",
            help="A script that was run by `pygraphd run`, or a summary as for `report`; without one, the newest.",
        ),
    ] = "",
    json: _AsJson = False,
) -> None:
    """Check what PyGraph needs here, and say what keeps a program's kernels out of CUDA graphs; exit code 1 if a check fails."""
    from pygraphd.cli import doctor_text, render
    from pygraphd.cli.doctor import checks
    from pygraphd.cli.doctor_patterns import findings
    from pygraphd.cli.doctor_probe import probe
    from pygraphd.cli.summaries import read_summary

    locations = locate()
    source = _summary_of(target, locations)
    summary = None if source is None else read_summary(source)
    made = checks(locations, probe())
    patterns = [] if summary is None else findings(summary)
    if json:
        answer = {
            "schema": 1,
            "checks": [{**dataclasses.asdict(each), "ok": each.is_ok} for each in made],
            "summary": None if source is None else str(source),
            "patterns": [dataclasses.asdict(each) for each in patterns],
        }
        sys.stdout.write(f"{render.as_json(answer)}\n")
    else:
        sys.stdout.write(f"{doctor_text.checks_text(made)}\n")
        if summary is not None and source is not None:
            sys.stdout.write(f"\n{doctor_text.findings_text(patterns, source, summary.program)}\n")
    raise typer.Exit(Exit.OK if all(each.is_ok for each in made) else Exit.ERROR)


def _summary_of(target: str, locations: Locations) -> Path | None:
    """Return the summary that an argument of `doctor` names; None: there is none yet, and none was asked for. Raises UsageError."""
    from pygraphd.cli import summary_files

    if target.endswith(".py"):
        if (found := summary_files.of_script(target, locations, os.environ)) is not None:
            return found
        raise UsageError(f"{target}: has left no summary yet; run it by: pygraphd run {target}")
    try:
        return summary_files.find(target or summary_files.LAST, locations, os.environ)
    except UsageError:
        if target:
            raise
        return None
