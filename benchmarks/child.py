"""`python -m benchmarks.child TASK ANSWER_FILE`: one workload, compiled in one way, in this process alone.

Knows nothing of PyGraph: if it takes part, it does so through environment variables.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.conditions import Conditions
from benchmarks.correctness import Verdict, check
from benchmarks.environment import installed
from benchmarks.errors import BenchmarkError
from benchmarks.profiling import profile_step
from benchmarks.protocol import Answer, Task
from benchmarks.step import step_of
from benchmarks.timing import Stopwatch

if TYPE_CHECKING:
    from collections.abc import Callable

_MIB = 2**20
_NOT_COMPARED = "not compared: the process was ended before"


def perform(task: Task, conditions: Conditions, keep: Callable[[Answer], None]) -> Answer:
    """Run a task; the order matters: memory is read before anything that users would not do, and all is timed before a profile.

    `keep` gets the answer as far as it is known when all has been timed.
    """
    device = find_device(task.device)
    torch.manual_seed(task.seed)
    with device:  # weights are drawn there at once, which is much quicker than on the CPU
        case = task.workload.build(device)
    # A generator of its own, so that inputs are alike for all variants, whatever random numbers their modules
    # draw.
    generator = torch.Generator(device).manual_seed(task.seed)
    wake(device)
    conditions.before_compiling()

    started = time.perf_counter()
    step = step_of(case, device, task.compile)
    preparing_s = time.perf_counter() - started
    watch = Stopwatch(device, step, lambda: case.draw(generator), conditions)
    first_s = conditions.first_step(watch.first_step_s)
    conditions.before_timing()
    # The first step was one of them.
    watch.run(task.warm_up - 1)
    step_ms, host_ms = watch.steps_ms(task.steps)
    # Before the windows, which hold the inputs of all their steps at a time.
    reserved, allocated = reserved_mb(device), allocated_mb(device)
    pipelined_ms = watch.windows_ms(task.windows, task.window_steps)
    answer = Answer(
        step_ms=step_ms,
        host_ms=host_ms,
        pipelined_ms=pipelined_ms,
        reserved_mb=reserved,
        compile_s=None if first_s is None else preparing_s + first_s,
        correct=None,
        note=_joined(_NOT_COMPARED if task.check else "", conditions.note()),
        environment=describe(device),
        allocated_mb=allocated,
        cut_short=True,
    )
    keep(answer)
    conditions.after_timing()
    verdict = (case.check or check)(case, step, device, watch.draw) if task.check else Verdict(None)
    coverage, coverage_note = profile_step(watch) if task.profile else (None, "")
    return dataclasses.replace(
        answer,
        correct=verdict.correct,
        note=_joined(verdict.note, conditions.note()),
        coverage=coverage,
        coverage_note=coverage_note,
        cut_short=False,
    )


def _joined(*notes: str) -> str:
    return "; ".join(filter(None, notes))


def find_device(name: str | None) -> torch.device:
    """Return the device of a name, or the best there is; raises BenchmarkError if it is not there."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise BenchmarkError(
            "torch sees no CUDA device here; of all commands `run --device cpu` alone does without"
        )
    return torch.device(name or ("cuda" if available else "cpu"))


def wake(device: torch.device) -> None:
    """Make the device's context and library handles now, so that they do not count as compile time."""
    square = torch.ones(16, 16, device=device)
    (square @ square).sum().item()


def reserved_mb(device: torch.device) -> float | None:
    """Return the most memory that was ever reserved, in MiB; None on the CPU."""
    return torch.cuda.max_memory_reserved(device) / _MIB if device.type == "cuda" else None


def allocated_mb(device: torch.device) -> float | None:
    """Return the most memory that tensors ever took, in MiB; None on the CPU."""
    return torch.cuda.max_memory_allocated(device) / _MIB if device.type == "cuda" else None


def describe(device: torch.device) -> dict[str, str | None]:
    """Return the part of a result's `environment` that only a process with torch can tell."""
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "torch": torch.__version__,
        "triton": installed(["triton"]).get("triton"),
        "cuda": torch.version.cuda,
    }


def main(arguments: list[str], conditions: Conditions | None = None) -> int:
    """Run the task of the first argument and write its answer to the file of the second."""
    task, file = Task.from_json(arguments[0]), Path(arguments[1])

    def keep(answer: Answer) -> None:
        _write(file, answer.to_json())

    return _code_of(lambda: keep(perform(task, conditions or Conditions(), keep)))


def write_answer(file: str, measure: Callable[[], Any]) -> int:
    """Write as JSON what a child process measures, and return its exit code: 1 if `measure` raises BenchmarkError."""
    return _code_of(lambda: _write(Path(file), json.dumps(measure())))


def _code_of(act: Callable[[], None]) -> int:
    try:
        act()
    except BenchmarkError as error:
        # The parent takes the last line for the reason.
        print(error, file=sys.stderr)
        return 1
    return 0


def _write(file: Path, text: str) -> None:
    """Write an answer whole: this process may be ended at any time."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
