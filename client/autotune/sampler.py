"""Times real calls with CUDA events and the host's clock, which are read later and never waited for.

Three times are taken of each call: host time from call to return, the span on the GPU, and the interval to the next call. The interval is
the longer of those by the host's and by the GPU's clock. So it shows the program's speed, whichever of the two bounds it: a GPU without
work shows on the host's clock, a growing queue on the GPU's. Nothing is run twice and nothing is synchronised.

Other calls of the graph may come between two timed ones, as those at other sizes. The interval then shows what these took, and is left out.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from pygraphd.schema import policy
from pygraphd.schema.messages import Deployment, Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class Sample:
    """One timed call; times in microseconds, `began_us` and `next_began_us` on the host's clock."""

    deployment: Deployment
    stream: torch.cuda.Stream
    begin: torch.cuda.Event
    end: torch.cuda.Event
    found_busy: bool
    """Whether the GPU had earlier work both when the call began and when it returned."""
    began_us: float
    interruption: object
    """The latest interruption when the call began."""
    is_interrupted: bool = False
    """Whether other calls came before the next timed one."""
    host_us: float = 0.0
    next_began_us: float = 0.0
    next_begin: torch.cuda.Event | None = None
    """Event at the start of the next call on the GPU; None until there is a next call."""

    def is_known(self) -> bool:
        """Return whether the GPU has finished this call and has reached the next one."""
        return self.next_begin is not None and bool(self.next_begin.query() and self.end.query())

    def span_us(self) -> float:
        """Return the span of the call on the GPU, in microseconds."""
        return float(self.begin.elapsed_time(self.end)) * 1e3

    def interval_us(self) -> float | None:
        """Return the time from the start of the call to that of the next, on the host or on the GPU, whichever is longer, in microseconds.

        None: other calls came between.
        """
        if self.is_interrupted:
            return None
        assert self.next_begin is not None
        on_the_gpu_us = float(self.begin.elapsed_time(self.next_begin)) * 1e3
        return max(self.next_began_us - self.began_us, on_the_gpu_us)


class Sampler:
    """The samples of one partition, on one device. Calls must not overlap; they may come from any thread, on any stream."""

    def __init__(self, device_index: int) -> None:
        self._device = device_index
        self._latest: Sample | None = None
        self._samples: list[Sample] = []
        self._interruption = object()
        """A new object at each interruption: no lock is needed, although other threads interrupt, also while a call is timed."""

    def interrupt(self) -> None:
        """Note a call that is not timed: the interval of the timed call before it, or meanwhile, is left out."""
        self._interruption = object()

    def start(self, deployment: Deployment) -> Sample:
        """Begin timing a call on the device's current stream, which ends the interval of the previous call."""
        stream = torch.cuda.current_stream(self._device)
        # Never in a capture, which a query of its stream would end: callers ask `Trial.is_in_a_capture`.
        busy = not stream.query()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        # Read last here and first in `stop`, so that host time is free of the events.
        began_us = time.perf_counter_ns() / 1e3
        latest, self._latest = self._latest, None
        if latest is not None:
            latest.next_began_us, latest.next_begin = began_us, begin
            latest.is_interrupted = latest.interruption is not self._interruption
        return Sample(deployment, stream, begin, end, busy, began_us, self._interruption)

    def stop(self, sample: Sample, *, counts: bool = True) -> None:
        """End timing a call; it is kept if it `counts`."""
        sample.host_us = time.perf_counter_ns() / 1e3 - sample.began_us
        sample.end.record(sample.stream)
        # The queue may have held only the user's drawing of inputs: then the GPU has waited for this call.
        sample.found_busy = sample.found_busy and not sample.begin.query()
        if counts:
            self._samples.append(sample)
            self._latest = sample

    def is_complete(self) -> bool:
        """Return whether all samples are known. Queries the newest first, which is known last."""
        return all(sample.is_known() for sample in reversed(self._samples))

    def measurements(self) -> tuple[Measurement, ...]:
        """Return one measurement for each deployment that has known samples."""
        known = [sample for sample in self._samples if sample.is_known()]
        by_deployment = {one: [each for each in known if each.deployment is one] for one in Deployment}
        found = [
            (samples, [interval_us for each in samples if (interval_us := each.interval_us()) is not None])
            for samples in by_deployment.values()
            if samples
        ]
        # A median says something of half as many intervals as there are samples, or as the policy asks for. All or none, since it compares them.
        if all(2 * len(intervals) >= min(len(samples), policy.MIN_SAMPLES) for samples, intervals in found):
            return tuple(summarize(samples, intervals_us) for samples, intervals_us in found)
        return tuple(_without_intervals(samples) for samples, _ in found)


def _without_intervals(samples: Sequence[Sample]) -> Measurement:
    """Return the measurement of samples with too few intervals: for them stands their lower bound, the longer one of host time and span.

    The spread says that no more is known. So where the policy needs the interval, it finds KERNELS, provisionally: the trial takes further
    samples, and another program measures again.
    """
    measured = summarize(samples, [max(sample.host_us, sample.span_us()) for sample in samples])
    return replace(measured, mad_us=measured.median_us)


def summarize(samples: Sequence[Sample], intervals_us: Sequence[float]) -> Measurement:
    """Return the measurement of known samples of one deployment, with the intervals that some of them have."""
    interval_us, interval_mad_us = _median(intervals_us)
    # The policy takes it for that of as many intervals as samples: fewer tell less.
    interval_mad_us *= math.sqrt(len(samples) / len(intervals_us))
    host_us, host_mad_us = _median([sample.host_us for sample in samples])
    span_us, span_mad_us = _median([sample.span_us() for sample in samples])
    busy = statistics.fmean(sample.found_busy for sample in samples)
    deployment, count = samples[0].deployment, len(samples)
    return Measurement(
        deployment, count, interval_us, interval_mad_us, host_us, span_us, busy, host_mad_us, span_mad_us
    )


def _median(values: Sequence[float]) -> tuple[float, float]:
    """Return the median of some values and the median absolute deviation from it."""
    median = statistics.median(values)
    return median, statistics.median(abs(value - median) for value in values)
