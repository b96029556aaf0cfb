"""Cores that run at full speed: of a shared machine's some take twice as long for a while, and then others.

Seen on a machine with an H200: the same loop took 0.94 to 1.8 ms on 16 cores, and six of them had become slow or quick
when they were looked at again within a second. A process that is measured in such a while seems to be what is slow. So timings begin on a core that runs at full speed, and
are taken again if it does not any more at their end.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

T = TypeVar("T")

SLOWER = 1.2
"""By how much more than the shortest time that was ever seen the loop may take on a core that runs at full speed."""
TRIES = 4
FULL_SPEED_VARIABLE = "BENCHMARK_FULL_SPEED"
"""For a child: the file in which processes tell each other how long the loop takes at full speed. Unset: measure once."""
_TURNS = 6_000
_WIDTH = 2
"""Cores to stay on: a backward runs on a thread of its own."""
_TASKS = Path("/proc/self/task")
_OF_AUTOGRAD = "pt_autograd"
"""How the threads are called that backwards run on."""


class Cores:
    """The cores that this process may run on. Processes share the loop's time at full speed in a file."""

    def __init__(self, full_speed: Path, loop_us: Callable[[], float] | None = None) -> None:
        self._file = full_speed
        self._loop_us = loop_us or _loop_us
        self._allowed = sorted(os.sched_getaffinity(0))
        self.timings = 0
        self.disturbed = 0
        """Timings that were kept although the core was slow at their end."""
        # Once on each core, so that the file knows the shortest time. Else the first core to be asked would
        # pass, however slow.
        for core in self._allowed:
            _stay_on([core])
            self._is_at_full_speed()
        _stay_on(self._allowed)

    def undisturbed(self, measure: Callable[[], T]) -> T:
        """Return a measurement that ended on a core at full speed, or the last of `TRIES`."""
        self.timings += 1
        for _ in range(TRIES):
            self._seek()
            found = measure()
            if self._is_at_full_speed():
                return found
        self.disturbed += 1
        return found

    def note(self) -> str:
        """Return a remark on the disturbed timings; empty if there were none."""
        return f"the host was slow in {self.disturbed} of {self.timings} timings" if self.disturbed else ""

    def _seek(self) -> None:
        """Go to cores that run at full speed now, if there are any, and we are not on one."""
        if self._is_at_full_speed():
            return
        fast: list[int] = []
        for core in self._allowed:
            _stay_on([core])
            if self._is_at_full_speed():
                fast.append(core)
            if len(fast) == _WIDTH:
                break
        _stay_on(fast or self._allowed)

    def _is_at_full_speed(self) -> bool:
        # The shortest of three: an interrupt lengthens one of them, and a slow core all.
        took, best = min(self._loop_us() for _ in range(3)), self._best_us()
        if took < best:
            _write(self._file, took)
        return took <= SLOWER * best

    def _best_us(self) -> float:
        with contextlib.suppress(OSError, ValueError):
            return float(self._file.read_text())
        return float("inf")


def _loop_us() -> float:
    began, total = time.perf_counter(), 0
    for number in range(_TURNS):
        total += number * number
    return (time.perf_counter() - began) * 1e6


def _stay_on(cores: Iterable[int]) -> None:
    """Have the threads of this process that call the GPU run on some cores; threads to come do as who starts them."""
    # Linux keeps affinity for each thread: setting it for the caller would leave autograd's threads where
    # they are.
    wanted = set(cores)
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if _calls_the_gpu(task):
                os.sched_setaffinity(int(task.name), wanted)


def _calls_the_gpu(task: Path) -> bool:
    """Whether it is the main thread or one of autograd's; others share work of the CPU, for which two cores are few.

    Sixteen of them on two cores wait for each other: a step of 3 ms took 90, one of 1.5 up to 250.
    """
    return int(task.name) == os.getpid() or (task / "comm").read_text().startswith(_OF_AUTOGRAD)


def _write(file: Path, us: float) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    # A name for each process, and a rename: several may write at a time, and others read meanwhile.
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(repr(us))
    new.replace(file)
