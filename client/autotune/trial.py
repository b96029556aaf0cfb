"""Times the real calls of one partition, which alternate between GRAPH and KERNELS, until the policy can decide.

Each partition is tried by itself. What others do meanwhile does not matter: outputs of a GRAPH are ordinary tensors.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.autotune.sampler import Sampler
from pygraphd.client.autotune.trial_schedule import Schedule
from pygraphd.client.decisions import rules
from pygraphd.schema.policy import decide

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.autotune.candidates import Candidates
    from pygraphd.schema.messages import Deployment, Measurement

MAX_WAIT = 512
"""Calls for which a trial waits, after its last sample, until the GPU has reached it: a launch queue holds about a thousand kernels."""


class Trial:
    """Times one partition's calls, which must not overlap.

    `guarded` calls what may fail without harm, and returns None if it does. `only`: all calls run in one deployment.
    """

    def __init__(
        self,
        candidates: Candidates,
        guarded: Callable[[Callable[[], Any]], Any],
        only: Deployment | None = None,
    ) -> None:
        self._candidates = candidates
        self._guarded = guarded
        self._schedule = Schedule(only)
        self._sampler = Sampler(candidates.device_index)
        self._waited = 0
        self._calls = 0
        self._ms = 0.0

    def is_over(self) -> bool:
        """Return whether the policy can decide; to be asked once before each call. Noisy samples are taken again, `MAX_CYCLES` times."""
        if not self.is_measured():
            return False
        is_noisy = rules.is_noisy(decide(self.measurements()))
        return not (is_noisy and self._waited <= MAX_WAIT and self._schedule.begin_again())

    def is_measured(self) -> bool:
        """Return whether all samples are known, or `MAX_WAIT` calls have passed; to be asked once before each call."""
        if not self._schedule.is_done:
            return False
        self._waited += 1
        return self._waited > MAX_WAIT or self._sampler.is_complete()

    def is_in_a_capture(self) -> bool:
        """Return whether the user captures a CUDA graph on the current stream: then nothing may be timed."""
        with torch.cuda.device(self._candidates.device_index):
            return bool(torch.cuda.is_current_stream_capturing())

    def call(self, inputs: list[Any]) -> Any:
        """Run the next call as the schedule has it, and time it."""
        deployment = self._schedule.deployment
        run, prepared = self._candidates.runnable(deployment), self._candidates.relocate.prepared
        began_ns = time.perf_counter_ns()
        sample = self._guarded(lambda: self._sampler.start(deployment))
        result = run(inputs)
        counts = self._schedule.take(steady=self._candidates.relocate.prepared == prepared)
        if sample is not None:
            self._guarded(lambda: self._sampler.stop(sample, counts=counts))
        self._calls += 1
        self._ms += (time.perf_counter_ns() - began_ns) / 1e6
        return result

    def measurements(self) -> tuple[Measurement, ...]:
        """Return the measurements of the samples that are known so far."""
        return self._sampler.measurements()

    def price_ms(self, deployment: Deployment) -> float:
        """Return the extra host time of the trial: that of its calls less their time in `deployment`, in ms."""
        host_us = [each.host_us for each in self.measurements() if each.deployment is deployment]
        return max(0.0, self._ms - self._calls * sum(host_us) / 1e3)


def sizes_of(inputs: list[Any]) -> tuple[int, ...]:
    """Return the integer inputs of a call, which are its dynamic sizes."""
    return tuple([value for value in inputs if type(value) is int])
