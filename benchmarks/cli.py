"""The command line of the benchmarks: progress to stderr, results to stdout and to the file that --out names."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.arguments import names, positive, run_command
from benchmarks.compare import BAD, BASELINES, Kind, Verdict, compare, variants_to_compare
from benchmarks.compare import render as render_comparisons
from benchmarks.errors import BenchmarkError
from benchmarks.lanes import lanes
from benchmarks.overhead import render as render_overheads
from benchmarks.records import read_records
from benchmarks.report import write_report
from benchmarks.run import Plan, Run
from benchmarks.table import render
from benchmarks.trial import CachePolicy, Settings
from benchmarks.variants import VARIANTS, select_variants
from benchmarks.workloads import WORKLOADS, select_workloads

_STANDARD_WORKLOADS = "resnet50-inference,resnet50-training,bert-inference,bert-training,three-ops"

_STANDARD_VARIANTS = "eager,default,reduce-overhead,pygraph-cold,pygraph-warm,pygraph-default"

# Neither has those of FOR_REGIONS, which are asked for by name: `regions` runs 7,000 steps, and resnet50-training-large's are long.
_REGION_WORKLOADS = "three-ops,wide-inference,autoencoder-inference,resnet50-inference,bert-inference,resnet50-training,bert-training"


def main(arguments: list[str] | None = None) -> int:
    """Return 0 if all went well, 1 if something that was measured failed, 2 if it could not be run as asked."""
    return run_command(_parser(), arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_run(commands.add_parser("run", help="measure workloads with variants, each in a fresh process"))
    _add_table(commands.add_parser("table", help="print result files of `run` and `regions`"))
    _add_compare(commands.add_parser("compare", help="hold variants against the better of their baselines"))
    _add_report(
        commands.add_parser("report", help="write docs/performance.md and README's table from stored results")
    )
    _add_overhead(
        commands.add_parser("overhead", help="hold what deciding takes against the time to compile")
    )
    _add_regions(
        commands.add_parser("regions", help="time compiled regions in PyTorch's own CUDA graphs and in ours")
    )
    _add_lookup(commands.add_parser("lookup", help="time lookups in a daemon with 10,000 entries"))
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_run)
    parser.add_argument(
        "--list", action="store_true", help="show the workloads and variants, and run nothing"
    )
    parser.add_argument("--workloads", type=names, default=_STANDARD_WORKLOADS, metavar="A,B")
    parser.add_argument("--variants", type=names, default=_STANDARD_VARIANTS, metavar="P,Q")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result file (JSON), replaced whole")
    parser.add_argument("--repetitions", type=positive, default=3, help="processes for each pair (default 3)")
    _add_together(parser)
    parser.add_argument(
        "--gpus",
        type=positive,
        default=1,
        help="GPUs to deal the workloads to, each with its share of the cores; with --together (default 1)",
    )
    parser.add_argument(
        "--at-once",
        type=positive,
        metavar="N",
        help="workloads whose processes compile side by side on a GPU; with --together (default: all)",
    )
    parser.add_argument(
        "--once", type=names, default=[], metavar="P,Q", help="variants that run in the first repetition only"
    )
    parser.add_argument("--steps", type=positive, default=60, help="timed steps in a process (default 60)")
    parser.add_argument("--warm-up", type=positive, default=80, help="steps before them (default 80)")
    parser.add_argument(
        "--windows", type=positive, default=3, help="windows of unsynchronised steps (default 3)"
    )
    parser.add_argument("--window-steps", type=positive, default=20, help="steps in a window (default 20)")
    parser.add_argument(
        "--each-step",
        action="store_true",
        help="keep the time of every timed step, for `figure`; with --warm-up 1 from the second step on",
    )
    parser.add_argument(
        "--no-coverage",
        action="store_true",
        help="do not profile a step in the end, for where a profiler does harm",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a device")
    parser.add_argument(
        "--caches",
        type=CachePolicy,
        choices=list(CachePolicy),
        default=CachePolicy.FRESH,
        help="who shares what was compiled: nobody (fresh), the repetitions of a variant, or all of one compile mode",
    )
    parser.add_argument(
        "--compiled",
        type=Path,
        metavar="DIR",
        help="keep there what was compiled, for the next run; with --caches variant or shared",
    )
    parser.add_argument(
        "--budget-s", type=positive, help="begin no repetition that would end later than this"
    )
    parser.add_argument("--timeout-s", type=positive, default=300, help="limit of one process (default 300)")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the processes print")


def _add_regions(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_regions)
    parser.add_argument("--workloads", type=names, default=_REGION_WORKLOADS, metavar="A,B")
    parser.add_argument(
        "--ways",
        type=names,
        metavar="W,V",
        help="of reduce-overhead, graph and kernels (default: the first two)",
    )
    parser.add_argument("--repetitions", type=positive, default=3, help="processes for each (default 3)")
    parser.add_argument("--caches", type=Path, metavar="DIR", help="keep what was compiled for the next time")
    parser.add_argument(
        "--no-addresses",
        dest="addresses",
        action="store_false",
        help="do not time steps whose addresses alternate, which are thousands",
    )
    _add_together(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")


def _add_together(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--together",
        action="store_true",
        help="have the processes of a repetition compile side by side; they are measured one after the other",
    )


def _add_table(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_table)
    parser.add_argument("file", type=Path, nargs="+")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_compare)
    parser.add_argument("file", type=Path, nargs="+", help="several are taken together")
    parser.add_argument(
        "--variant", choices=sorted(VARIANTS), metavar="P", help="default: each of PyGraph's that has records"
    )
    parser.add_argument(
        "--baselines",
        type=names,
        default=list(BASELINES),
        metavar="P,Q",
        help=f"what is held against (default {','.join(BASELINES)}); of a warm one, say, the cold one",
    )
    parser.add_argument(
        "--back-to-back",
        action="store_true",
        help="have the exit code be 1, too, if one loses only in steps that are not waited for",
    )


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_report)


def _add_overhead(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_overhead)
    parser.add_argument("file", type=Path, nargs="+", help="several are taken together")


def _add_lookup(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_lookup)
    parser.add_argument("--graphs", type=_graphs, default=20, help="graphs in a request (default 20)")
    parser.add_argument("--requests", type=positive, default=2000, help="default 2000")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")


def _graphs(text: str) -> int:
    number = positive(text)
    if number > _MAX_GRAPHS:
        raise argparse.ArgumentTypeError(f"a request holds at most {_MAX_GRAPHS} graphs, not {number}")
    return number


_MAX_GRAPHS = 1024


def _run(options: argparse.Namespace) -> int:
    if options.list:
        print(_listing())
        return 0
    if options.out is None:
        raise BenchmarkError("name the result file with --out FILE")
    run = Run(_plan(options))
    print(render(run.execute()))
    return 1 if run.failed else 0


def _plan(options: argparse.Namespace) -> Plan:
    if not options.together and (options.gpus > 1 or options.at_once):
        raise BenchmarkError("--gpus and --at-once need --together")
    if options.compiled and options.caches is CachePolicy.FRESH:
        raise BenchmarkError("--compiled needs --caches variant or shared: with fresh, nobody finds it again")
    return Plan(
        workloads=select_workloads(options.workloads),
        variants=select_variants(options.variants),
        repetitions=options.repetitions,
        settings=Settings(
            steps=options.steps,
            warm_up=options.warm_up,
            windows=options.windows,
            window_steps=options.window_steps,
            device=options.device,
            caches=options.caches,
            timeout_s=options.timeout_s,
            logs=options.logs and options.logs.absolute(),
            profile=not options.no_coverage,
            full_speed=not options.each_step,  # these are all steps, in their order
            compiled=options.compiled and options.compiled.absolute(),
        ),
        out=options.out.absolute(),
        together=options.together,
        lanes=lanes(options.gpus),
        at_once=options.at_once,
        budget_s=options.budget_s,
        once=select_variants(options.once),
        each_step=options.each_step,
    )


def _listing() -> str:
    width = max(map(len, [*WORKLOADS, *VARIANTS]))
    workloads = [f"  {w.name:{width}}  {w.mode}, batch {w.batch}: {w.summary}" for w in WORKLOADS.values()]
    variants = [f"  {variant.name:{width}}  {variant.summary}" for variant in VARIANTS.values()]
    return "\n".join(["workloads", *workloads, "variants", *variants])


def _lookup(options: argparse.Namespace) -> int:
    # Imported here: the other commands must work where the product does not.
    from benchmarks.lookup import measure_lookup

    print("\n".join(measure_lookup(options.graphs, options.requests, options.out.absolute())))
    return 0


def _regions(options: argparse.Namespace) -> int:
    from benchmarks.region_table import read_regions
    from benchmarks.regions import measure_regions

    workloads = select_workloads(options.workloads)
    caches = options.caches and options.caches.absolute()
    lines = measure_regions(
        workloads,
        options.ways,
        options.repetitions,
        options.out.absolute(),
        caches,
        together=options.together,
        addresses=options.addresses,
    )
    print("\n".join(lines))
    return int(any("error" in each for each in read_regions(options.out) or ()))


def _compare(options: argparse.Namespace) -> int:
    records = [record for file in options.file for record in read_records(file)]
    baselines = [variant.name for variant in select_variants(options.baselines)]
    verdicts: list[Verdict] = []
    for variant in [options.variant] if options.variant else variants_to_compare(records):
        if not (comparisons := compare(records, variant, baselines)):
            break
        print(render_comparisons(comparisons, variant, baselines))
        kinds = list(Kind) if options.back_to_back else [Kind.WAITED_FOR]
        verdicts += [each.times[kind].verdict for each in comparisons for kind in kinds]
    if not verdicts:
        raise BenchmarkError(
            f"no record of {options.variant or 'PyGraph'} in these files: name another with --variant"
        )
    return int(any(verdict in BAD for verdict in verdicts))


def _report(_options: argparse.Namespace) -> int:
    print("\n".join(write_report()) or "nothing has changed")
    return 0


def _overhead(options: argparse.Namespace) -> int:
    print(render_overheads([record for file in options.file for record in read_records(file)]))
    return 0


def _table(options: argparse.Namespace) -> int:
    from benchmarks import region_table

    of_regions = {file: found for file in options.file if (found := region_table.read_regions(file))}
    others = [file for file in options.file if file not in of_regions]
    if others:
        print(render([record for file in others for record in read_records(file)]))
    for file, records in of_regions.items():
        print(f"{file}:\n{region_table.render(records)}")
    return 0
