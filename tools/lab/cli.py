"""The command line of the lab: progress to stderr, results to stdout and to the file that --out names."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.arguments import names, positive, run_command
from benchmarks.cli import (
    OF_THE_LAB,
    add_region_options,
    add_run_options,
    execute,
    plan_of,
    print_regions,
)
from benchmarks.records import read_records
from benchmarks.region_table import GRAPH
from benchmarks.trial import CachePolicy
from benchmarks.workloads import select_workloads
from tools.lab import quick
from tools.lab.campaign_steps import DECISIONS, USAGE
from tools.lab.clients import command as clients_command
from tools.lab.gpu_slots import gpu_slots
from tools.lab.imports import VARIANTS, measure_imports
from tools.lab.suites import command as suite_command


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all went well, 1 if something that was measured failed, 2 if it could not be run as asked."""
    return run_command(parser(), arguments)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    made = argparse.ArgumentParser(prog="python -m tools.lab", description=__doc__, allow_abbrev=False)
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    suite_command.add_options(commands.add_parser("suite", help=OF_THE_LAB["suite"]))
    clients_command.add_options(commands.add_parser("clients", help=OF_THE_LAB["clients"]))
    tables = commands.add_parser("table", help="print result files of `clients`")
    tables.set_defaults(command=clients_command.print_tables)
    tables.add_argument("file", type=Path, nargs="+")
    quick.add_options(commands.add_parser("quick", help=OF_THE_LAB["quick"]))
    _add_campaign(commands.add_parser("campaign", help="run several measurements within a time limit"))
    _add_run(commands.add_parser("run", help="as `benchmarks run`, side by side on several GPUs"))
    _add_regions(commands.add_parser("regions", help="as `benchmarks regions`, compiling side by side"))
    _add_addresses(commands.add_parser("addresses", help="time steps whose addresses alternate"))
    _add_merge(
        commands.add_parser("merge", help="make one of several result files of `run`, or of `regions`")
    )
    _add_ship(commands.add_parser("ship", help="choose from exports the decisions that the package ships"))
    commands.add_parser(
        "report", help="write docs/performance.md and README's table from stored results"
    ).set_defaults(command=_report)
    _add_overhead(
        commands.add_parser("overhead", help="hold what deciding takes against the time to compile")
    )
    _add_memory(commands.add_parser("memory", help="show where reserved GPU memory goes in a steady state"))
    _add_imports(commands.add_parser("imports", help="time processes that only import something"))
    return made


def _add_campaign(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_campaign)
    command.add_argument("step", nargs="+", metavar="STEP", help=f"one of {', '.join(USAGE.values())}")
    command.add_argument("--gpus", type=positive, default=1, help="GPUs to use (default 1)")
    command.add_argument("--end-s", type=positive, default=580, help="seconds in all (default 580)")
    command.add_argument("--out", type=Path, default=Path("build/campaign"), metavar="DIR")
    command.add_argument("--commit", help="what results are to name, where there is no git to ask")
    command.add_argument(
        "--compiled",
        type=Path,
        metavar="DIR",
        help="keep there what `run` and `regions` compile, for the next campaign",
    )
    command.add_argument(
        "--decisions",
        action="store_true",
        help=f"leave the decisions of all `run` steps in {DECISIONS}, for `ship`",
    )


def _add_run(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_run)
    # A process also waits for others to compile and to be timed.
    add_run_options(command, timeout_s=1_200)
    add = command.add_argument
    add("--gpus", type=positive, default=1, help="GPUs to deal the workloads to (default 1)")
    add(
        "--at-once",
        type=positive,
        metavar="N",
        help="workloads that compile side by side on a GPU (default: all)",
    )
    add("--budget-s", type=positive, help="begin no repetition that would end later than this")
    add("--compiled", type=Path, metavar="DIR", help="keep there what was compiled, for the next run")
    add(
        "--decisions",
        type=Path,
        metavar="FILE",
        help="add the final decisions of all processes to this export",
    )


def _add_regions(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_regions)
    add_region_options(command)


def _add_addresses(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_addresses)
    add_region_options(command)
    # Behind the options: one that is added later would keep the default that it brings.
    command.set_defaults(ways=[GRAPH], repetitions=1)


def _add_merge(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_merge)
    command.add_argument("file", type=Path, nargs="+")
    command.add_argument("--out", type=Path, required=True, metavar="FILE")
    command.add_argument("--note", metavar="TEXT", help="why files of different commits belong together")


def _add_ship(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_ship)
    command.add_argument(
        "file", type=Path, nargs="+", help="as `pygraphd cache export` or --decisions left it"
    )
    command.add_argument(
        "--into", type=Path, default=Path("pygraphd/shipped"), metavar="DIR", help="default: %(default)s"
    )


def _add_overhead(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_overhead)
    command.add_argument("file", type=Path, nargs="+", help="several are taken together")


def _add_memory(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_memory)
    command.add_argument("workload", metavar="WORKLOAD")
    command.add_argument(
        "--ways", type=names, default="reduce-overhead,graph", metavar="W,V", help="see `regions`"
    )
    command.add_argument("--out", type=Path, metavar="FILE")


def _add_imports(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_imports)
    command.add_argument("--repetitions", type=positive, default=20, help="default 20")
    command.add_argument("--out", type=Path, required=True, metavar="FILE")


def _campaign(options: argparse.Namespace) -> int:
    from tools.lab.campaign import run_campaign

    compiled = options.compiled.absolute() if options.compiled else None
    out = options.out.absolute()
    decisions = out / DECISIONS if options.decisions else None
    did_well = run_campaign(
        options.step, out, options.gpus, options.end_s, options.commit, compiled, decisions
    )
    return int(not did_well)


def _run(options: argparse.Namespace) -> int:
    from tools.lab.run import SharedRun, Sharing

    # Absolute, since child processes run in the repository's root, wherever this one was started.
    compiled = options.compiled and options.compiled.absolute()
    decisions = options.decisions and options.decisions.absolute()
    sharing = Sharing(gpu_slots(options.gpus), options.at_once, options.budget_s, compiled, decisions)
    return execute(SharedRun(plan_of(options, CachePolicy.SHARED), sharing=sharing))


def _regions(options: argparse.Namespace) -> int:
    from tools.lab.regions import measure_side_by_side

    workloads, caches = select_workloads(options.workloads), options.caches and options.caches.absolute()
    out = options.out.absolute()
    return print_regions(measure_side_by_side(workloads, options.ways, options.repetitions, out, caches))


def _addresses(options: argparse.Namespace) -> int:
    from tools.lab.regions import address_lines, measure_side_by_side

    workloads, caches = select_workloads(options.workloads), options.caches and options.caches.absolute()
    out = options.out.absolute()
    records = measure_side_by_side(workloads, options.ways, options.repetitions, out, caches, "addresses")
    print("\n".join(address_lines(records)))
    return int(any("error" in each for each in records))


def _merge(options: argparse.Namespace) -> int:
    from tools.lab.merge import merge

    count = merge(options.file, options.out.absolute(), options.note)
    print(f"{options.out}: {count} records of {len(options.file)} files")
    return 0


def _ship(options: argparse.Namespace) -> int:
    from tools.lab.decisions import ship

    print("\n".join(ship(options.file, options.into.absolute())))
    return 0


def _report(_options: argparse.Namespace) -> int:
    from tools.lab.report import write_report

    print("\n".join(write_report()) or "nothing has changed")
    return 0


def _overhead(options: argparse.Namespace) -> int:
    from tools.lab.overhead import render

    print(render([record for file in options.file for record in read_records(file)]))
    return 0


def _memory(options: argparse.Namespace) -> int:
    from tools.lab.memory import measure_memory, render

    (workload,) = select_workloads([options.workload])
    answers = measure_memory(workload, options.ways, options.out and options.out.absolute())
    print(render(answers))
    # A campaign's step fails by this exit code.
    return int(any("error" in each for each in answers))


def _imports(options: argparse.Namespace) -> int:
    print("\n".join(measure_imports(VARIANTS, options.repetitions, options.out.absolute())))
    return 0
