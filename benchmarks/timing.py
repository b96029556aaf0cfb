"""Timing of steps by the host's clock, each on inputs that it has not seen; drawing them is outside the timed part."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from benchmarks.conditions import Conditions
from benchmarks.step import Step
from benchmarks.workloads.case import Inputs

_MS = 1e3
_BLOCK = 10
"""Steps that are taken again together, if the conditions ask for it."""


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times one step at a time, or windows of steps, on one device."""

    device: torch.device
    step: Step
    draw: Callable[[], Inputs]
    conditions: Conditions = field(default_factory=Conditions)

    def first_step_s(self) -> float:
        """Run a step and return its seconds, from the call until the device is done."""
        whole_ms, _ = self._timed_step()
        return whole_ms / _MS

    def run(self, count: int) -> None:
        """Run steps without timing them."""
        for _ in range(count):
            self.step(self.draw())

    def steps_ms(self, count: int) -> tuple[list[float], list[float]]:
        """Return for each of `count` steps its whole time and the host's share, until all of it was issued."""
        # In blocks, so that a disturbed moment has a few steps taken again, and not all of them.
        sizes = [min(_BLOCK, count - start) for start in range(0, count, _BLOCK)]
        blocks = [self.conditions.timed(functools.partial(self._steps, size)) for size in sizes]
        times = [each for block in blocks for each in block]
        return [whole for whole, _ in times], [host for _, host in times]

    def _steps(self, count: int) -> list[tuple[float, float]]:
        return [self._timed_step() for _ in range(count)]

    def _timed_step(self) -> tuple[float, float]:
        # Drawn, and waited for, before the clock starts: the GPU would begin the step with the drawing.
        inputs = self.draw()
        self.synchronize()
        start = time.perf_counter()
        result = self.step(inputs)
        issued = time.perf_counter()
        self.synchronize()
        done = time.perf_counter()
        del result  # only now: freeing the output is not part of this step
        return (done - start) * _MS, (issued - start) * _MS

    def windows_ms(self, windows: int, steps: int) -> list[float]:
        """Return for each window the time of a step, when `steps` of them are run without waiting in between."""
        return [self.conditions.timed(lambda: self._window_ms(steps)) for _ in range(windows)]

    def _window_ms(self, steps: int) -> float:
        # All before the clock starts: drawing between steps would be timed with them.
        batches = [self.draw() for _ in range(steps)]
        self.synchronize()
        start = time.perf_counter()
        for inputs in batches:
            self.step(inputs)
        self.synchronize()
        return (time.perf_counter() - start) * _MS / steps

    def synchronize(self) -> None:
        """Wait until the device has done everything; nothing to wait for on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
