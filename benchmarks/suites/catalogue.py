"""The suites' models as workloads, without importing torch."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from benchmarks.errors import BenchmarkError, UnknownNameError
from benchmarks.suites import tables
from benchmarks.workloads import Mode, Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

FOLDER_VARIABLE = "BENCHMARK_TORCHBENCH"
"""The variable that names a checkout of TorchBench."""
TORCHBENCH = "torchbench"
# Names of functions, since their modules import torch.
_SOURCES = {
    "huggingface": "benchmarks.suites.huggingface:build",
    "timm": "benchmarks.suites.timm_models:build",
    TORCHBENCH: "benchmarks.suites.torchbench:build",
}
SUITES = tuple(_SOURCES)
PAPER = "paper"
"""The subset of the workloads in a published table."""
NONE: Mapping[str, str] = MappingProxyType({})
_MODELS = Path("torchbenchmark", "models")
_IN_ANOTHER_SUITE = ("hf_", "timm_")
_BATCHES = {Mode.INFERENCE: "DEFAULT_EVAL_BSIZE", Mode.TRAINING: "DEFAULT_TRAIN_BSIZE"}


@dataclass(frozen=True, slots=True)
class Selection:
    """Workloads to run, and why other models of the suite are left out, by name."""

    workloads: tuple[Workload, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)


def select(
    suite: str,
    mode: Mode,
    names: Sequence[str],
    torchbench: Path | None,
    unbuildable: Mapping[str, str] = NONE,
) -> Selection:
    """Return the models of these names, all for none, less those that are `unbuildable`, each with its reason.

    Raises BenchmarkError without a checkout that `torchbench` needs, and UnknownNameError.
    """
    batches, left_out = _models(suite, mode, torchbench)
    left_out |= unbuildable
    batches = {name: batch for name, batch in batches.items() if name not in unbuildable}
    if unknown := [name for name in names if name not in batches and name not in left_out]:
        raise UnknownNameError("model", unknown, sorted(batches))
    chosen = [name for name in names if name in batches] if names else sorted(batches, key=_place)
    return Selection(
        tuple(_workload(suite, mode, name, batches[name]) for name in chosen),
        {name: reason for name, reason in left_out.items() if not names or name in names},
    )


def select_one(name: str) -> Workload:
    """Return the workload that `SUITE:MODEL-MODE` names; the checkout of TorchBench is that of `FOLDER_VARIABLE`.

    Raises BenchmarkError if the dashboard leaves the model out, and as `select` does.
    """
    suite, _, rest = name.partition(":")
    model, _, mode = rest.rpartition("-")
    if suite not in SUITES:
        raise UnknownNameError("suite", [suite], list(SUITES))
    if mode not in tuple(Mode):
        raise BenchmarkError(f"{name}: write it as {suite}:MODEL-inference or {suite}:MODEL-training")
    folder = os.environ.get(FOLDER_VARIABLE)
    found = select(suite, Mode(mode), [model], Path(folder) if folder else None)
    if not found.workloads:
        raise BenchmarkError(f"{name}: {found.left_out[model]}")
    return found.workloads[0]


def _place(name: str) -> int:
    """Return a model's place in the order: of those of TorchBench that are not named there, behind all."""
    first = tables.TORCHBENCH_FIRST
    return first.index(name) if name in first else len(first)


def paper(
    suite: str, mode: Mode, torchbench: Path | None, unbuildable: Mapping[str, str] = NONE
) -> Selection:
    """Return the workloads of the published table in a suite, less those whose name or model is `unbuildable`.

    Raises BenchmarkError if there are none, and as `select` does.
    """
    batches, _ = _models(suite, mode, torchbench)
    wanted = [each for each in tables.PAPER if (each.suite, each.mode) == (suite, mode)]
    if not wanted:
        raise BenchmarkError(f"the published table has no {mode} of {suite}")
    workloads = [
        _workload(suite, mode, each.model, each.batch, own=batches.get(each.model) == each.batch)
        for each in wanted
    ]
    reasons = {each: unbuildable.get(each.name) or unbuildable.get(each.model) for each in workloads}
    return Selection(
        tuple(each for each, reason in reasons.items() if not reason),
        {each.name: reason for each, reason in reasons.items() if reason},
    )


def _workload(suite: str, mode: Mode, name: str, batch: int, *, own: bool = True) -> Workload:
    marked = f"{name}-{mode}" if own else f"{name}-{mode}-b{batch}"
    return Workload(marked, mode, batch, _SOURCES[suite], model=name)


def _models(suite: str, mode: Mode, torchbench: Path | None) -> tuple[dict[str, int], dict[str, str]]:
    """Return a suite's models with their batches, and those that are left out with the reason."""
    training = mode is Mode.TRAINING
    if suite == TORCHBENCH:
        batches, left_out = _torchbench(torchbench, mode)
        not_trained = tables.TORCHBENCH_ONLY_INFERENCE if training else frozenset[str]()
    else:
        batches = dict(tables.HUGGINGFACE if suite == "huggingface" else tables.TIMM)
        left_out = {}
        not_trained = tables.HUGGINGFACE_ONLY_INFERENCE if training else frozenset[str]()
    for name in not_trained & batches.keys():
        del batches[name]
        left_out[name] = "the dashboard does not train it"
    return batches, left_out


def _torchbench(folder: Path | None, mode: Mode) -> tuple[dict[str, int], dict[str, str]]:
    if folder is None or not (folder / _MODELS).is_dir():
        raise BenchmarkError(
            f"torchbench needs a checkout of https://github.com/pytorch/benchmark: name its folder with --torchbench DIR, or in {FOLDER_VARIABLE}"
        )
    batches: dict[str, int] = {}
    left_out: dict[str, str] = {}
    for file in sorted((folder / _MODELS).glob("*/__init__.py")):
        name = file.parent.name
        if reason := tables.TORCHBENCH_LEFT_OUT.get(name):
            left_out[name] = f"the dashboard leaves it out: {reason}"
        elif name.startswith(_IN_ANOTHER_SUITE):
            left_out[name] = "the dashboard leaves it out: another suite has its like"
        else:
            batches[name] = tables.TORCHBENCH_BATCHES[mode].get(name) or _default_batch(file, mode)
    return batches, left_out


def _default_batch(file: Path, mode: Mode) -> int:
    """Return the batch that a model's file names; 0 if its base class does, or nobody."""
    # Read and not imported: a model imports torch, and libraries that may be missing here.
    for node in ast.walk(ast.parse(file.read_text(errors="replace"))):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int(batch))):
                if name == _BATCHES[mode]:
                    return batch
    return 0
