"""Times the real calls of one partition, which alternate between GRAPH and KERNELS, until the policy can decide.

Each partition is tried by itself. Other partitions may run either way meanwhile: outputs of a GRAPH are ordinary tensors.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.autotune.sampler import Sampler
from pygraphd.client.decisions import rules
from pygraphd.schema import policy
from pygraphd.schema.messages import Deployment, Measurement
from pygraphd.schema.policy import decide

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.autotune.candidates import Candidates

SAMPLES = policy.MIN_SAMPLES
"""Samples of each deployment in a cycle."""
HALF = SAMPLES // 2
RECORDING_CALLS = 4
"""Calls as GRAPH before the first sample: the size comes back, is recorded and replayed, and memory settles."""
MAX_UNSTEADY = 16
"""The number of calls excluded from the samples because they did one-time work, such as making an executable. Later ones are samples."""
MAX_CYCLES = 3
"""The largest number of cycles in a trial. After the last one, noisy samples are used as they are."""
MAX_WAIT = 512
"""Calls for which a trial waits, after its last sample, until the GPU has reached it: a launch queue holds about a thousand kernels."""

Calls = list[tuple[Deployment, bool]]
"""The deployment of each call, and whether the call is a sample."""


class Schedule:
    """The order of one trial's calls. With `only`, all calls run in that deployment, as in a validation.

    Costs drift while they are measured: clocks rise, caches fill, queues grow. Half of GRAPH's samples come before those of KERNELS and
    half after, so that a steady drift adds the same to both.
    """

    def __init__(self, only: Deployment | None = None) -> None:
        self._only = only
        self._ahead = deque(self._cycle(RECORDING_CALLS))
        self._cycles = 1
        self._unsteady = 0

    @property
    def is_done(self) -> bool:
        """Whether all samples have been taken."""
        return not self._ahead

    @property
    def deployment(self) -> Deployment:
        """The deployment of the next call. When all samples have been taken, it is KERNELS, or `only`."""
        return self._ahead[0][0] if self._ahead else self._only or Deployment.KERNELS

    def take(self, *, steady: bool = True) -> bool:
        """Note that a call has run in `deployment`; return whether it is a sample.

        A call that is not `steady` did one-time work, such as making an executable.
        """
        if not self._ahead:
            return False
        counts = self._ahead[0][1]
        # Bounded, or a graph that makes an executable at each call would never be decided.
        if counts and not steady and self._unsteady < MAX_UNSTEADY:
            self._unsteady += 1
            return False
        self._ahead.popleft()
        return counts

    def begin_again(self) -> bool:
        """Begin another cycle, because the samples are noisy; return False after `MAX_CYCLES` cycles."""
        if self._cycles >= MAX_CYCLES:
            return False
        self._cycles += 1
        self._ahead.extend(self._cycle(1))
        return True

    def _cycle(self, rest: int) -> Calls:
        """Return the calls of one cycle. Its first `rest` calls, and the first after each change of deployment, are no samples."""
        if self._only is not None:
            return _block(self._only, rest, SAMPLES)
        graph, kernels = Deployment.GRAPH, Deployment.KERNELS
        return [*_block(graph, rest, HALF), *_block(kernels, 1, SAMPLES), *_block(graph, 1, HALF)]


def _block(deployment: Deployment, rest: int, counted: int) -> Calls:
    return [(deployment, False)] * rest + [(deployment, True)] * counted


class Trial:
    """Times one partition's calls, which must not overlap.

    `guarded` calls a function that may fail without harm, and returns None if it does. `only`: all calls run in one deployment.
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
        self._before = self._schedule.deployment
        """The deployment of the call before. Where it changes, the allocator's cache holds memory in sizes that fit the other one, and BLAS
        libraries hold workspaces that a GRAPH does not use."""
        self._waited = 0
        self._calls = 0
        self._ms = 0.0

    def is_over(self) -> bool:
        """Return whether the policy can decide; to be asked once before each call. Noisy samples are taken again, in `MAX_CYCLES` cycles at most."""
        if not self.is_measured():
            return False
        is_noisy = rules.is_noisy(decide(self.measurements()))
        # No further cycle where the GPU has not even reached the samples of this one.
        return not (is_noisy and self._waited <= MAX_WAIT and self._schedule.begin_again())

    def is_measured(self) -> bool:
        """Return whether all samples are known, or `MAX_WAIT` calls have passed; to be asked once before each call."""
        if not self._schedule.is_done:
            return False
        self._waited += 1
        return self._waited > MAX_WAIT or self._sampler.is_complete()

    def is_in_a_capture(self) -> bool:
        """Return whether the user captures a CUDA graph on the current stream: then nothing may be timed."""
        # The question is about the current device, which may be another one.
        with torch.cuda.device(self._candidates.device_index):
            return bool(torch.cuda.is_current_stream_capturing())

    def call(self, inputs: list[Any]) -> Any:
        """Run the next call as the schedule has it, and time it."""
        deployment = self._schedule.deployment
        recordings, run = self._candidates.recordings, self._candidates.runnable(deployment)
        work_before = recordings.one_time_work
        began_ns = time.perf_counter_ns()
        sample = self._guarded(lambda: self._sampler.start(deployment))
        if deployment is not self._before:
            # Within a call that is no sample: the first one after a change never is.
            self._before = deployment
            empty_cache = recordings.empty_cache
            self._guarded(lambda: empty_cache(workspaces=deployment is Deployment.GRAPH))
        result = run(inputs)
        # Not reached if the call raises: the schedule repeats it then.
        counts = self._schedule.take(steady=recordings.one_time_work == work_before)
        if sample is not None:
            self._guarded(lambda: self._sampler.stop(sample, counts=counts))
        self._calls += 1
        self._ms += (time.perf_counter_ns() - began_ns) / 1e6
        return result

    def interrupt(self) -> None:
        """Note a call of the graph that is not one of the trial's: the interval of the latest sample spans it, and is left out."""
        self._sampler.interrupt()

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
