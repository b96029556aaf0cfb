"""`python -m benchmarks quick`: ten workloads in about two minutes, held against the stored results of the same GPU model.

A step that is waited for is compared. `default`, in which PyGraph takes no part, says how much slower the machine is than the one of the
stored results; so much, and the noise, is allowed for.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.arguments import names
from benchmarks.compare import spread
from benchmarks.environment import gpu_name
from benchmarks.errors import BenchmarkError
from benchmarks.processes import ROOT
from benchmarks.records import read_result, records_of
from benchmarks.run import Plan
from benchmarks.table import NOTHING, aligned
from benchmarks.trial import CachePolicy, Settings
from benchmarks.variants import select_variants
from benchmarks.workloads import select_workloads
from tools.lab.run import SharedRun, Sharing

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from benchmarks.records import Record

WORKLOADS = (
    "three-ops,mlp-training,dlrm-inference,dalle-inference,clip-inference,speech-transformer-inference,"
    "resnet50-inference,bert-inference,resnet50-training,bert-training"
)
_PLAIN, _OURS = "default", ("pygraph-default", "pygraph-cold")
_LEAST_NOISE = 0.05
_FOLDER = ROOT / "build" / "quick"
_STORED = ROOT / "benchmarks" / "results"

Times = dict[tuple[str, str], list[float]]
"""The median step of each process in ms, by workload and variant."""


@dataclass(frozen=True, slots=True)
class Change:
    """One workload as one of PyGraph's variants, now and as stored; `now_ms` None: it has failed, or its results are wrong."""

    workload: str
    variant: str
    now_ms: float | None
    stored_ms: float
    noise: float
    """How much longer it may take, as a share: with what plain `default` takes longer."""

    @property
    def ratio(self) -> float | None:
        """The time now over the stored one."""
        return None if self.now_ms is None else self.now_ms / self.stored_ms

    @property
    def is_bad(self) -> bool:
        """Whether it has failed, or is slower by more than the noise."""
        return self.ratio is None or self.ratio > 1 + self.noise


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the options of `quick`."""
    command.set_defaults(command=run_quick)
    add = command.add_argument
    add("--workloads", type=names, default=names(WORKLOADS), metavar="A,B", help="(default: ten)")
    add("--stored", type=Path, metavar="FILE", help="default: that of this GPU model in benchmarks/results")
    add(
        "--out",
        type=Path,
        default=_FOLDER,
        metavar="DIR",
        help="for results and compiled code (default build/quick)",
    )


def run_quick(options: argparse.Namespace) -> int:
    """Measure and print the changes; return 1 if one is bad, and raise BenchmarkError if there is nothing to compare with."""
    stored = stored_times(options.stored, gpu_name())
    ours = next((each for each in _OURS if any(variant == each for _, variant in stored)), None)
    # A stored result may lack some of the ten, which are then not run.
    known = [name for name in options.workloads if (name, ours) in stored]
    if ours is None or not known:
        raise BenchmarkError(
            "the stored results have none of these workloads as a variant of PyGraph with an empty cache"
        )
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    # Steps as `run` takes them for the stored results. Windows and the profile are not compared, so that
    # there are few of the one and none of the other.
    settings = Settings(60, 80, 3, 20, None, CachePolicy.SHARED, 300, None, profile=False)
    plan = Plan(select_workloads(known), select_variants([_PLAIN, ours]), 1, settings, out / "quick.json")
    run = SharedRun(plan, sharing=Sharing(compiled=out / "compiled"))
    found = list(changes(run.execute(), stored, ours))
    print(render(found))
    return int(any(each.is_bad for each in found))


def stored_times(file: Path | None, gpu: str | None) -> Times:
    """Return the times of a file, or of the stored one for a GPU; raises BenchmarkError without one."""
    if file is None:
        files = sorted(_STORED.glob("steps-*.json"))
        stored = {str(read_result(each)["environment"]["gpu"]): each for each in files}
        if gpu not in stored:
            raise BenchmarkError(
                f"there are no stored results for {gpu or 'a machine without a GPU'}, only for {', '.join(stored)}"
            )
        file = stored[gpu]
    return times_of(records_of(read_result(file)))


def times_of(records: Iterable[Record]) -> Times:
    """Return the times of records; of a workload that was wrong, none."""
    found: Times = {}
    for each in records:
        if each.correct is not False and each.repetition_medians_ms:
            found.setdefault((each.workload, each.variant), []).extend(each.repetition_medians_ms)
    return found


def changes(
    now: Sequence[Record], stored: Mapping[tuple[str, str], list[float]], ours: str
) -> Iterator[Change]:
    """Yield the change of each workload that was run."""
    present = times_of(now)
    noises = [
        noise for key, times in stored.items() if key[1] == ours and (noise := spread(times)) is not None
    ]
    # For workloads of which one process is stored, whose noise is not known.
    usual = statistics.median(noises) if noises else _LEAST_NOISE
    for workload in dict.fromkeys(each.workload for each in now):
        before, after = stored[workload, ours], present.get((workload, ours))
        own = spread(before)
        noise = max(_LEAST_NOISE, usual if own is None else own)
        slower = _slower(present.get((workload, _PLAIN)), stored.get((workload, _PLAIN)))
        yield Change(
            workload,
            ours,
            statistics.median(after) if after else None,
            statistics.median(before),
            noise + slower,
        )


def _slower(now: Sequence[float] | None, before: Sequence[float] | None) -> float:
    # At least zero: on a machine that is faster than the stored one, the noise still stands.
    return max(0.0, statistics.median(now) / statistics.median(before) - 1) if now and before else 0.0


def render(found: Sequence[Change]) -> str:
    """Return a table, and a line with the geometric mean."""
    head = ("workload", "variant", "ms now", "ms stored", "now/stored", "noise", "")
    rows = [
        (
            each.workload,
            each.variant,
            NOTHING if each.now_ms is None else f"{each.now_ms:.3f}",
            f"{each.stored_ms:.3f}",
            NOTHING if each.ratio is None else f"{each.ratio:.3f}",
            f"{each.noise:.0%}",
            "FAILS" if each.ratio is None else "SLOWER" if each.is_bad else "",
        )
        for each in found
    ]
    ratios = [each.ratio for each in found if each.ratio is not None]
    mean = f"{statistics.geometric_mean(ratios):.3f}" if ratios else NOTHING
    return "\n".join(
        [
            *aligned([head, *rows], {0, 1, 6}),
            f"now over stored, geometric mean: {mean} over {len(ratios)} workloads",
        ]
    )
