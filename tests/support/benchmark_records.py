"""Records of benchmarks whose processes nobody ran: made-up answers, and the record that is made of some."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.protocol import Answer
from benchmarks.records import Record, record_of
from benchmarks.trial import TrialResult
from benchmarks.variants import VARIANTS
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from benchmarks.coverage import Coverage


def answered(
    repetition: int,
    step_ms: list[float],
    *,
    compile_s: float = 9.0,
    cold: bool = True,
    correct: bool | None = True,
    summary: dict[str, Any] | None = None,
    coverage: Coverage | None = None,
) -> TrialResult:
    """Return what a process has measured that came to its end."""
    answer = Answer(
        step_ms, [0.5], [1.5], 100.0 + repetition, compile_s, correct, "", {"gpu": "H200"},
        coverage, str(coverage or ""),
    )  # fmt: skip
    return TrialResult(repetition, answer, summary, None, compiled_cold=cold, seconds=1.0)


def record(*trials: TrialResult, variant: str = "default") -> Record:
    """Return what is stored of some processes of one workload."""
    return record_of(WORKLOADS["mlp-training"], VARIANTS[variant], trials)
