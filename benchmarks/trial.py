"""One turn of a run: a fresh process with the environment that its variant asks for, and what came of it."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.daemon import Daemon, without_product
from benchmarks.errors import BenchmarkError
from benchmarks.gate import AFTER_VARIABLE
from benchmarks.processes import run_fresh
from benchmarks.task import Answer, Task
from benchmarks.variants import Cache, Compile

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from benchmarks.gate import Gate
    from benchmarks.schedule import Turn

_FILLED = "filled"
"""Marks the folder of a daemon that a process has run with to its end."""
_COMPILED = "compiled."
"""Begins the name of a mark in a folder of caches: the variant after it has compiled all that it needs."""
_PRIMING_STEPS = 160
"""More than measuring takes, so that the cache of the warm variant is filled with final decisions."""


class CachePolicy(enum.StrEnum):
    """Which processes share what torch.compile leaves on disk; never those of different workloads."""

    FRESH = "fresh"
    """None: every process compiles everything."""
    VARIANT = "variant"
    """The repetitions of one variant: the first compiles."""
    SHARED = "shared"
    """All repetitions of all variants that compile in the same mode: the first process compiles."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is alike for all turns of a run; see `benchmarks.task.Task` for the counts."""

    steps: int
    warm_up: int
    windows: int
    window_steps: int
    device: str | None
    caches: CachePolicy
    timeout_s: float
    logs: Path | None
    profile: bool = True
    full_speed: bool = True
    """Whether what the host was too slow for is timed again."""
    compiled: Path | None = None
    """Where what is compiled stays for a run to come; None: it goes with this run."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of a turn: an answer, or an error. `compiled_cold`: the compiler's caches were empty before it."""

    repetition: int
    answer: Answer | None
    summary: dict[str, Any] | None
    error: str | None
    compiled_cold: bool
    seconds: float


class Trials:
    """Runs turns; everything they leave lies in `folder`, which should be short: sockets are in it."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._settings = settings
        self._compiled = settings.compiled or folder
        self._stop = threading.Event()

    def stop(self) -> None:
        """End the processes under way, from another thread, and begin no others."""
        self._stop.set()

    @property
    def is_stopped(self) -> bool:
        """Whether what comes back now was ended before its end."""
        return self._stop.is_set()

    def run(self, turn: Turn, gate: Gate | None = None) -> Trial:
        """Run one turn in a new process; whatever goes wrong there is in the trial's `error`."""
        if gate is None:
            return self._run(turn, {})
        with gate.place(turn.name) as place:
            return self._run(turn, place.environ)

    def _run(self, turn: Turn, more: Mapping[str, str]) -> Trial:
        started = time.monotonic()
        caches = self.caches(turn)
        cold = turn.variant.compile is Compile.EAGER or not (caches.exists() or AFTER_VARIABLE in more)
        try:
            answer, summary = self._measure(turn, caches, more)
            error = None
            self._note_compiled(turn)
        except BenchmarkError as problem:
            answer, summary, error = None, None, str(problem)
        return Trial(turn.repetition, answer, summary, error, cold, time.monotonic() - started)

    def _measure(
        self, turn: Turn, caches: Path, more: Mapping[str, str]
    ) -> tuple[Answer, dict[str, Any] | None]:
        task = self._task(turn)
        if turn.variant.cache is Cache.NONE:
            environ = {**plain_environment(os.environ, caches), **more}
            return self._run_child(turn, task, environ, "measure"), None
        home = self._home(turn)
        with Daemon(home):
            if turn.variant.cache is Cache.WARM:
                self._prime_once(turn, task, home)
            done = self._run_with_product(turn, task, home, caches, "measure", more)
            (home / _FILLED).touch()
            return done

    def _run_with_product(
        self, turn: Turn, task: Task, home: Path, caches: Path, purpose: str, more: Mapping[str, str]
    ) -> tuple[Answer, dict[str, Any]]:
        summary_file = self._file(turn, f"{purpose}-summary.json")
        product = product_environment(os.environ, caches, home, summary_file)
        environ = {**product, **dict(turn.variant.environ), **more}
        answer = self._run_child(turn, task, environ, purpose)
        return answer, _read_summary(summary_file)

    def _prime_once(self, turn: Turn, task: Task, home: Path) -> None:
        if (home / _FILLED).exists():
            return
        priming = replace(task, warm_up=_PRIMING_STEPS, steps=0, windows=0, check=False, profile=False)
        self._run_with_product(turn, priming, home, self._priming_caches(turn), "prime", {})

    def _run_child(self, turn: Turn, task: Task, environ: Mapping[str, str], purpose: str) -> Answer:
        answer_file = self._file(turn, f"{purpose}.json")
        arguments = ["-m", "benchmarks.child", task.to_json(), str(answer_file)]
        outcome = run_fresh(arguments, environ, self._settings.timeout_s, stop=self._stop)
        self._keep_log(answer_file.with_suffix(".log").name, outcome.output)
        if outcome.error:
            raise BenchmarkError(outcome.error)
        return Answer.from_json(answer_file.read_text())

    def _task(self, turn: Turn) -> Task:
        settings = self._settings
        return Task(
            workload=turn.workload.name,
            compile=turn.variant.compile,
            device=settings.device,
            seed=turn.repetition + 1,
            warm_up=settings.warm_up,
            steps=settings.steps,
            windows=settings.windows,
            window_steps=settings.window_steps,
            # Whether it is right, and what lies in graphs, is the same in every repetition.
            check=turn.repetition == 0,
            profile=settings.profile and turn.repetition == 0,
            full_speed=str(self._folder / "full-speed") if settings.full_speed else None,
        )

    def _keep_log(self, name: str, output: str) -> None:
        if self._settings.logs:
            self._settings.logs.mkdir(parents=True, exist_ok=True)
            (self._settings.logs / name).write_text(output)

    def _file(self, turn: Turn, kind: str) -> Path:
        return self._folder / f"{turn.workload.name}.{turn.variant.name}.{turn.repetition + 1}.{kind}"

    def _home(self, turn: Turn) -> Path:
        homes = f"home.{turn.workload.name}"
        if turn.variant.cache is not Cache.WARM:
            return self._folder / f"{homes}.{turn.variant.name}.{turn.repetition + 1}"
        # What a cold process has measured is what a warm one is to find: no other priming is needed.
        filled = sorted(self._folder.glob(f"{homes}.{turn.variant.after}.*/{_FILLED}"))
        return filled[0].parent if filled else self._folder / f"{homes}.{turn.variant.name}"

    def caches(self, turn: Turn) -> Path:
        """Return the folder for what torch.compile leaves on disk in this turn."""
        owner = {
            CachePolicy.FRESH: f"{turn.variant.name}.{turn.repetition + 1}",
            CachePolicy.VARIANT: turn.variant.name,
            # What sets more may compile other code, which the compiler's own keys tell apart, and `compiled_cold` would not.
            CachePolicy.SHARED: ".".join(("mode", turn.variant.compile, *dict(turn.variant.environ))),
        }[self._settings.caches]
        return self._compiled / f"caches.{turn.workload.name}.{owner}"

    def compiles_with(self, turn: Turn) -> Hashable:
        """Return what is alike for turns of which one compiles for the others; they need not wait where that is done."""
        return turn.name if self._compiled_mark(turn).exists() else self.caches(turn)

    def _compiled_mark(self, turn: Turn) -> Path:
        # Of the variant: with our rules, other code is compiled among the same caches.
        return self.caches(turn) / f"{_COMPILED}{turn.variant.name}"

    def _note_compiled(self, turn: Turn) -> None:
        mark = self._compiled_mark(turn)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()

    def _priming_caches(self, turn: Turn) -> Path:
        # Priming is not timed: it may use what others have compiled, but must leave nothing to those that are timed.
        used = sorted(self._compiled.glob(f"caches.{turn.workload.name}.{turn.variant.after}*"))
        if self._settings.caches is CachePolicy.SHARED:
            used = [path for path in [self.caches(turn)] if path.exists()]
        return used[0] if used else self._folder / f"caches.{turn.workload.name}.priming"


def plain_environment(environ: Mapping[str, str], caches: Path) -> dict[str, str]:
    """Return the variables of a process in which PyGraph takes no part: not even its entry point is loaded."""
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
        "PYGRAPHD_AUTOSTART": "0",
    }


def _read_summary(file: Path) -> dict[str, Any]:
    """Return what the product wrote at exit; without it there is no telling what was measured."""
    with contextlib.suppress(OSError, ValueError):
        summary = json.loads(file.read_text())
        if isinstance(summary, dict):
            return summary
    raise BenchmarkError(
        "PyGraph wrote no summary: is it installed where this Python finds its entry points?"
    )
