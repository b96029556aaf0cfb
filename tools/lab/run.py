"""`python -m tools.lab run`: as `python -m benchmarks run`, with processes that compile side by side, on several GPUs, within a time.

Most of a benchmark's time is compiling. Each GPU has its share of the cores and of the workloads, and its processes are timed one at a
time. What one run has compiled may stay for the next.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.run import Run
from benchmarks.trial import NOTHING_MORE, Settings, Trial, TrialResult, TrialRunner, trials_of
from benchmarks.variants import Cache, Compile
from tools.lab.barrier import Barrier
from tools.lab.cpu_affinity import FULL_SPEED_VARIABLE
from tools.lab.decisions import gather
from tools.lab.gpu_slots import GpuSlot, dealt, parts
from tools.lab.processes import as_ended

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

_COMPILED = "compiled."
"""Begins the name of a mark in a folder of caches: the variant after it has compiled all that it needs."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How a machine is shared. `budget_s`: begin no repetition that would end later; `at_once`: workloads that compile side by side."""

    slots: tuple[GpuSlot, ...] = (GpuSlot(0),)
    at_once: int | None = None
    budget_s: float | None = None
    compiled: Path | None = None
    """Where compiled code stays for the next run; None: it goes with this one."""
    decisions: Path | None = None
    """The export to which the decisions of all daemons are added in the end."""


class SharedRunner(TrialRunner):
    """Runs trials beside each other."""

    child = ("tools.lab.shared_machine", "run")

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        compiled: Path | None,
        *,
        full_speed: bool,
        environ: Mapping[str, str] = NOTHING_MORE,
    ) -> None:
        super().__init__(folder, settings, compiled)
        own = {FULL_SPEED_VARIABLE: str(folder / "full-speed")} if full_speed else {}
        self._environ = {**environ, **own}

    def run_beside(self, trial: Trial, barrier: Barrier) -> TrialResult:
        """Run a trial that compiles beside others and waits for them to be timed."""
        with barrier.place(trial.name) as place:
            result = self.run(trial, {**self._environ, **place.environ})
            if place.comes_later:
                result = replace(result, compiled_cold=trial.variant.compile is Compile.EAGER)
        if not result.error:
            mark = self._mark(trial)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.touch()
        return result

    def compiles_with(self, trial: Trial) -> Hashable:
        """Return a value that trials share of which one compiles for the others; they need not wait if that is done."""
        return trial.name if self._mark(trial).exists() else self.caches(trial)

    def _mark(self, trial: Trial) -> Path:
        # A mark of the variant: PyGraph's placement compiles other code among the same caches.
        return self.caches(trial) / f"{_COMPILED}{trial.variant.name}"


def barrier_of(
    wave: Sequence[Trial], runner: SharedRunner, folder: Path, slot: GpuSlot, *, held: bool = False
) -> Barrier:
    """Return the barrier of trials to run side by side; with `held` none is timed before it admits them."""
    expected = [(trial.name, runner.compiles_with(trial)) for trial in wave]
    cores = len(slot.cores) if slot.cores is not None else None
    return Barrier(folder, expected, dict(slot.environ), cores, held=held)


def side_by_side(
    wave: Sequence[Trial], runner: SharedRunner, barrier: Barrier, slot: GpuSlot
) -> Iterator[tuple[Trial, TrialResult]]:
    """Run trials side by side and yield each with its result when it ends; once the runner is to stop, only those that have been timed."""
    if not wave or runner.stop.is_set():
        return
    with ThreadPoolExecutor(len(wave), initializer=slot.enter) as pool:
        running = {pool.submit(runner.run_beside, trial, barrier): trial for trial in wave}
        for done in as_ended(running):
            result = done.result()
            if result.answer or not runner.stop.is_set():
                yield running[done], result


@dataclass
class SharedRun(Run):
    """A run whose processes compile side by side."""

    sharing: Sharing = field(default_factory=Sharing)
    stopped: str | None = None
    _noting: threading.Lock = field(default_factory=threading.Lock)

    together = True

    def take_all(self, folder: Path) -> None:
        """Run the trials of all slots side by side, and keep what their daemons know, also of a run that is ended early."""
        try:
            self._take_slots(folder)
        finally:
            if self.sharing.decisions:
                for line in gather(folder, self.sharing.decisions):
                    print(line, file=sys.stderr, flush=True)

    def _take_slots(self, folder: Path) -> None:
        plan, sharing = self.plan, self.sharing
        # With the time of each step, these are to be all steps in their order.
        runner = SharedRunner(folder, plan.settings, sharing.compiled, full_speed=not plan.each_step)
        self._take_all_slots(runner, folder)

    def _take_all_slots(self, runner: SharedRunner, folder: Path) -> None:
        started, slots = time.monotonic(), self.sharing.slots
        with ThreadPoolExecutor(len(slots)) as pool, contextlib.ExitStack() as stack:
            stack.callback(runner.stop.set)  # the pool would wait for all of them
            running = [pool.submit(self._take_slot, slot, runner, folder, started) for slot in slots]
            for done in as_ended(running):
                done.result()
            stack.pop_all()

    def _take_slot(self, slot: GpuSlot, runner: SharedRunner, folder: Path, started: float) -> None:
        """Run a slot's workloads, each repetition in parts whose processes compile side by side."""
        workloads = dealt(self.plan.workloads, slot, len(self.sharing.slots))
        for repetition in self._affordable_repetitions(started):
            for number, part in enumerate(parts(workloads, self.sharing.at_once)):
                trials = list(trials_of(repetition, part, self.plan.variants))
                self._take_part(trials, runner, folder / f"barrier.{slot.number}.{repetition}.{number}", slot)

    def _take_part(self, trials: Sequence[Trial], runner: SharedRunner, folder: Path, slot: GpuSlot) -> None:
        """Run trials side by side; those with a warm cache come last, as the cold ones fill it."""
        possible = [trial for trial in trials if not self.has_failed(trial)]
        for warm in (False, True):
            wave = [trial for trial in possible if (trial.variant.cache is Cache.WARM) is warm]
            barrier = barrier_of(wave, runner, Path(f"{folder}.{warm}"), slot)
            for trial, result in side_by_side(wave, runner, barrier, slot):
                self.note(trial, result)

    def note(self, trial: Trial, result: TrialResult) -> None:
        """Keep a result of any slot."""
        with self._noting:
            super().note(trial, result)

    def _affordable_repetitions(self, started: float) -> Iterator[int]:
        longest, budget_s = 0.0, self.sharing.budget_s
        for repetition in range(self.plan.repetitions):
            begun = time.monotonic()
            if repetition and budget_s is not None and begun - started + longest > budget_s:
                self.stopped = (
                    f"stopped after {repetition} of {self.plan.repetitions} repetitions: no time for another"
                )
                print(self.stopped, file=sys.stderr, flush=True)
                return
            yield repetition
            longest = max(longest, time.monotonic() - begun)

    def settings(self) -> dict[str, Any]:
        """Return the settings for the result file."""
        sharing = self.sharing
        more = {"gpus": len(sharing.slots), "at_once": sharing.at_once, "stopped": self.stopped}
        return {**super().settings(), "compiled_together": True, **more}
