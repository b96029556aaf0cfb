"""`python -m benchmarks run`: every workload with every variant, over some repetitions, into one result file.

The file is written anew after every process, so that whatever ends the run early costs nothing that was measured.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import TORCH_FIELDS, describe_host
from benchmarks.gate import Gate
from benchmarks.lanes import Lane, dealt, parts
from benchmarks.processes import as_ended
from benchmarks.records import Record, check_writable, record_of, write_result
from benchmarks.schedule import Turn, turns
from benchmarks.trial import Settings, Trial, Trials
from benchmarks.variants import Cache, Variant
from benchmarks.workloads import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run is asked to do; `budget_s` None: as long as it takes."""

    workloads: tuple[Workload, ...]
    variants: tuple[Variant, ...]
    repetitions: int
    settings: Settings
    out: Path
    budget_s: float | None
    once: tuple[Variant, ...] = ()
    together: bool = False
    """Whether the processes of a repetition compile side by side; they are measured one after the other in any case."""
    lanes: tuple[Lane, ...] = (Lane(0),)
    """Where the workloads are dealt to; more than one only with `together`."""
    at_once: int | None = None
    """Workloads of a lane whose processes compile side by side; None: all."""
    each_step: bool = False
    """Whether the file is to have the time of every timed step."""


@dataclass(slots=True)
class Run:
    """A run under way: its trials so far, and the file that holds what they amount to."""

    plan: Plan
    trials: dict[tuple[str, str], list[Trial]] = field(default_factory=dict)
    stopped: str | None = None
    host: dict[str, str | None] = field(default_factory=describe_host)
    _noting: threading.Lock = field(default_factory=threading.Lock)

    def execute(self) -> list[Record]:
        """Run everything that the budget allows; returns the records, which are in the file too."""
        check_writable(self.plan.out)  # now rather than after an hour
        with tempfile.TemporaryDirectory(prefix="pygraph-bench-", ignore_cleanup_errors=True) as folder:
            trials = Trials(Path(folder), self.plan.settings)
            if self.plan.together:
                self._take_lanes(trials, Path(folder))
            else:
                for repetition in self._affordable_repetitions(time.monotonic()):
                    for turn in turns(repetition, self.plan.workloads, self.plan.variants, self.plan.once):
                        self._take(turn, trials)
        self._save()
        return self.records()

    @property
    def failed(self) -> bool:
        """Whether any process failed."""
        return any(trial.error for trials in self.trials.values() for trial in trials)

    def _affordable_repetitions(self, started: float) -> Iterator[int]:
        longest = 0.0
        for repetition in range(self.plan.repetitions):
            begun = time.monotonic()
            if repetition and self._too_long(begun - started + longest):
                self._stop(repetition)
                return
            yield repetition
            longest = max(longest, time.monotonic() - begun)

    def _too_long(self, seconds: float) -> bool:
        return self.plan.budget_s is not None and seconds > self.plan.budget_s

    def _stop(self, done: int) -> None:
        self.stopped = (
            f"stopped after {done} of {self.plan.repetitions} repetitions: "
            f"another would not fit into --budget-s {self.plan.budget_s:g}"
        )
        _progress(self.stopped)

    def _take(self, turn: Turn, trials: Trials) -> None:
        """Run a turn, unless its workload has failed with this variant already: it would fail again and take as long."""
        if not self._has_failed(turn):
            self._note(turn, trials.run(turn))

    def _take_lanes(self, trials: Trials, folder: Path) -> None:
        started = time.monotonic()
        with ThreadPoolExecutor(len(self.plan.lanes)) as pool, contextlib.ExitStack() as stack:
            stack.callback(trials.stop)  # the pool would wait for all of them
            running = [
                pool.submit(self._take_lane, lane, trials, folder, started) for lane in self.plan.lanes
            ]
            for done in as_ended(running):
                done.result()
            stack.pop_all()

    def _take_lane(self, lane: Lane, trials: Trials, folder: Path, started: float) -> None:
        """Run a lane's workloads, each repetition in parts whose processes compile side by side."""
        workloads = dealt(self.plan.workloads, lane, len(self.plan.lanes))
        for repetition in self._affordable_repetitions(started):
            for number, part in enumerate(parts(workloads, self.plan.at_once)):
                each = list(turns(repetition, part, self.plan.variants, self.plan.once))
                self._take_together(each, trials, folder / f"gate.{lane.number}.{repetition}.{number}", lane)

    def _take_together(self, all_turns: list[Turn], trials: Trials, folder: Path, lane: Lane) -> None:
        """Run turns that compile side by side; those with a warm cache come last, as the cold ones fill it."""
        possible = [turn for turn in all_turns if not self._has_failed(turn)]
        for warm in (False, True):
            wave = [turn for turn in possible if (turn.variant.cache is Cache.WARM) is warm]
            if wave and not trials.is_stopped:
                expected = [(turn.name, trials.compiles_with(turn)) for turn in wave]
                cores = len(lane.cores) if lane.cores is not None else None
                gate = Gate(Path(f"{folder}.{warm}"), expected, dict(lane.environ), cores)
                with ThreadPoolExecutor(len(wave), initializer=lane.enter) as pool:
                    running = {pool.submit(trials.run, turn, gate): turn for turn in wave}
                    for done in as_ended(running):  # noted at once, as the run may be ended early
                        if not trials.is_stopped:
                            self._note(running[done], done.result())

    def _has_failed(self, turn: Turn) -> bool:
        return any(trial.error for trial in self.trials.get((turn.workload.name, turn.variant.name), []))

    def _note(self, turn: Turn, trial: Trial) -> None:
        with self._noting:
            self.trials.setdefault((turn.workload.name, turn.variant.name), []).append(trial)
            self._save()
            _progress(_line(turn, trial))

    def records(self) -> list[Record]:
        """Return the records so far, workload by workload in the order asked for."""
        return [
            record_of(
                workload,
                variant,
                self.trials[workload.name, variant.name],
                each_step=self.plan.each_step,
                together=self.plan.together,
            )
            for workload in self.plan.workloads
            for variant in self.plan.variants
            if (workload.name, variant.name) in self.trials
        ]

    def _save(self) -> None:
        write_result(self.plan.out, self._environment(), self._settings(), self.records())

    def _environment(self) -> dict[str, str | None]:
        answers = (trial.answer for trials in self.trials.values() for trial in trials)
        seen = next((answer.environment for answer in answers if answer), {})
        return {**{name: seen.get(name) for name in TORCH_FIELDS}, **self.host}

    def _settings(self) -> dict[str, Any]:
        settings = self.plan.settings
        return {
            "repetitions": self.plan.repetitions,
            "once": [variant.name for variant in self.plan.once],
            "warm_up": settings.warm_up,
            "steps": settings.steps,
            "windows": settings.windows,
            "window_steps": settings.window_steps,
            "compiler_caches": str(settings.caches),
            "compiled_together": self.plan.together,
            "gpus": len(self.plan.lanes),
            "at_once": self.plan.at_once,
            "stopped": self.stopped,
        }


def _line(turn: Turn, trial: Trial) -> str:
    record = record_of(turn.workload, turn.variant, [trial])
    figure = f"{record.step_ms.median:.3f} ms" if record.step_ms else f"failed: {trial.error}"
    wrong = f" WRONG: {record.note}" if record.correct is False else ""
    return f"repetition {turn.repetition + 1} {record.workload} {record.variant}: {figure} ({trial.seconds:.0f} s){wrong}"


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
