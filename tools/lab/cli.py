"""The command line of the lab: progress to stderr, results to stdout and to the file that --out names."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.arguments import names, positive, run_command
from benchmarks.records import check_writable
from benchmarks.workloads import select_workloads
from tools.lab.campaign_steps import USAGE
from tools.lab.imports import VARIANTS, measure_imports


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all went well, 1 if something that was measured failed, 2 if it could not be run as asked."""
    return run_command(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.lab", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_campaign(commands.add_parser("campaign", help="run several measurements within a time limit"))
    _add_merge(
        commands.add_parser("merge", help="make one of several result files of `run`, or of `regions`")
    )
    _add_figure(commands.add_parser("figure", help="draw the steps of a result file of `run --each-step`"))
    _add_memory(commands.add_parser("memory", help="show where reserved GPU memory goes in a steady state"))
    _add_imports(commands.add_parser("imports", help="time processes that only import something"))
    return parser


def _add_memory(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_memory)
    parser.add_argument("workload", metavar="WORKLOAD")
    parser.add_argument(
        "--ways", type=names, default="reduce-overhead,graph", metavar="W,V", help="see `regions`"
    )
    parser.add_argument("--out", type=Path, metavar="FILE")


def _add_campaign(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_campaign)
    parser.add_argument("step", nargs="+", metavar="STEP", help=f"one of {', '.join(USAGE.values())}")
    parser.add_argument("--gpus", type=positive, default=1, help="GPUs to use (default 1)")
    parser.add_argument("--end-s", type=positive, default=580, help="seconds in all (default 580)")
    parser.add_argument("--out", type=Path, default=Path("build/campaign"), metavar="DIR")
    parser.add_argument("--commit", help="what results are to name, where there is no git to ask")
    parser.add_argument(
        "--compiled",
        type=Path,
        metavar="DIR",
        help="keep there what `run` and `regions` compile, for the next campaign",
    )


def _add_merge(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_merge)
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument(
        "--note", metavar="TEXT", help="why files of different commits or schemas belong together"
    )


def _add_figure(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_figure)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="PNG")


def _add_imports(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_imports)
    parser.add_argument("--repetitions", type=positive, default=20, help="default 20")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")


def _memory(options: argparse.Namespace) -> int:
    from tools.lab.memory import measure_memory
    from tools.lab.memory_table import render as render_memory

    (workload,) = select_workloads([options.workload])
    answers = measure_memory(workload, options.ways, options.out and options.out.absolute())
    print(render_memory(answers))
    return int(any("error" in each for each in answers))


def _campaign(options: argparse.Namespace) -> int:
    from tools.lab.campaign import run_campaign

    compiled = options.compiled.absolute() if options.compiled else None
    did_well = run_campaign(
        options.step, options.out.absolute(), options.gpus, options.end_s, options.commit, compiled
    )
    return int(not did_well)


def _figure(options: argparse.Namespace) -> int:
    from tools.lab.figure import draw

    check_writable(options.out.absolute())
    draw(options.file, options.out)
    return 0


def _merge(options: argparse.Namespace) -> int:
    from tools.lab.merge import merge

    count = merge(options.file, options.out.absolute(), options.note)
    print(f"{options.out}: {count} records of {len(options.file)} files")
    return 0


def _imports(options: argparse.Namespace) -> int:
    print("\n".join(measure_imports(VARIANTS, options.repetitions, options.out.absolute())))
    return 0
