"""The steps of a campaign by name, and their commands, which can all be run by hand."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.compare import BASELINES
from benchmarks.errors import BenchmarkError, UnknownNameError
from benchmarks.region_table import GRAPH, REDUCE_OVERHEAD, WAYS
from benchmarks.variants import variants_to_run
from benchmarks.workloads import select_workloads
from tools.lab import pytest_plugin
from tools.lab.gpu_slots import VISIBLE, gpu_names

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SECONDS = "SECONDS"
"""Among a command's arguments: the whole seconds that it may take."""
DECISIONS = "decisions.jsonl"
"""The export, in the folder of a campaign, of what its `run` steps have decided."""
_USUAL_S = 580.0
"""For so long a campaign the limits of steps are meant; they grow with it."""
_WORKERS = 13
_AT_ONCE = 6


@dataclass(frozen=True, slots=True)
class Command:
    """A process, by Python's arguments and the variables that it has beside the campaign's."""

    arguments: tuple[str, ...]
    environ: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Commands that run side by side, and then a report on their results."""

    name: str
    limit_s: float
    commands: tuple[Command, ...]
    report: Command | None = None
    result: Path | None = None
    telling: str = ""
    """A regular expression: lines to be repeated in the summary, of the report or, if there is none, of the commands."""
    sums_up: bool = False
    """Whether the last of these lines is a better error than the last line of the commands."""


@dataclass(frozen=True, slots=True)
class Place:
    """The arguments of a step: its number and name, folders for results, scratch files and compiled code, and the number of GPUs."""

    number: int
    name: str
    out: Path
    scratch: Path
    compiled: Path
    gpus: int
    longer: float
    """How many times as long as usual it may take."""
    decisions: Path | None = None
    """The export to which `run` adds decisions."""

    @property
    def kind(self) -> str:
        """The word that its name begins with."""
        return self.name.partition(":")[0]

    @property
    def result(self) -> Path:
        """The file that it writes, if it writes one."""
        return self.out / f"{self.number}-{self.kind}.json"

    def step(
        self,
        limit_s: float,
        *commands: Command,
        report: Command | None = None,
        keeps: bool = True,
        telling: str = "",
        sums_up: bool = False,
    ) -> Step:
        """Return the step; `keeps`: it writes `result`."""
        result = self.result if keeps else None
        return Step(self.name, limit_s * self.longer, commands, report, result, telling, sums_up)


def steps_of(
    names: Sequence[str],
    out: Path,
    scratch: Path,
    gpus: int,
    end_s: float,
    compiled: Path | None = None,
    decisions: Path | None = None,
) -> list[Step]:
    """Return the steps of these names; raises BenchmarkError if one cannot be.

    `compiled`: where compiled code stays; `decisions`: the export to which `run` adds what was decided.
    """
    # Never shorter than usual: a step takes as long in a short campaign, whose end cuts it off in any case.
    longer = max(1.0, end_s / _USUAL_S)
    kept = compiled or scratch / "compiled"
    # All are made before the first one runs: a wrong name in the last must not show when the time is nearly
    # up.
    return [
        _step(Place(number, name, out, scratch, kept, gpus, longer, decisions))
        for number, name in enumerate(names, start=1)
    ]


def _step(place: Place) -> Step:
    if place.kind not in _KINDS:
        raise UnknownNameError("step", [place.name], list(USAGE.values()))
    make, parts = _KINDS[place.kind], place.name.split(":")[1:]
    # Bound by itself: a TypeError from within `make` would be reported as a wrong number of parts.
    try:
        inspect.signature(make).bind(place, *parts)
    except TypeError as error:
        raise BenchmarkError(f"{place.name} should be {USAGE[place.kind]}") from error
    return make(place, *parts)


def _benchmarks(*arguments: str) -> Command:
    return Command(("-m", "benchmarks", *arguments))


def _lab(*arguments: str) -> Command:
    return Command(("-m", "tools.lab", *arguments))


def _tests(place: Place) -> Step:
    # Otherwise each of the workers would start about as many compiler processes as there are cores.
    environ = {
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        pytest_plugin.FILE: str(place.result),
        pytest_plugin.GPUS: str(place.gpus),
    }
    plugins = ("-p", "no:benchmark", "-p", "tools.lab.pytest_plugin")
    workers = ("-n", str(_WORKERS * place.gpus), "--dist", "worksteal", "--durations", "20")
    return place.step(
        420,
        Command(("-m", "pytest", "-m", "gpu", *plugins, *workers), tuple(environ.items())),
        report=Command(("-m", "tools.lab.pytest_plugin", str(place.result))),
        sums_up=True,
    )


def _demo(place: Place) -> Step:
    names = gpu_names(place.gpus) if place.gpus > 1 else []
    commands = [
        Command(
            ("examples/demo.py", str(place.scratch / f"demo.{place.number}.{number}")),
            ((VISIBLE, names[number % len(names)]),) if names else (),
        )
        for number in range(2)
    ]
    return place.step(180, *commands, keeps=False, telling="  graphs: |  deployed: |The second run |demo: ")


def _memory(place: Place, workload: str, ways: str = f"{GRAPH},{REDUCE_OVERHEAD}") -> Step:
    (found,) = select_workloads([workload])
    options = ("--ways", _known_ways(ways), "--out", str(place.result))
    return place.step(240, _lab("memory", found.name, *options))


def _regions(place: Place, workloads: str, ways: str = "") -> Step:
    chosen = ("--ways", _known_ways(ways)) if ways else ()
    where = ("--caches", str(place.compiled / "regions"), "--out", str(place.result))
    what = ("--workloads", _known(workloads), "--repetitions", "1", *chosen)
    return place.step(420, _lab("regions", *what, *where), report=_benchmarks("table", str(place.result)))


def _addresses(place: Place, workload: str) -> Step:
    options = ("--workloads", _known(workload), "--out", str(place.result))
    telling = "ms a step: |beyond fixed addresses: |by its regions alone: "
    return place.step(300, _lab("addresses", *options), telling=telling)


def _run(place: Place, workloads: str, variants: str, repetitions: str) -> Step:
    chosen = [variant.name for variant in variants_to_run(variants.split(","))]
    if not repetitions.isdecimal() or not int(repetitions):
        raise BenchmarkError(f"{place.name}: {repetitions} is no number of repetitions")
    what = ("--workloads", _known(workloads), "--variants", ",".join(chosen), "--repetitions", repetitions)
    how = ("--gpus", str(place.gpus), "--at-once", str(_AT_ONCE))
    where = ("--compiled", str(place.compiled / "run"), "--out", str(place.result))
    kept = ("--decisions", str(place.decisions)) if place.decisions else ()
    # Dozens compile side by side, and wait for each other: none is to be killed before the step is.
    until = ("--budget-s", SECONDS, "--timeout-s", SECONDS)
    return place.step(
        _USUAL_S, _lab("run", *what, *how, *where, *kept, *until), report=_of_run(chosen, place.result)
    )


def _of_run(variants: Sequence[str], result: Path) -> Command:
    ours = [variant for variant in variants if variant.startswith("pygraph")]
    # `compare` ends with an error without a variant of PyGraph, and has nothing to say without a baseline.
    if ours and set(BASELINES) & set(variants):
        return _benchmarks("compare", str(result))
    return _benchmarks("table", str(result))


def _overhead(place: Place, workloads: str = "") -> Step:
    # One process at a time: compiling beside others takes longer.
    chosen = ("--workloads", _known(workloads)) if workloads else ()
    # Windows and profiles come after all that is asked here, and would only take time.
    how = ("--caches", "fresh", "--repetitions", "1", "--windows", "1", "--no-coverage", *chosen)
    variants = ("--variants", "default,pygraph-cold,pygraph-warm")
    return place.step(
        480,
        _benchmarks("run", *how, *variants, "--out", str(place.result)),
        report=_lab("overhead", str(place.result)),
    )


def _known(workloads: str) -> str:
    """Return names of workloads, all of which there are, as one argument."""
    return ",".join(each.name for each in select_workloads(workloads.split(",")))


def _known_ways(ways: str) -> str:
    if unknown := [way for way in ways.split(",") if way not in WAYS]:
        raise UnknownNameError("way", unknown, list(WAYS))
    return ways


_KINDS: dict[str, Callable[..., Step]] = {
    "tests": _tests,
    "demo": _demo,
    "memory": _memory,
    "regions": _regions,
    "addresses": _addresses,
    "run": _run,
    "overhead": _overhead,
}
USAGE = {
    "tests": "tests",
    "demo": "demo",
    "memory": "memory:WORKLOAD[:WAYS]",
    "regions": "regions:WORKLOADS[:WAYS]",
    "addresses": "addresses:WORKLOAD",
    "run": "run:WORKLOADS:VARIANTS:REPETITIONS",
    "overhead": "overhead[:WORKLOADS]",
}
