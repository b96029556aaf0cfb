"""`python -m benchmarks run`: every workload as every variant, over some repetitions, into one result file.

The file is written anew after every process: whatever ends the run early, the figures of all processes before are there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.environment import TORCH_FIELDS, describe_host
from benchmarks.records import Record, check_writable, record_of, write_result
from benchmarks.trial import Settings, Trial, TrialResult, TrialRunner, trials_of
from benchmarks.variants import Variant
from benchmarks.workloads import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """The request of a run."""

    workloads: tuple[Workload, ...]
    variants: tuple[Variant, ...]
    repetitions: int
    settings: Settings
    out: Path
    each_step: bool = False
    """Whether the file is to have the time of every timed step."""


@dataclass
class Run:
    """A run under way, one process after the other."""

    plan: Plan
    results: dict[tuple[str, str], list[TrialResult]] = field(default_factory=dict)
    # Read once and at the beginning: a commit that is made during the run is not what was measured.
    host: Mapping[str, str | None] = field(default_factory=describe_host)

    together = False
    """Whether processes compile side by side."""

    def execute(self) -> list[Record]:
        """Run all trials; return the records, which are in the file too."""
        check_writable(self.plan.out)  # now rather than after an hour
        # Compiler processes that were killed a moment ago may still write there, which is no reason to fail.
        with tempfile.TemporaryDirectory(prefix="pygraph-bench-", ignore_cleanup_errors=True) as folder:
            self.take_all(Path(folder))
        # Also where no trial was run: the settings say why.
        self.save()
        return self.records()

    def take_all(self, folder: Path) -> None:
        """Run all trials, whose files lie in `folder`."""
        runner = TrialRunner(folder, self.plan.settings)
        # Repetition by repetition: a run that is ended early has something of each pair, and a drift of the
        # machine falls on all of them.
        for repetition in range(self.plan.repetitions):
            for trial in trials_of(repetition, self.plan.workloads, self.plan.variants):
                if not self.has_failed(trial):
                    self.note(trial, runner.run(trial))

    @property
    def failed(self) -> bool:
        """Whether any process failed."""
        return any(result.error for results in self.results.values() for result in results)

    def has_failed(self, trial: Trial) -> bool:
        """Whether the workload has failed as this variant before: it would fail again, and take as long."""
        return any(result.error for result in self.results.get((trial.workload.name, trial.variant.name), ()))

    def note(self, trial: Trial, result: TrialResult) -> None:
        """Keep a result, and write the file."""
        self.results.setdefault((trial.workload.name, trial.variant.name), []).append(result)
        self.save()
        print(_line(trial, result), file=sys.stderr, flush=True)

    def records(self) -> list[Record]:
        """Return the records so far, workload by workload in the order asked for."""
        return [
            record_of(workload, variant, results, each_step=self.plan.each_step, together=self.together)
            for workload in self.plan.workloads
            for variant in self.plan.variants
            if (results := self.results.get((workload.name, variant.name)))
        ]

    def save(self) -> None:
        """Write the result file."""
        write_result(self.plan.out, self.environment(), self.settings(), self.records())

    def environment(self) -> dict[str, str | None]:
        """Return where it was measured, as far as a process has told."""
        answers = [result.answer for results in self.results.values() for result in results]
        seen = next((answer.environment for answer in answers if answer), {})
        return {**{name: seen.get(name) for name in TORCH_FIELDS}, **self.host}

    def settings(self) -> dict[str, Any]:
        """Return the settings for the result file."""
        settings = self.plan.settings
        return {
            "repetitions": self.plan.repetitions,
            "warm_up": settings.warm_up,
            "steps": settings.steps,
            "windows": settings.windows,
            "window_steps": settings.window_steps,
            "compiler_caches": str(settings.caches),
        }


def _line(trial: Trial, result: TrialResult) -> str:
    record = record_of(trial.workload, trial.variant, [result])
    figure = f"{record.step_ms.median:.3f} ms" if record.step_ms else f"failed: {result.error}"
    wrong = f" WRONG: {record.note}" if record.correct is False else ""
    return f"repetition {trial.repetition + 1} {record.workload} {record.variant}: {figure} ({result.seconds:.0f} s){wrong}"
