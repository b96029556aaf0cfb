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
from tools.lab.barrier import LIMIT_VARIABLE, Turn, give_up, wait_for_turn, wait_to_compile
from tools.lab.cpu_affinity import FULL_SPEED_VARIABLE, Cores

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_SCARCE = 0.4
"""The share of the GPU's memory under which a process that has been timed ends before another is timed, as its graphs hold memory."""
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
        self._limit_to(_give_up_compiling)  # a model may hang while it is built, too

    def before_compiling(self) -> None:
        """Wait until the process before has compiled the same code; raises TimeoutError if it has given up."""
        self._unlimit()
        wait_to_compile()
        self._limit_to(_give_up_compiling)

    def _unlimit(self) -> None:
        if self._limit:
            self._limit.cancel()

    def _limit_to(self, ended: Callable[[float], None]) -> None:
        """Have `ended` called, which ends this process, when what begins now takes longer than the limit."""
        self._unlimit()
        if limit := os.environ.get(LIMIT_VARIABLE):
            self._limit = threading.Timer(float(limit), ended, [float(limit)])
            # Else a process that is done would stay until its timer runs out.
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
            # Whatever it fails with now: a lack of memory is what has a suite run this process once more,
            # alone.
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
        self._unlimit()
        if self._frees and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self._turn = wait_for_turn()
        self._limit_to(_give_up_timing)

    def after_timing(self) -> None:
        """Let the next process be timed, and wait until all have been; where memory is scarce, keep the turn until this process ends."""
        self._unlimit()
        if self._turn is not None:
            torch.cuda.empty_cache()  # the others' checks need it
            if not (self._frees and _is_memory_scarce()):
                self._turn.end()
        self._limit_to(_give_up_checking)

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


def _is_memory_scarce() -> bool:
    if not torch.cuda.is_initialized():
        return False
    free, total = torch.cuda.mem_get_info()
    return bool(free < _SCARCE * total)


def _give_up_compiling(limit_s: float) -> None:
    give_up()
    _end(f"TimeoutError: it had not compiled after {limit_s:.0f} s beside others", 1)


def _give_up_timing(limit_s: float) -> None:
    _end(f"TimeoutError: it had not been timed after {limit_s:.0f} s", 1)


def _give_up_checking(limit_s: float) -> None:
    # Its answer, without a comparison, has been written.
    _end(f"TimeoutError: it had not been compared after {limit_s:.0f} s", 0)


def _end(why: str, code: int) -> None:
    print(why, file=sys.stderr, flush=True)
    # From the timer's thread, where `sys.exit` would end that thread alone. The main one may hang in a
    # compiler.
    os._exit(code)


def main(arguments: list[str]) -> int:
    """Run the child process that the first argument names."""
    what, *rest = arguments
    # Imported where they run: regions and addresses need PyGraph, and the children of `run` must not load it.
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
