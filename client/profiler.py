"""Timing of real calls: a pair of CUDA events and a host timer around each, read later and never waited for.

What a call has cost, `client.timeline` says. Nothing is run twice and nothing is synchronised.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pygraphd.client.timeline import Entry, Run, Timeline
from pygraphd.schema.messages import Deployment, Measurement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class _Call:
    entry: Entry
    begin: torch.cuda.Event
    end: torch.cuda.Event
    stream: torch.cuda.Stream

    def read(self, run: Run) -> bool:
        """Complete its entry if the GPU has done it; whether it has."""
        if not self.end.query():
            return False
        entry, base = self.entry, run.base
        entry.span_us = self.begin.elapsed_time(self.end) * 1e3
        reached_us = 0.0 if entry is run.first or base is None else base.elapsed_time(self.begin) * 1e3
        entry.lead_us = reached_us - (entry.began_us - run.first.began_us)
        return True


class Profiler:
    """The samples of one region, on one device. All calls must come from one thread at a time."""

    def __init__(self, device_index: int, timeline: Timeline | None = None) -> None:
        """Time calls on a device; `timeline` is shared by all regions that are measured together."""
        self._device = device_index
        self._timeline = timeline if timeline is not None else Timeline()
        self._pending: deque[Entry] = deque()
        self._samples: dict[Deployment, list[Entry]] = {}

    def start(self, deployment: Deployment, *, fair: bool = True) -> _Call:
        """Begin timing a call on the device's current stream; one that is not `fair` is no sample."""
        begin = torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        idle = stream.query()
        begin.record(stream)
        end = torch.cuda.Event(enable_timing=True)
        entry = Entry(id(self), deployment, fair, idle, time.perf_counter_ns() / 1e3)
        return _Call(entry, begin, end, stream)

    def stop(self, call: _Call) -> None:
        """End timing a call; the sample is read by `collect` when the GPU has got there."""
        entry = call.entry
        entry.host_us = time.perf_counter_ns() / 1e3 - entry.began_us
        call.end.record(call.stream)
        # What was queued may be no more than the user's drawing of inputs: then the GPU has waited for this call, too.
        entry.idle = entry.idle or call.begin.query()
        self._timeline.add(call, (self._device, call.stream.cuda_stream))
        self._pending.append(entry)

    def collect(self) -> None:
        """Read the samples that are complete; the others stay for the next time."""
        self._timeline.collect()
        while self._pending and self._pending[0].lead_us is not None:
            entry = self._pending.popleft()
            if entry.fair:
                self._samples.setdefault(entry.deployment, []).append(entry)

    def fewest(self, deployments: Iterable[Deployment]) -> int:
        """Return the number of samples of the deployment that has the fewest."""
        return min(len(self._samples.get(deployment, ())) for deployment in deployments)

    def measurements(self) -> tuple[Measurement, ...]:
        """Return one measurement for each deployment that has samples."""
        self._timeline.expose()
        return tuple(summarize(deployment, entries) for deployment, entries in self._samples.items())

    def conceivable_us(self, deployment: Deployment) -> tuple[float, ...]:
        """Return what a call would cost with its host time hidden, with it counted, and with time on the GPU hidden behind it."""
        self._timeline.expose()
        entries = self._samples[deployment]
        span_us = statistics.median(each.span_us for each in entries)
        host_us = statistics.median(each.host_us for each in entries)
        return span_us, max(host_us, span_us), max(host_us, span_us - entries[-1].after_us)


def summarize(deployment: Deployment, samples: Sequence[Entry]) -> Measurement:
    """Return medians and spread of at least one sample."""
    costs = [sample.cost_us for sample in samples]
    median = statistics.median(costs)
    return Measurement(
        deployment,
        len(samples),
        median_us=median,
        mad_us=statistics.median(abs(cost - median) for cost in costs),
        host_us=statistics.median(sample.host_us for sample in samples),
        span_us=statistics.median(sample.span_us for sample in samples),
        busy=statistics.fmean(not sample.exposed for sample in samples),
    )
