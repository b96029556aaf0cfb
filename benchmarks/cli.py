"""The command line of the benchmarks: progress to stderr, results to stdout and to the file that --out names."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import region_table, table
from benchmarks.arguments import names, positive, run_command
from benchmarks.compare import BAD, Verdict, compare, variants_to_compare
from benchmarks.compare import render as render_comparisons
from benchmarks.errors import BenchmarkError
from benchmarks.peak_memory import line as memory_line
from benchmarks.peak_memory import peak_memory
from benchmarks.records import read_records
from benchmarks.regions import DEFAULT_WAYS, Record, measure_regions
from benchmarks.run import Plan, Run
from benchmarks.suites.catalogue import select_one
from benchmarks.trial import CachePolicy, Settings
from benchmarks.variants import VARIANTS, variants_to_run
from benchmarks.workloads import WORKLOADS, Workload, select_workloads

OF_THE_LAB = {
    "suite": "measure the models of PyTorch's dashboard, in pieces",
    "clients": "run the programs in examples/clients, with PyGraph and without",
    "quick": "hold ten workloads against stored results, in about two minutes",
}
"""Commands of `tools.lab` that are served under this name, too, with their help texts."""

_STANDARD_WORKLOADS = "resnet50-inference,resnet50-training,bert-inference,bert-training,three-ops"
# Warm variants stand behind those that fill their caches.
_STANDARD_VARIANTS = (
    "eager,default,reduce-overhead,pygraph-cold,pygraph-warm,pygraph-default,pygraph-default-warm"
)
_REGION_WORKLOADS = "three-ops,resnet50-inference,bert-inference,resnet50-training,bert-training"
# MAX_REQUEST_GRAPHS of pygraphd.schema.messages, which is not imported here: other commands do without the
# product.
_MAX_GRAPHS = 1024


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all went well, 1 if something that was measured failed, 2 if it could not be run as asked."""
    return run_command(parser(), arguments)


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    commands = made.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="measure workloads as variants, each in a fresh process"))
    _add_compare(commands.add_parser("compare", help="hold PyGraph against the better of plain PyTorch's"))
    _add_table(commands.add_parser("table", help="print result files of `run` and `regions`"))
    _add_regions(
        commands.add_parser("regions", help="time compiled regions in PyTorch's own CUDA graphs and in ours")
    )
    _add_lookup(commands.add_parser("lookup", help="time lookups in a daemon, by one client and by many"))
    for name, text in OF_THE_LAB.items():
        commands.add_parser(name, help=text)  # for the list of commands: `__main__` hands them over
    return made


def _add_run(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_run)
    command.add_argument("--list", action="store_true", help="show workloads and variants, and run nothing")
    add_run_options(command)
    command.add_argument(
        "--caches",
        type=CachePolicy,
        choices=list(CachePolicy),
        default=CachePolicy.FRESH,
        help="which processes share compiled code: none (fresh), or all of one compile mode (shared)",
    )


def add_run_options(command: argparse.ArgumentParser, timeout_s: int = 300) -> None:
    """Add the options that choose workloads, variants, and the measurements of each process."""
    add = command.add_argument
    add(
        "--workloads",
        type=names,
        default=_STANDARD_WORKLOADS,
        metavar="A,B",
        help="or `all`, or SUITE:MODEL-MODE",
    )
    add("--variants", type=names, default=_STANDARD_VARIANTS, metavar="P,Q")
    add("--out", type=Path, metavar="FILE", help="the result file (JSON), replaced whole")
    add("--repetitions", type=positive, default=3, help="processes for each pair (default 3)")
    add("--steps", type=positive, default=60, help="timed steps in a process (default 60)")
    # PyGraph decides in these steps; plain variants would need fewer.
    add("--warm-up", type=positive, default=80, help="steps before them (default 80)")
    # Three would be few for a step of a third of a millisecond: the first may still allocate memory.
    add("--windows", type=positive, default=9, help="windows of back-to-back steps (default 9)")
    add("--window-steps", type=positive, default=20, help="steps in a window (default 20)")
    add(
        "--each-step",
        action="store_true",
        help="keep the time of every timed step; with --warm-up 1 from the second step on",
    )
    add("--no-coverage", action="store_true", help="do not profile a step in the end")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a device")
    add("--timeout-s", type=positive, default=timeout_s, help=f"limit of one process (default {timeout_s})")
    add("--logs", type=Path, metavar="DIR", help="keep the output of the processes")


def _add_compare(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_compare)
    command.add_argument("file", type=Path, nargs="+", help="several are taken together")
    command.add_argument(
        "--variant", choices=sorted(VARIANTS), metavar="P", help="default: each of PyGraph's that has records"
    )


def _add_table(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_table)
    command.add_argument("file", type=Path, nargs="+")


def _add_regions(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_regions)
    add_region_options(command)


def add_region_options(command: argparse.ArgumentParser) -> None:
    """Add the options that say which regions are run in which ways."""
    add = command.add_argument
    add("--workloads", type=names, default=_REGION_WORKLOADS, metavar="A,B")
    add(
        "--ways",
        type=names,
        default=list(DEFAULT_WAYS),
        metavar="W,V",
        help="of reduce-overhead, graph and kernels (default: the first two)",
    )
    add("--repetitions", type=positive, default=3, help="processes for each (default 3)")
    add("--caches", type=Path, metavar="DIR", help="keep compiled code for the next time")
    add("--out", type=Path, required=True, metavar="FILE")


def _add_lookup(command: argparse.ArgumentParser) -> None:
    command.set_defaults(command=_lookup)
    command.add_argument("--graphs", type=_graphs, default=20, help="graphs in a request (default 20)")
    command.add_argument("--entries", type=positive, default=10_000, help="in the cache (default 10000)")
    command.add_argument(
        "--clients", type=positive, metavar="N", help="then also ask by N processes at a time"
    )
    command.add_argument(
        "--rate", type=positive, default=1000, help="requests a second of these (default 1000)"
    )
    command.add_argument("--seconds", type=positive, default=20, help="how long they ask (default 20)")
    command.add_argument("--prune", action="store_true", help="have a fifth of the entries pruned meanwhile")
    command.add_argument("--out", type=Path, required=True, metavar="FILE")


def _graphs(text: str) -> int:
    number = positive(text)
    if number > _MAX_GRAPHS:
        raise argparse.ArgumentTypeError(f"a request holds at most {_MAX_GRAPHS} graphs, not {number}")
    return number


def _run(options: argparse.Namespace) -> int:
    if options.list:
        print(_listing())
        return 0
    return execute(Run(plan_of(options, options.caches)))


def execute(run: Run) -> int:
    """Run it, print its table, and return the exit code."""
    print(table.render(run.execute()))
    return int(run.failed)


def plan_of(options: argparse.Namespace, caches: CachePolicy) -> Plan:
    """Return the plan that the options of `run` ask for."""
    # No required option of the parser, since --list needs none.
    if options.out is None:
        raise BenchmarkError("name the result file with --out FILE")
    return Plan(
        workloads=_workloads(options.workloads),
        variants=variants_to_run(options.variants),
        repetitions=options.repetitions,
        settings=settings_of(options, caches, options.timeout_s, profile=not options.no_coverage),
        out=options.out.absolute(),
        each_step=options.each_step,
    )


def _workloads(asked: list[str]) -> tuple[Workload, ...]:
    """Return workloads by name, and behind them those of suites, named `SUITE:MODEL-MODE`."""
    of_suites = [name for name in asked if ":" in name]
    return (
        *select_workloads([name for name in asked if name not in of_suites]),
        *map(select_one, dict.fromkeys(of_suites)),
    )


def settings_of(
    options: argparse.Namespace, caches: CachePolicy, timeout_s: float, *, profile: bool = True
) -> Settings:
    """Return the settings of the processes that options describe."""
    return Settings(
        steps=options.steps,
        warm_up=options.warm_up,
        windows=options.windows,
        window_steps=options.window_steps,
        device=options.device,
        caches=caches,
        timeout_s=timeout_s,
        logs=options.logs and options.logs.absolute(),
        profile=profile,
    )


def _listing() -> str:
    width = max(map(len, [*WORKLOADS, *VARIANTS]))
    workloads = [f"  {each.name:{width}}  {each.mode}, batch {each.batch}" for each in WORKLOADS.values()]
    variants = [f"  {each.name:{width}}  {each.summary}" for each in VARIANTS.values()]
    return "\n".join(["workloads", *workloads, "variants", *variants])


def _compare(options: argparse.Namespace) -> int:
    records = [record for file in options.file for record in read_records(file)]
    verdicts: list[Verdict] = []
    is_memory_kept = True
    for variant in [options.variant] if options.variant else variants_to_compare(records):
        if not (comparisons := compare(records, variant)):
            break
        print(render_comparisons(comparisons, variant))
        for memory in peak_memory(records, variant):
            print(memory_line(memory))
            is_memory_kept &= memory.is_kept
        verdicts += [each.waited_for.verdict for each in comparisons]
    if not verdicts:
        raise BenchmarkError(
            f"no record of {options.variant or 'PyGraph'} in these files: name another with --variant"
        )
    return int(any(verdict in BAD for verdict in verdicts) or not is_memory_kept)


def _table(options: argparse.Namespace) -> int:
    for file in options.file:
        print(f"{file}:\n{_tables_of(file)}")
    return 0


def _tables_of(file: Path) -> str:
    # Tried first, since the reader of `run`'s files refuses others with an error.
    if (regions := region_table.read_regions(file)) is not None:
        return region_table.render(regions)
    return table.render(read_records(file))


def _regions(options: argparse.Namespace) -> int:
    # Absolute, since child processes run in the repository's root, wherever this one was started.
    workloads, caches = select_workloads(options.workloads), options.caches and options.caches.absolute()
    out = options.out.absolute()
    return print_regions(measure_regions(workloads, options.ways, options.repetitions, out, caches))


def print_regions(records: list[Record]) -> int:
    """Print the table of regions, and return the exit code."""
    print(region_table.render(records))
    return int(any("error" in each for each in records))


def _lookup(options: argparse.Namespace) -> int:
    # Imported here: the other commands must work where the product does not.
    from benchmarks.lookup import Load, measure_lookup
    from benchmarks.lookup import Plan as LookupPlan

    load = options.clients and Load(options.clients, options.rate, options.seconds, options.graphs)
    plan = LookupPlan(options.graphs, options.entries, load, options.prune)
    lines, is_kept = measure_lookup(plan, options.out.absolute())
    print("\n".join(lines))
    return 0 if is_kept else 1
