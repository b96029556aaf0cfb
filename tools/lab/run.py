"""`python -m tools.lab run`: as `python -m benchmarks run`, with processes that compile side by side, on several GPUs, within a time.

Most of a benchmark's time is compiling. Each GPU has its share of the cores and of the workloads, and its processes are timed one at a
time. What one run has compiled may stay for the next.
"""

from __future__ import annotations

import contextlib
import functools
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
    from concurrent.futures import Future

_COMPILED = "compiled."
"""Begins the name of a mark in a folder of caches: the variant after it has compiled all that it needs."""
_POLL_S = 0.2
_LATER_SHARE = 0.5
"""About how much of the first repetition's time a later one takes, which finds all code compiled, and neither checks nor profiles."""


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
                # The caches were empty when this process started, and filled by another one before it
                # compiled.
                result = replace(result, compiled_cold=trial.variant.compile is Compile.EAGER)
        # A process that failed may have compiled only a part of its code, on which no other is to rely.
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
    # Cores are set for one thread on Linux, and inherited by what it starts: each thread of the pool enters
    # the slot.
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
                # Here, while the folder with the daemons' databases is still there: it goes when the run
                # ends.
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
        """Run a slot's workloads, in waves of processes that compile side by side.

        When all processes of a wave have been timed, those of the next one start: they compile while these check and profile.
        """
        before: Future[None] | None = None
        filling = set[tuple[object, ...]]()
        # For two waves: one compiles while the one before it checks and profiles.
        with ThreadPoolExecutor(2) as pool:
            for number, trials in enumerate(self._waves(slot, started)):
                if before and not filling.isdisjoint(map(_filler, trials)):
                    before.result()  # or a cache would be read while it is filled
                wave = [trial for trial in trials if not self.has_failed(trial)]
                filling = {(trial.repetition, trial.workload, trial.variant.name) for trial in wave}
                barrier = barrier_of(
                    wave, runner, folder / f"barrier.{slot.number}.{number}", slot, held=before is not None
                )
                if before:
                    before.add_done_callback(functools.partial(_admit, barrier))
                running = pool.submit(self._take_trials, wave, runner, barrier, slot)
                while not (running.done() or barrier.all_timed()):
                    time.sleep(_POLL_S)
                if before:
                    before.result()
                before = running
            if before:
                before.result()

    def _waves(self, slot: GpuSlot, started: float) -> Iterator[list[Trial]]:
        """Yield a slot's trials in waves; those with a warm cache come a wave later than the cold ones that fill it."""
        workloads = dealt(self.plan.workloads, slot, len(self.sharing.slots))
        warm: list[Trial] = []
        for repetition in self._affordable_repetitions(started):
            for part in parts(workloads, self.sharing.at_once):
                trials = list(trials_of(repetition, part, self.plan.variants))
                late, warm = warm, [each for each in trials if each.variant.cache is Cache.WARM]
                yield [each for each in trials if each.variant.cache is not Cache.WARM]
                if late:
                    yield late
        if warm:
            yield warm

    def _take_trials(
        self, wave: Sequence[Trial], runner: SharedRunner, barrier: Barrier, slot: GpuSlot
    ) -> None:
        for trial, result in side_by_side(wave, runner, barrier, slot):
            self.note(trial, result)

    def note(self, trial: Trial, result: TrialResult) -> None:
        """Keep a result of any slot."""
        # Slots are threads, and the parent's `note` writes the whole file.
        with self._noting:
            super().note(trial, result)

    def _affordable_repetitions(self, started: float) -> Iterator[int]:
        longest, budget_s = 0.0, self.sharing.budget_s
        for repetition in range(self.plan.repetitions):
            begun = time.monotonic()
            if repetition and budget_s is not None and begun - started + longest * _LATER_SHARE > budget_s:
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


def _filler(trial: Trial) -> tuple[object, ...]:
    # With the repetition: a warm process uses the daemon's folder that its own repetition has filled.
    return trial.repetition, trial.workload, trial.variant.filled_by


def _admit(barrier: Barrier, _: Future[None]) -> None:
    barrier.admit()
