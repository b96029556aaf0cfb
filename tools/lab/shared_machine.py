"""The child processes of the lab: they compile side by side, are timed one at a time, and on cores that run at full speed.

`python -m tools.lab.shared_machine run TASK ANSWER_FILE`, or `suite TASK ANSWER_FILE`, or `regions WORKLOAD WAY ANSWER_FILE`, or `addresses WORKLOAD WAY ANSWER_FILE`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from benchmarks.conditions import Conditions
from tools.lab.barrier import Turn, wait_for_turn, wait_to_compile
from tools.lab.cpu_affinity import FULL_SPEED_VARIABLE, Cores

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

COMPILE_LIMIT_VARIABLE = "BENCHMARK_COMPILE_LIMIT_S"
"""For a child: the seconds after which it gives up, rather than have others wait for it to compile. Unset: never."""
_ATTEMPTS, _PAUSE_S = 12, 5.0
"""Of a first step for which the GPU's memory does not suffice beside the first steps of others."""


class SharedMachine(Conditions):
    """A process beside others: it waits at the barrier, and is timed on cores that run at full speed."""

    def __init__(self, *, frees: bool = False) -> None:
        """Take part; `frees`: give memory that is not in use back to the GPU while others are timed."""
        self._frees = frees
        self._cores: Cores | None = None
        self._turn: Turn | None = None
        self._limit: threading.Timer | None = None
        self._remarks: list[str] = []

    def before_compiling(self) -> None:
        """Wait until the process before has compiled the same code."""
        wait_to_compile()
        if limit := os.environ.get(COMPILE_LIMIT_VARIABLE):
            self._limit = threading.Timer(float(limit), _give_up, [float(limit)])
            self._limit.daemon = True
            self._limit.start()

    def first_step(self, measure: Callable[[], T]) -> T | None:
        """Run the first step, and again while the memory does not suffice beside others'; its seconds are known of a first attempt only.

        Raises torch.OutOfMemoryError if another attempt fails in whatever way.
        """
        attempts, lacked = _ATTEMPTS if self._frees else 1, ""
        for attempt in range(1, attempts):
            try:
                return self._known(measure(), attempt)
            except torch.OutOfMemoryError as error:
                lacked = str(error)  # not the error, whose frames hold memory
            except Exception as error:
                if lacked:
                    raise torch.OutOfMemoryError(lacked) from error
                raise
            torch.cuda.empty_cache()
            time.sleep(_PAUSE_S)
        return self._known(measure(), attempts)

    def _known(self, seconds: T, attempt: int) -> T | None:
        if attempt == 1:
            return seconds
        self._remarks.append(f"the memory sufficed for the first step at attempt {attempt}")
        return None

    def before_timing(self) -> None:
        """Wait until all have compiled, and none is being timed."""
        if self._limit:
            self._limit.cancel()
        if self._frees and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self._turn = wait_for_turn()

    def after_timing(self) -> None:
        """Let the next process be timed, and wait until all have been."""
        if self._turn is not None:
            torch.cuda.empty_cache()  # the others' checks need it
            self._turn.end()

    def timed(self, measure: Callable[[], T]) -> T:
        """Measure, and measure again if the core was slow; work on the CPU is for all cores, and measured once."""
        file = os.environ.get(FULL_SPEED_VARIABLE)
        if not file or not torch.cuda.is_initialized():
            return measure()
        self._cores = self._cores or Cores(Path(file))
        return self._cores.undisturbed(measure)

    def note(self) -> str:
        """Return in how many timings the host was slow."""
        return "; ".join(filter(None, [*self._remarks, self._cores.note() if self._cores else ""]))


def _give_up(limit_s: float) -> None:
    print(
        f"TimeoutError: it had not compiled after {limit_s:.0f} s beside others", file=sys.stderr, flush=True
    )
    os._exit(1)


def main(arguments: list[str]) -> int:
    """Run the child process that the first argument names."""
    what, *rest = arguments
    if what in ("run", "suite"):
        from benchmarks import child

        return child.main(rest, SharedMachine(frees=what == "suite"))
    if what == "regions":
        from benchmarks import region_child

        return region_child.main(rest, SharedMachine())
    from tools.lab import addresses_child

    return addresses_child.main(rest, SharedMachine())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
