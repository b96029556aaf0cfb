"""`python -m benchmarks suite`: the models of a suite as all variants, in pieces that go on where the last one stopped.

The result file holds a record for each model and variant; those that it has are not run again. A GPU takes the next models when all
processes of the ones before have been timed: these are then checked while those compile. Nothing else uses the GPU, or its share of the
cores, while a process is timed. A model that does not run in eager mode has no record of any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchmarkError
from benchmarks.records import Record, read_result, records_of
from benchmarks.suites.catalogue import FOLDER_VARIABLE
from benchmarks.trial import Trial, TrialResult
from benchmarks.variants import VARIANTS, Cache, Compile, Variant
from benchmarks.workloads import Mode, Workload
from tools.lab.barrier import AFTERWARDS_VARIABLE, LIMIT_VARIABLE, Barrier
from tools.lab.run import SharedRun, SharedRunner, barrier_of, side_by_side
from tools.lab.suites.results import AGAIN, EAGER

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from benchmarks.protocol import Task
    from tools.lab.gpu_slots import GpuSlot

Key = tuple[str, str]
"""Of a record: workload and variant."""
_AFTERWARDS = {Mode.INFERENCE: 4, Mode.TRAINING: 2}
"""Processes that compare results at a time: each has a second model on the GPU, and maybe in float64."""
# cuBLAS and cuDNN have errors of their own where there is no memory for their handles and workspaces.
_OUT_OF_MEMORY = (
    "OutOfMemoryError",
    "out of memory",
    "_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",
)
_ALONE = 3
"""Processes that run once more, alone, of the models that a GPU takes at a time: each takes as long as all of them side by side."""
_GRACE_S, _GATHER_S = 12.0, 10.0
"""For processes and daemons to end, and for their decisions to be gathered."""
_CHECKS = 1.1
"""How much longer models take in all than until they have been timed."""
_START = 0.4
"""The share of the time of several models that one of them takes as well: processes start, and some model compiles the longest."""
_PLAIN_WARM_UP = 30
"""The most steps of warm-up of a process without PyGraph, which needs more to decide."""
_POLL_S, _SETTLED_S = 0.2, 1.0
_SAME_SETTINGS = ("suite", "mode", "warm_up", "steps", "windows", "window_steps", "libraries")
"""Settings that all records of a file have in common."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One call of the command: what it measures of, and how long it may take."""

    suite: str
    mode: Mode
    end_s: float
    left_out: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    torchbench: Path | None = None
    begin_s: float | None = None
    """Begin no model later, so that what follows on this GPU has its share of the time."""
    limit_s: float = 240.0
    """For one process to compile, to be timed, or to be compared: the others of its GPU wait for it."""


class SuiteRunner(SharedRunner):
    """Runs trials of models that download nothing."""

    child = ("tools.lab.shared_machine", "suite")
    takes_cut_short = True

    def _task(self, trial: Trial) -> Task:
        """Return a trial's task: nothing is profiled that can run no graphs, nor eager mode or the same variant compared again."""
        variant = trial.variant
        graphs = variant.is_ours or variant.compile in (Compile.REDUCE_OVERHEAD, Compile.CUDA_GRAPH)
        task = super()._task(trial)
        return dataclasses.replace(
            task,
            profile=task.profile and graphs,
            check=task.check and variant.name not in (EAGER, AGAIN),
            warm_up=task.warm_up if variant.is_ours else min(task.warm_up, _PLAIN_WARM_UP),
        )

    def compiles_with(self, trial: Trial) -> Hashable:
        """Return a value that trials share of which one compiles for the others; None in eager mode."""
        return None if trial.variant.compile is Compile.EAGER else super().compiles_with(trial)

    def forget(self, trial: Trial) -> None:
        """Remove what a daemon knows of a trial that is to run again with an empty cache."""
        if trial.variant.cache is Cache.COLD:
            shutil.rmtree(self.home(trial), ignore_errors=True)


@dataclass
class Part:
    """Models that a GPU measures side by side; `before` measures the ones before on it."""

    workloads: tuple[Workload, ...]
    folder: Path
    before: Future[None] | None
    began: float = field(default_factory=time.monotonic)
    barrier: Barrier | None = None
    """The latest one."""
    is_last: bool = False
    """Whether no other follows it, unless the memory has not sufficed for a process."""
    alone: list[Trial] = field(default_factory=list)
    """Trials that are to run once more, alone."""

    @property
    def is_timed(self) -> bool:
        """Whether nothing of it is to be timed any more."""
        return self.is_last and not self.alone and self.barrier is not None and self.barrier.all_timed()


@dataclass
class SuiteRun(SharedRun):
    """A piece of a suite under way."""

    piece: Piece = field(default_factory=lambda: Piece("", Mode.INFERENCE, 0.0))
    known: dict[Key, Record] = field(default_factory=dict)
    """Records of the pieces before."""
    _known_environment: dict[str, Any] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _waiting: deque[Workload] = field(default_factory=deque)
    _usual_s: float = 0.0
    """Seconds that the latest models have taken."""
    _usual_size: int = 1
    """Their number."""

    def execute(self) -> list[Record]:
        """Measure what the file lacks, as far as the time suffices; return all records."""
        if self.plan.out.exists():
            self._read()
        return super().execute()

    def _read(self) -> None:
        content = read_result(self.plan.out)
        settings = self.settings()
        differing = [name for name in _SAME_SETTINGS if content["settings"].get(name) != settings[name]]
        differing += ["commit"] if content["environment"].get("commit") != self.host["commit"] else []
        if differing:
            raise BenchmarkError(
                f"{self.plan.out} was measured with another {', '.join(differing)}: name another folder with --out"
            )
        self.known = {(each.workload, each.variant): each for each in records_of(content)}
        self._known_environment = content["environment"]

    # --- what is left to do ------------------------------------------------------------------------

    def lacking(self, workload: Workload) -> list[Variant]:
        """Return the variants that have no record yet, and those that fill the cache of one."""
        if self._has_failed(workload, str(Compile.EAGER)):
            return []
        lacking = {each.name for each in self.plan.variants if not self._is_known(workload, each)}
        # The folders of earlier daemons went with their piece, so that a warm variant needs a cold one in
        # this piece, too.
        lacking |= {VARIANTS[name].filled_by for name in lacking} - {""}
        return [each for each in self.plan.variants if each.name in lacking]

    def _is_known(self, workload: Workload, variant: Variant) -> bool:
        """Whether there is a record, or can be none, as no process fills the cache."""
        key = (workload.name, variant.name)
        return key in self.known or key in self.results or self._has_failed(workload, variant.filled_by)

    def _has_failed(self, workload: Workload, variant: str) -> bool:
        key = (workload.name, variant)
        known = self.known.get(key)
        return (known is not None and known.step_ms is None) or any(
            each.error for each in self.results.get(key, ())
        )

    @property
    def unmeasured(self) -> list[str]:
        """The workloads that the next piece goes on with."""
        return [each.name for each in self.plan.workloads if self.lacking(each)]

    # --- measuring ---------------------------------------------------------------------------------

    def _take_slots(self, folder: Path) -> None:
        self._waiting.extend(each for each in self.plan.workloads if self.lacking(each))
        runner = SuiteRunner(
            folder, self.plan.settings, self.sharing.compiled, full_speed=True, environ=self._environ()
        )
        # On a thread of its own, since all slots wait for their processes.
        end = threading.Timer(max(0.0, self.left_s()), runner.stop.set)
        end.start()
        try:
            self._take_all_slots(runner, folder)
        finally:
            end.cancel()

    def _environ(self) -> dict[str, str]:
        folder = {FOLDER_VARIABLE: str(self.piece.torchbench)} if self.piece.torchbench else {}
        limits = {
            AFTERWARDS_VARIABLE: str(_AFTERWARDS[self.piece.mode]),
            LIMIT_VARIABLE: str(self.piece.limit_s),
        }
        return {**folder, **limits}

    def left_s(self) -> float:
        """Return the seconds for which the piece may still measure."""
        grace_s = _GRACE_S + (_GATHER_S if self.sharing.decisions else 0.0)
        return self._began + self.piece.end_s - grace_s - time.monotonic()

    def _take_slot(self, slot: GpuSlot, runner: SharedRunner, folder: Path, started: float) -> None:
        running: Future[None] | None = None
        with ThreadPoolExecutor(2) as pool:
            while (workloads := self._next_workloads()) and not runner.stop.is_set():
                place = folder / f"barrier.{slot.number}.{workloads[0].name}"
                part = Part(workloads, place, running)
                running = pool.submit(self._take_models, part, runner, slot)
                while not (running.done() or self._is_timed(part)):
                    time.sleep(_POLL_S)
                self._usual_s, self._usual_size = _CHECKS * (time.monotonic() - part.began), len(workloads)
            if running:
                running.result()
        if self._waiting and self.stopped is None:
            self.stopped = "stopped: no time for more"

    def _is_late(self) -> bool:
        begin_s = self.piece.begin_s
        return begin_s is not None and time.monotonic() - self._began > begin_s

    @staticmethod
    def _is_timed(part: Part) -> bool:
        """Whether nothing of a part is to be timed any more: also when the last process to be timed has failed, which it tells in a moment."""
        if not part.is_timed:
            return False
        time.sleep(_SETTLED_S)
        return part.is_timed

    def _next_workloads(self) -> tuple[Workload, ...]:
        """Return the next models for a GPU: as many as there is time for, by what the latest have taken."""
        left_s, size = self.left_s(), self.sharing.at_once or 1
        if self._is_late():
            return ()
        # Fewer models rather than none where the time that is left does not suffice for all.
        while size and left_s < self._usual_s * (_START + (1 - _START) * size / self._usual_size):
            size -= 1
        found: list[Workload] = []
        with contextlib.suppress(IndexError):  # the thread of another GPU may have taken the last model
            while left_s > 0 and len(found) < size:
                found.append(self._waiting.popleft())
        return tuple(found)

    def _take_models(self, part: Part, runner: SharedRunner, slot: GpuSlot) -> None:
        """Run models as all variants; raises what went wrong with the ones before."""
        # Warm ones read the cache that a cold one has filled, and so come in a wave of their own.
        for name in ("cold", "warm"):
            warm_follow = name == "cold" and bool(self._trials(part.workloads, "warm"))
            if wave := self._trials(part.workloads, name):
                self._take_wave(part, wave, runner, slot, is_last=not warm_follow)
        if part.before:
            part.before.result()

    def _trials(self, workloads: Sequence[Workload], wave: str) -> list[Trial]:
        return [
            Trial(0, workload, variant)
            for workload in workloads
            for variant in self.lacking(workload)
            if ("warm" if variant.cache is Cache.WARM else "cold") == wave
        ]

    def _take_wave(
        self, part: Part, wave: Sequence[Trial], runner: SharedRunner, slot: GpuSlot, *, is_last: bool
    ) -> None:
        """Run trials side by side, and once more, alone, some of those for which the memory did not suffice beside others."""
        for trial, result in self._run(part, wave, runner, slot, is_last=is_last):
            # One that ran alone had the whole GPU, and would fail again.
            if len(wave) > 1 and result.error and any(text in result.error for text in _OUT_OF_MEMORY):
                part.alone.append(trial)
            else:
                self.note(trial, result)
        for trial in part.alone[_ALONE:]:
            print(
                f"{trial.name}: no memory beside others; left for the next piece", file=sys.stderr, flush=True
            )
        del part.alone[_ALONE:]
        while part.alone:
            trial = part.alone[0]
            if isinstance(runner, SuiteRunner):
                runner.forget(trial)
            for again, result in self._run(part, [trial], runner, slot, is_last=is_last):
                self.note(again, result)
            # Only now: while it is listed the part is not timed, and the next models of this GPU do not
            # begin.
            del part.alone[0]

    def _run(
        self, part: Part, wave: Sequence[Trial], runner: SharedRunner, slot: GpuSlot, *, is_last: bool
    ) -> Iterator[tuple[Trial, TrialResult]]:
        """Run trials side by side; they are timed when all else that used the GPU has ended."""
        # A folder for each wave: the marks of an earlier one would let processes pass that have not compiled.
        folder = part.folder.with_name(f"{part.folder.name}.{time.monotonic_ns()}")
        barrier = barrier_of(wave, runner, folder, slot, held=part.before is not None)
        if part.before:
            # A future that is done already calls this at once.
            part.before.add_done_callback(lambda _: barrier.admit())
        part.barrier, part.is_last = barrier, is_last
        yield from side_by_side(wave, runner, barrier, slot)

    # --- the file ----------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Return all records, those of pieces before and of other models too, by workload."""
        new = {(each.workload, each.variant): each for each in super().records()}
        order = {name: number for number, name in enumerate(VARIANTS)}
        both = {**self.known, **new}
        # Eager mode runs beside the other variants, so that these may have a record before it has failed.
        not_eager = {key[0] for key, each in both.items() if key[1] == Compile.EAGER and each.step_ms is None}
        both = {key: each for key, each in both.items() if key[1] == Compile.EAGER or key[0] not in not_eager}
        return [both[key] for key in sorted(both, key=lambda key: (key[0].lower(), order[key[1]]))]

    def environment(self) -> dict[str, str | None]:
        """Return where it was measured; before any process has told, where the pieces before were."""
        return {
            name: value or self._known_environment.get(name) for name, value in super().environment().items()
        }

    def settings(self) -> dict[str, Any]:
        """Return the settings for the result file."""
        piece = self.piece
        return {
            **super().settings(),
            "suite": piece.suite,
            "mode": str(piece.mode),
            "left_out": dict(piece.left_out),
            "libraries": dict(piece.libraries),
        }
