"""Timing of real calls: a pair of CUDA events and a host timer around each, read later and never waited for.

The cost of a call is its span on the GPU if the queue was busy when it began (host time is then hidden behind earlier work)
and the larger of host time and span if the queue was idle. Nothing is run twice and nothing is synchronised.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pygraphd.schema.messages import Deployment, Measurement

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Sample:
    """One call: host time and GPU span in microseconds, and whether the GPU was at work when it began."""

    host_us: float
    span_us: float
    busy: bool

    @property
    def cost_us(self) -> float:
        """What the call cost the program (see the module's text)."""
        return self.span_us if self.busy else max(self.host_us, self.span_us)


@dataclass(slots=True)
class _Call:
    deployment: Deployment
    begin: torch.cuda.Event
    end: torch.cuda.Event
    busy: bool
    host_ns: int


class Profiler:
    """The samples of one region, on one device. All calls must come from one thread at a time."""

    def __init__(self, device_index: int) -> None:
        self._device = device_index
        self._pending: list[_Call] = []
        self._samples: dict[Deployment, list[Sample]] = {}

    def start(self, deployment: Deployment) -> _Call:
        """Begin timing a call on the device's current stream."""
        begin = torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        busy = not stream.query()
        begin.record(stream)
        end = torch.cuda.Event(enable_timing=True)
        return _Call(deployment, begin, end, busy, time.perf_counter_ns())

    def stop(self, call: _Call) -> None:
        """End timing a call; the sample is read by `collect` when the GPU has got there."""
        call.host_ns = time.perf_counter_ns() - call.host_ns
        call.end.record(torch.cuda.current_stream(self._device))
        self._pending.append(call)

    def collect(self) -> None:
        """Read the samples that are complete; the others stay for the next time."""
        while self._pending and self._pending[0].end.query():
            call = self._pending.pop(0)
            sample = Sample(call.host_ns / 1e3, call.begin.elapsed_time(call.end) * 1e3, call.busy)
            self._samples.setdefault(call.deployment, []).append(sample)

    def fewest(self, deployments: Iterable[Deployment]) -> int:
        """Return the number of samples of the deployment that has the fewest."""
        return min(len(self._samples.get(deployment, ())) for deployment in deployments)

    def measurements(self) -> tuple[Measurement, ...]:
        """Return one measurement for each deployment that has samples."""
        return tuple(summarize(deployment, samples) for deployment, samples in self._samples.items())


def summarize(deployment: Deployment, samples: Iterable[Sample]) -> Measurement:
    """Return medians and spread of at least one sample."""
    samples = tuple(samples)
    costs = [sample.cost_us for sample in samples]
    median = statistics.median(costs)
    return Measurement(
        deployment,
        len(samples),
        median_us=median,
        mad_us=statistics.median(abs(cost - median) for cost in costs),
        host_us=statistics.median(sample.host_us for sample in samples),
        span_us=statistics.median(sample.span_us for sample in samples),
        busy=statistics.fmean(sample.busy for sample in samples),
    )
