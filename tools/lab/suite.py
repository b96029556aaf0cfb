"""`python -m benchmarks suite`: the models of a suite as all variants, in pieces that go on where the last one stopped.

The result file holds a record for each model and variant; those that it has are not run again. A GPU takes the next models when it is
done with some. Eager mode comes first: a model that does not run in it is not tried in any other.
"""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.errors import BenchmarkError
from benchmarks.records import Record, read_result, records_of
from benchmarks.suites import summary
from benchmarks.suites.catalogue import FOLDER_VARIABLE, OFFLINE
from benchmarks.trial import Trial
from benchmarks.variants import VARIANTS, Cache, Compile, Variant
from benchmarks.workloads import Mode, Workload
from tools.lab.barrier import AFTERWARDS_VARIABLE
from tools.lab.run import SharedRun, SharedRunner, side_by_side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.protocol import Task
    from tools.lab.gpu_slots import GpuSlot

Key = tuple[str, str]
"""Of a record: workload and variant."""
_AFTERWARDS = {Mode.INFERENCE: 4, Mode.TRAINING: 2}
"""Processes that compare results at a time: each has a second model on the GPU, and maybe in float64."""
_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "CUDNN_STATUS_ALLOC_FAILED")
_GRACE_S = 12.0
"""For processes and daemons to end."""
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
    anew: bool = False
    """Whether records that the file has are measured again."""


class SuiteRunner(SharedRunner):
    """Runs trials of models that download nothing."""

    child = ("tools.lab.shared_machine", "suite")

    def _task(self, trial: Trial) -> Task:
        """Return a trial's task: nothing is profiled that can run no graphs, nor compared that another variant is the same as."""
        variant = trial.variant
        graphs = variant.is_ours or variant.compile in (Compile.REDUCE_OVERHEAD, Compile.CUDA_GRAPH)
        task = super()._task(trial)
        return dataclasses.replace(
            task, profile=task.profile and graphs, check=task.check and variant.name != summary.AGAIN
        )

    def forget(self, trial: Trial) -> None:
        """Remove what a daemon knows of a trial that is to run again with an empty cache."""
        if trial.variant.cache is Cache.COLD:
            shutil.rmtree(self._home(trial), ignore_errors=True)


@dataclass
class SuiteRun(SharedRun):
    """A piece of a suite under way."""

    piece: Piece = field(default_factory=lambda: Piece("", Mode.INFERENCE, 0.0))
    known: dict[Key, Record] = field(default_factory=dict)
    """Records of the pieces before."""
    _known_environment: dict[str, Any] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _waiting: deque[tuple[Workload, ...]] = field(default_factory=deque)
    _durations: list[float] = field(default_factory=list)

    def execute(self) -> list[Record]:
        """Measure what the file lacks, as far as the time suffices; return all records."""
        if self.plan.out.exists() and not self.piece.anew:
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
        size = self.sharing.at_once or 1
        todo = [each for each in self.plan.workloads if self.lacking(each)]
        self._waiting.extend(tuple(todo[begin : begin + size]) for begin in range(0, len(todo), size))
        runner = SuiteRunner(
            folder, self.plan.settings, self.sharing.compiled, full_speed=True, environ=self._environ()
        )
        end = threading.Timer(max(0.0, self.left_s() - _GRACE_S), runner.stop.set)
        end.start()
        try:
            self._take_all_slots(runner, folder)
        finally:
            end.cancel()

    def _environ(self) -> dict[str, str]:
        folder = {FOLDER_VARIABLE: str(self.piece.torchbench)} if self.piece.torchbench else {}
        return {**OFFLINE, **folder, AFTERWARDS_VARIABLE: str(_AFTERWARDS[self.piece.mode])}

    def left_s(self) -> float:
        """Return the seconds until the piece is to have ended."""
        return self._began + self.piece.end_s - time.monotonic()

    def _take_slot(self, slot: GpuSlot, runner: SharedRunner, folder: Path, started: float) -> None:
        while (part := self._next_part()) and not runner.stop.is_set():
            began = time.monotonic()
            place = folder / f"barrier.{slot.number}.{part[0].name}"
            for number, wave in enumerate(("eager", "cold", "warm")):
                self._take_wave(
                    self._trials(part, wave), runner, place.with_name(f"{place.name}.{number}"), slot
                )
            self._durations.append(time.monotonic() - began)
        if self._waiting and self.stopped is None:
            self.stopped = "stopped: no time for more"

    def _next_part(self) -> tuple[Workload, ...] | None:
        """Return the next workloads for a GPU, if there is as much time left as others have taken."""
        usual_s = statistics.median(self._durations) if self._durations else 0.0
        if self.left_s() - _GRACE_S < usual_s:
            return None
        try:
            return self._waiting.popleft()
        except IndexError:
            return None

    def _trials(self, part: Sequence[Workload], wave: str) -> list[Trial]:
        return [
            Trial(0, workload, variant)
            for workload in part
            for variant in self.lacking(workload)
            if _wave_of(variant) == wave
        ]

    def _take_wave(self, wave: Sequence[Trial], runner: SharedRunner, folder: Path, slot: GpuSlot) -> None:
        """Run trials side by side, and once more, alone, those for which the memory did not suffice beside others."""
        alone: list[Trial] = []
        for trial, result in side_by_side(wave, runner, folder, slot):
            if len(wave) > 1 and result.error and any(text in result.error for text in _OUT_OF_MEMORY):
                alone.append(trial)
            else:
                self.note(trial, result)
        for number, trial in enumerate(alone):
            if isinstance(runner, SuiteRunner):
                runner.forget(trial)
            for again, result in side_by_side(
                [trial], runner, folder.with_name(f"{folder.name}.{number}"), slot
            ):
                self.note(again, result)

    # --- the file ----------------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """Return all records, those of pieces before and of other models too, by workload."""
        new = {(each.workload, each.variant): each for each in super().records()}
        order = {name: number for number, name in enumerate(VARIANTS)}
        both = {**self.known, **new}
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


def _wave_of(variant: Variant) -> str:
    if variant.compile is Compile.EAGER:
        return "eager"
    return "warm" if variant.cache is Cache.WARM else "cold"
