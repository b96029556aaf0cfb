"""The commands `pygraphd report` and `pygraphd doctor`. Neither starts the daemon or needs one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pygraphd.schema.locations import locate

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
