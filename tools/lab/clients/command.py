"""`python -m benchmarks clients`: its options, and the run that they describe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.arguments import names, positive
from benchmarks.environment import installed
from benchmarks.errors import BenchmarkError
from benchmarks.variants import Cache, Compile, select_variants
from tools.lab.clients import table
from tools.lab.clients.catalogue import GROUPS, select_clients
from tools.lab.clients.process import Settings
from tools.lab.clients.records import failed, read_clients
from tools.lab.clients.run import ClientsRun, Plan
from tools.lab.gpu_slots import gpu_slots

if TYPE_CHECKING:
    import argparse

    from benchmarks.variants import Variant
    from tools.lab.gpu_slots import GpuSlot

VARIANTS = "eager,default,reduce-overhead,pygraph-default,pygraph-cold"
_DISTRIBUTIONS = ("torch", *("diffusers", "transformers", "accelerate", "lightning", "timm", "peft"))
_MORE_DISTRIBUTIONS = ("sentence-transformers", "torch-geometric", "torchvision")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `clients`."""
    command.set_defaults(command=run_clients)
    add = command.add_argument
    add("--only", type=names, default=[], metavar="A,B", help="clients by name (default: all)")
    add(
        "--group",
        choices=list(GROUPS),
        default="one-gpu",
        help="clients for one GPU, for two, or all (one-gpu)",
    )
    add("--variants", type=names, default=names(VARIANTS), metavar="P,Q", help=f"default: {VARIANTS}")
    add("--out", type=Path, required=True, metavar="FILE", help="goes on with what this file lacks")
    add("--gpus", type=positive, default=1, help="GPUs, each with its share of the cores (default 1)")
    add("--end-s", type=positive, default=540, help="end by itself within these seconds (default 540)")
    add("--repetitions", type=positive, default=1, help="processes for each (default 1)")
    add("--steps", type=positive, default=160, help="steps in a process (default 160)")
    add("--tiny", action="store_true", help="sizes for a CPU")
    add("--compile-s", type=positive, default=180, help="limit of the first steps (default 180)")
    add("--timed-s", type=positive, default=90, help="limit of the steps that follow (default 90)")
    add("--logs", type=Path, metavar="DIR", help="keep what the processes print")


def run_clients(options: argparse.Namespace) -> int:
    """Measure clients and print the tables; return 1 if one failed only with PyGraph."""
    run = ClientsRun(plan_of(options))
    records = run.execute()
    print(table.render(records))
    if left := run.unmeasured:
        print(
            f"{len(left)} clients are not measured in all variants yet: run the same command again",
            file=sys.stderr,
        )
    return int(failed(records))


def print_tables(options: argparse.Namespace) -> int:
    """Print result files; raises BenchmarkError if one is none of `clients`."""
    for file in options.file:
        if (records := read_clients(file)) is None:
            raise BenchmarkError(
                f"{file} is no result of `clients`: `python -m benchmarks table` prints others"
            )
        print(f"{file}:\n{table.render(records)}")
    return 0


def plan_of(options: argparse.Namespace) -> Plan:
    """Return the run that options ask for; raises BenchmarkError."""
    clients = select_clients(options.group, options.only)
    return Plan(
        clients=clients,
        variants=_variants(options.variants),
        repetitions=options.repetitions,
        settings=Settings(
            steps=options.steps,
            tiny=options.tiny,
            compile_s=options.compile_s,
            timed_s=options.timed_s,
            logs=options.logs and options.logs.absolute(),
        ),
        slots=_slots(options.gpus, max(each.gpus for each in clients)),
        end_s=options.end_s,
        out=options.out.absolute(),
        libraries=installed((*_DISTRIBUTIONS, *_MORE_DISTRIBUTIONS)),
    )


def _slots(gpus: int, of_a_client: int) -> tuple[GpuSlot, ...]:
    """Return a slot for each GPU; raises BenchmarkError if there are fewer than a client takes."""
    if gpus < of_a_client:
        raise BenchmarkError(f"some clients take {of_a_client} GPUs each: name at least so many with --gpus")
    return gpu_slots(gpus)


def _variants(asked: list[str]) -> tuple[Variant, ...]:
    variants = select_variants(asked)
    # Each process has a daemon's folder of its own, so that none fills the cache of another. Programs take a
    # mode of torch.compile, and a graph recorded by hand is none.
    if bad := [
        each.name for each in variants if each.cache is Cache.WARM or each.compile is Compile.CUDA_GRAPH
    ]:
        raise BenchmarkError(f"clients are not run as {', '.join(bad)}")
    return variants
