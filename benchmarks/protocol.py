"""The task of a child process and its answer, both as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from benchmarks.coverage import Coverage
from benchmarks.variants import Compile
from benchmarks.workloads import Mode, Workload


@dataclass(frozen=True, slots=True)
class Task:
    """One process's work. `device` None: CUDA if there is a device, otherwise the CPU.

    `windows` times `window_steps` steps are run back to back. In the end, `check` compares with eager, and `profile` counts
    what runs inside CUDA graphs.
    """

    workload: Workload
    compile: Compile
    device: str | None
    seed: int
    warm_up: int
    steps: int
    windows: int
    window_steps: int
    check: bool
    profile: bool

    def to_json(self) -> str:
        """Return the task as a command-line argument."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Return the task that `to_json` wrote."""
        values = json.loads(text)
        # The whole workload is passed, as models of suites are in no registry in which the child could look
        # them up.
        workload = Workload(**{**values["workload"], "mode": Mode(values["workload"]["mode"])})
        return cls(**{**values, "compile": Compile(values["compile"]), "workload": workload})


@dataclass(frozen=True, slots=True)
class Answer:
    """The measurements of one process. Times of steps in milliseconds, one item a step or window; memory in MiB at its peak.

    `compile_s` is None if other processes disturbed it, `correct` if nothing was compared, `coverage` if nothing was seen; `note` and `coverage_note` say what a figure
    alone would not.
    """

    step_ms: list[float]
    host_ms: list[float]
    pipelined_ms: list[float]
    reserved_mb: float | None
    compile_s: float | None
    correct: bool | None
    note: str
    environment: dict[str, str | None]
    coverage: Coverage | None = None
    coverage_note: str = ""
    allocated_mb: float | None = None
    cut_short: bool = False
    """Whether it was written when all had been timed, and the process ended before it was done."""

    def to_json(self) -> str:
        """Return the answer as the content of the file that the parent reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """Return the answer that `to_json` wrote."""
        values = json.loads(text)
        coverage = values["coverage"]
        return cls(**{**values, "coverage": coverage and Coverage(**coverage)})
