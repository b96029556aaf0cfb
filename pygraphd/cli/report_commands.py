"""The commands `pygraphd report` and `pygraphd doctor`. Neither starts the daemon or needs one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pygraphd.cli.output import check_open, complain
from pygraphd.errors import CommandError, Exit, UsageError
from pygraphd.schema import ownership
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
    html: Annotated[
        str, typer.Option("--html", metavar="OUT", help="Write a page with plots; -: to standard output.")
    ] = "",
    json: _AsJson = False,
) -> None:
    """Report what CUDA graphs did for a program: how much of a step they hold, what they save, and what that cost."""
    from pygraphd.cli import render, report_html, summary_files
    from pygraphd.cli.report import report as make_report
    from pygraphd.cli.report_text import report_text
    from pygraphd.cli.summaries import read_summary

    if html == "-" and json:
        raise UsageError("report: --html - and --json both write to standard output; give --html a file")
    locations = locate()
    source = summary_files.find(target, locations, os.environ)
    made = make_report(read_summary(source), locations, target)
    with contextlib.suppress(OSError):  # it was read, and may be gone by now
        made = dataclasses.replace(made, written_at=source.stat().st_mtime)
    # A page is kept, when `last` has long become another summary.
    page = report_html.page(dataclasses.replace(made, target=str(source))) if html else ""
    if html == "-":
        check_open()
        sys.stdout.write(report_html.in_ascii(page))
        return
    if html:
        report_html.write(Path(html), page)
    sys.stdout.write(f"{render.as_json(made.as_json()) if json else report_text(made)}\n")
    if html:
        # Else this line would come first in a file that takes both streams.
        sys.stdout.flush()
        complain(f"wrote {html}")


def doctor(
    target: Annotated[
        str,
        typer.Argument(
            metavar="[SCRIPT|SUMMARY]",
            help="A script or module that was run by `pygraphd run`, or a summary as for `report`; without one, the newest.",
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
    # Before the checks, which import torch: a name that is wrong is reported at once.
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
    from pygraphd.cli import summaries, summary_files

    if target.endswith(".py"):
        if (found := summary_files.of_program(target, locations, os.environ)) is not None:
            return found
        if not ownership.is_there(Path(target)):
            raise UsageError(f"{target}: there is no such file; give the path of a script or of a summary")
        raise UsageError(f"{target}: has left no summary yet; run it by: pygraphd run {shlex.quote(target)}")
    may_be_program = target not in {"", summary_files.LAST} and not target.isdecimal()
    try:
        found = None
        if may_be_program and not summaries.begins_as_one(target):  # scripts have any name
            found = summary_files.of_program(target, locations, os.environ)
        return found or summary_files.find(target or summary_files.LAST, locations, os.environ)
    except CommandError:  # that of a folder is among the checks
        if target:
            raise
        return None
