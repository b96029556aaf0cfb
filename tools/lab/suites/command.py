"""`python -m benchmarks suite`: its options, and the run that they describe."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.arguments import names, positive
from benchmarks.cli import settings_of
from benchmarks.environment import gpu_name, installed
from benchmarks.errors import BenchmarkError
from benchmarks.records import read_result
from benchmarks.run import Plan
from benchmarks.suites import catalogue
from benchmarks.suites.catalogue import PAPER, SUITES, Selection
from benchmarks.trial import CachePolicy
from benchmarks.variants import Compile, variants_to_run
from benchmarks.workloads import Mode
from tools.lab.gpu_slots import gpu_slots
from tools.lab.run import Sharing
from tools.lab.suites import summary
from tools.lab.suites.run import Piece, SuiteRun

if TYPE_CHECKING:
    import argparse

VARIANTS = "eager,default,reduce-overhead,pygraph-default,pygraph-default-warm,pygraph-cold,pygraph-warm,default-again,cuda-graph"
_AT_ONCE = 2
_END_S = 540
_LIMIT_S = 240
_LIBRARIES = ("torch", "torchvision", "transformers", "timm")
_PRODUCT = re.compile(r"\b[A-Z]+\d+\w*")


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `suite`."""
    command.set_defaults(command=run_suite)
    add = command.add_argument
    add("suite", choices=SUITES)
    add("--training", action="store_true", help="training rather than inference")
    add("--models", type=names, default=[], metavar="A,B", help="(default: all)")
    add("--subset", choices=(PAPER,), help="the workloads of a published table, with its batches")
    add("--torchbench", type=Path, metavar="DIR", help="a checkout of TorchBench")
    add(
        "--left-out",
        type=Path,
        metavar="FILE",
        help="models not to try, as a JSON object with a reason for each",
    )
    add("--variants", type=names, metavar="P,Q", help=f"default: {VARIANTS}")
    add("--out", type=Path, required=True, metavar="DIR", help="a file of it goes on where it stopped")
    add("--gpus", type=positive, default=1, help="GPUs, each with its share of the cores (default 1)")
    add(
        "--end-s",
        type=positive,
        default=_END_S,
        help=f"end by itself within these seconds (default {_END_S})",
    )
    add("--begin-s", type=positive, metavar="S", help="begin no model later than after these seconds")
    add(
        "--limit-s",
        type=positive,
        default=_LIMIT_S,
        help=f"of one process: to compile, to be timed, and to be compared, each (default {_LIMIT_S})",
    )
    add(
        "--at-once",
        type=positive,
        metavar="N",
        help=f"models that compile side by side on a GPU (default {_AT_ONCE})",
    )
    add("--steps", type=positive, default=30, help="timed steps in a process (default 30)")
    add("--warm-up", type=positive, default=80, help="steps before them (default 80)")
    add("--windows", type=positive, default=3, help="windows of back-to-back steps (default 3)")
    add("--window-steps", type=positive, default=10, help="steps in a window (default 10)")
    add("--device", choices=("cuda", "cpu"), help="default: cuda if there is a device")
    add("--timeout-s", type=positive, help="limit of one process, with its waits (default: as --end-s)")
    add("--logs", type=Path, metavar="DIR", help="keep what the processes print")
    add("--decisions", type=Path, metavar="FILE", help="add what PyGraph's daemons decide to this export")


def run_suite(options: argparse.Namespace) -> int:
    """Measure a piece of a suite and print its summary; return 0, whatever the models do."""
    run = suite_run(options)
    run.execute()
    print(summary.render(read_result(run.plan.out)))
    if left := run.unmeasured:
        print(
            f"{len(left)} models are not measured in all variants yet: run the same command again",
            file=sys.stderr,
        )
    return 0


def suite_run(options: argparse.Namespace) -> SuiteRun:
    """Return the run that options ask for; raises BenchmarkError."""
    mode = Mode.TRAINING if options.training else Mode.INFERENCE
    selection, torchbench = _selection(options, mode)
    piece = Piece(
        options.suite,
        mode,
        options.end_s,
        selection.left_out,
        installed(_LIBRARIES),
        torchbench,
        options.begin_s,
        options.limit_s,
    )
    decisions = options.decisions and options.decisions.absolute()
    sharing = Sharing(gpu_slots(options.gpus), options.at_once or _AT_ONCE, decisions=decisions)
    return SuiteRun(_plan(options, mode, selection), sharing=sharing, piece=piece)


def _selection(options: argparse.Namespace, mode: Mode) -> tuple[Selection, Path | None]:
    torchbench = options.torchbench and options.torchbench.absolute()
    unbuildable = _unbuildable(options.left_out, mode)
    if options.subset:
        if options.models:
            raise BenchmarkError("--subset has models of its own: leave out --models")
        return catalogue.paper(options.suite, mode, torchbench, unbuildable), torchbench
    return catalogue.select(options.suite, mode, options.models, torchbench, unbuildable), torchbench


def _unbuildable(file: Path | None, mode: Mode) -> dict[str, str]:
    """Return the reasons of a file by model; raises BenchmarkError if it has none. A name `MODEL-MODE` holds for one mode."""
    if file is None:
        return {}
    try:
        told = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"{file} has no JSON: {error}") from error
    if not isinstance(told, dict):
        raise BenchmarkError(f"{file} has no object with a reason for each model")
    # One file serves both modes: a model that cannot be trained may well run in inference.
    others = tuple(f"-{each}" for each in Mode if each is not mode)
    return {
        name.removesuffix(f"-{mode}"): str(why) for name, why in told.items() if not name.endswith(others)
    }


def _plan(options: argparse.Namespace, mode: Mode, selection: Selection) -> Plan:
    asked = options.variants or names(VARIANTS)
    variants = variants_to_run(asked)
    # `RecordedStep` refuses to train, so that each model would have a record of a failure.
    if mode is Mode.TRAINING:
        variants = tuple(each for each in variants if each.compile is not Compile.CUDA_GRAPH)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    # A file for each GPU model: a later piece goes on in it, and its variants are compared with each other.
    gpu = "cpu" if options.device == "cpu" else _short(gpu_name())
    return Plan(
        workloads=selection.workloads,
        variants=variants,
        repetitions=1,
        # A process waits for all others of its GPU; --limit-s bounds what it does itself.
        settings=settings_of(options, CachePolicy.SHARED, options.timeout_s or options.end_s),
        out=out / f"{options.suite}-{mode}-{gpu}.json",
    )


def _short(gpu: str | None) -> str:
    """Return a GPU's name as in names of files."""
    if gpu is None:
        return "cpu"
    product = _PRODUCT.search(gpu)
    return (product.group() if product else re.sub(r"\W+", "-", gpu)).lower()
