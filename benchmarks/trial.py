"""One trial: a workload run as one variant in a fresh process, with the environment that the variant asks for."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from benchmarks.daemon import Daemon, without_product
from benchmarks.errors import BenchmarkError
from benchmarks.processes import run_fresh
from benchmarks.protocol import Answer, Task
from benchmarks.variants import Cache, Compile, Variant
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FILLED = "filled"
"""Marks the folder of a daemon with which a process has run to its end."""
NO_SUMMARY = "PyGraph wrote no summary: is it installed where this Python finds its entry points?"
NOTHING_MORE: Mapping[str, str] = MappingProxyType({})
# The discard port of this host, at which nobody listens.
_NOWHERE = "http://127.0.0.1:9"
OFFLINE: Mapping[str, str] = MappingProxyType(
    {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        # Any other download fails at once, rather than after a time.
        **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), _NOWHERE),
    }
)
"""Variables of a process that is to download nothing: models of suites come from libraries that would."""


class CachePolicy(enum.StrEnum):
    """The processes that share compiler caches; processes of different workloads never do."""

    FRESH = "fresh"
    """None: every process compiles everything."""
    SHARED = "shared"
    """All processes that compile in the same mode: the first one compiles."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of all trials of a run; see `benchmarks.protocol.Task` for the counts."""

    steps: int
    warm_up: int
    windows: int
    window_steps: int
    device: str | None
    caches: CachePolicy
    timeout_s: float
    logs: Path | None
    profile: bool = True


@dataclass(frozen=True, slots=True)
class Trial:
    """A process to come; repetitions count from 0."""

    repetition: int
    workload: Workload
    variant: Variant

    @property
    def name(self) -> str:
        """A name that no other trial of the repetition has."""
        return f"{self.workload.name}.{self.variant.name}"


@dataclass(frozen=True, slots=True)
class TrialResult:
    """The answer of a trial, or its error. `compiled_cold`: the compiler's caches were empty before it."""

    repetition: int
    answer: Answer | None
    summary: dict[str, Any] | None
    error: str | None
    compiled_cold: bool
    seconds: float


def trials_of(repetition: int, workloads: Sequence[Workload], variants: Sequence[Variant]) -> Iterator[Trial]:
    """Yield one repetition's trials, workload by workload.

    Every other repetition takes the variants in reverse, so that a drift of the machine does not fall on one of them.
    """
    ordered = variants[::-1] if repetition % 2 else variants
    for workload in workloads:
        for variant in ordered:
            yield Trial(repetition, workload, variant)


class TrialRunner:
    """Runs trials; all of their files lie in `folder`, whose path should be short, as it is part of sockets' names."""

    child: tuple[str, ...] = ("benchmarks.child",)
    """The module that a process runs, and its first arguments."""
    takes_cut_short = False
    """Whether the answer of a process counts that was killed when all had been timed, and not compared yet."""

    def __init__(self, folder: Path, settings: Settings, compiled: Path | None = None) -> None:
        self.settings = settings
        self.stop = threading.Event()
        """Ends the processes under way when it is set, from another thread."""
        self._folder = folder
        self._compiled = compiled or folder

    def run(self, trial: Trial, environ: Mapping[str, str] = NOTHING_MORE) -> TrialResult:
        """Run a trial, with these variables too; whatever goes wrong is in the result's `error`."""
        started = time.monotonic()
        # Asked before it runs, since the process makes the folder.
        cold = self.is_cold(trial)
        answer, summary, error = None, None, None
        try:
            answer, summary = self._measure(trial, environ)
        except BenchmarkError as problem:
            error = str(problem)
        return TrialResult(trial.repetition, answer, summary, error, cold, time.monotonic() - started)

    def is_cold(self, trial: Trial) -> bool:
        """Whether the compiler's caches are empty for a trial; in eager mode they do not matter."""
        return trial.variant.compile is Compile.EAGER or not self.caches(trial).exists()

    def caches(self, trial: Trial) -> Path:
        """Return the folder of the compiler caches of a trial."""
        owner = {
            CachePolicy.FRESH: f"{trial.variant.name}.{trial.repetition + 1}",
            CachePolicy.SHARED: f"mode.{trial.variant.compile.mode}",
        }[self.settings.caches]
        return self._compiled / f"caches.{trial.workload.name}.{owner}"

    def _measure(self, trial: Trial, more: Mapping[str, str]) -> tuple[Answer, dict[str, Any] | None]:
        caches = self.caches(trial)
        if not trial.variant.is_ours:
            return self._run_child(trial, {**plain_environment(os.environ, caches), **more}), None
        home, summary = self.home(trial), self._file(trial, "summary.json")
        product = product_environment(os.environ, caches, home, summary)
        with Daemon(home):
            answer = self._run_child(trial, {**product, **more})
            # Not reached if the process fails: a cache that it has half filled is not warm.
            (home / FILLED).touch()
        if answer.cut_short and not summary.exists():  # the process was ended before it wrote one
            return answer, None
        if not (found := read_summary(summary)):
            raise BenchmarkError(NO_SUMMARY)
        return answer, found

    def _run_child(self, trial: Trial, environ: Mapping[str, str]) -> Answer:
        answer_file = self._file(trial, "answer.json")
        arguments = ["-m", *self.child, self._task(trial).to_json(), str(answer_file)]
        offline = OFFLINE if trial.workload.model else NOTHING_MORE
        outcome = run_fresh(arguments, {**environ, **offline}, self.settings.timeout_s, stop=self.stop)
        if self.settings.logs:
            self.settings.logs.mkdir(parents=True, exist_ok=True)
            (self.settings.logs / self._file(trial, "log").name).write_text(outcome.output)
        if outcome.error and not (self.takes_cut_short and outcome.killed and answer_file.exists()):
            raise BenchmarkError(outcome.error)
        return Answer.from_json(answer_file.read_text())

    def _task(self, trial: Trial) -> Task:
        settings = self.settings
        return Task(
            workload=trial.workload,
            compile=trial.variant.compile,
            device=settings.device,
            seed=trial.repetition + 1,
            warm_up=settings.warm_up,
            steps=settings.steps,
            windows=settings.windows,
            window_steps=settings.window_steps,
            # Correctness and coverage are the same in every repetition.
            check=trial.repetition == 0,
            profile=settings.profile and trial.repetition == 0,
        )

    def _file(self, trial: Trial, kind: str) -> Path:
        return self._folder / f"{trial.name}.{trial.repetition + 1}.{kind}"

    def home(self, trial: Trial) -> Path:
        """Return the daemon's folder: a new one, or one that the variant with an empty cache has filled.

        Processes of two repetitions may run side by side. So each takes the folder of its own repetition, if that was filled.
        """
        homes = f"home.{trial.workload.name}"
        if trial.variant.cache is not Cache.WARM:
            return self._folder / f"{homes}.{trial.variant.name}.{trial.repetition + 1}"
        cold = f"{homes}.{trial.variant.filled_by}"
        own = self._folder / f"{cold}.{trial.repetition + 1}"
        if (own / FILLED).exists():
            return own
        filled = sorted(self._folder.glob(f"{cold}.*/{FILLED}"))
        if not filled:
            raise BenchmarkError(f"no process of {trial.variant.filled_by} has filled the cache")
        return filled[0].parent


def plain_environment(environ: Mapping[str, str], caches: Path) -> dict[str, str]:
    """Return the variables of a process without PyGraph, whose entry point is not loaded either."""
    return {
        **without_product(environ),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
    }


def product_environment(
    environ: Mapping[str, str], caches: Path, home: Path, summary_file: Path
) -> dict[str, str]:
    """Return the variables of a process in which PyGraph decides how graphs run."""
    return {
        **plain_environment(environ, caches),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1",
        "PYGRAPH": "1",
        "PYGRAPH_SUMMARY": str(summary_file),
        "PYGRAPHD_HOME": str(home),
        # A daemon that the program starts would outlive the benchmark.
        "PYGRAPHD_AUTOSTART": "0",
        # Decisions that the package ships would fill an empty cache.
        "PYGRAPHD_SHIPPED": "0",
    }


def read_summary(file: Path) -> dict[str, Any]:
    """Return PyGraph's summary of a process; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads(file.read_text())
        if isinstance(summary, dict):
            return summary
    return {}
