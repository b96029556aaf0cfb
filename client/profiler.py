"""Timing of real calls: a pair of CUDA events and a host timer around each, read later and never waited for.

What a call has cost, `client.timeline` says. Nothing is run twice and nothing is synchronised.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pygraphd.client.timeline import Entry, Run, Timeline
from pygraphd.schema.messages import Deployment, Measurement

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_numbers = itertools.count(1)
"""No two profilers have one number: what was timed outlives them."""


@dataclass(frozen=True, slots=True)
class _Call:
    entry: Entry
    begin: torch.cuda.Event
    end: torch.cuda.Event
    stream: torch.cuda.Stream

    def is_done(self) -> bool:
        """Whether the GPU has done it."""
        return bool(self.end.query())

    def read(self, run: Run) -> None:
        """Complete its entry, when the GPU has done it."""
        entry, base = self.entry, run.base
        entry.span_us = self.begin.elapsed_time(self.end) * 1e3
        reached_us = 0.0 if entry is run.first or base is None else base.elapsed_time(self.begin) * 1e3
        entry.lead_us = reached_us - (entry.began_us - run.first.began_us)


class Profiler:
    """The samples of one region, on one device. All calls must come from one thread at a time."""

    def __init__(self, device_index: int, timeline: Timeline | None = None) -> None:
        """Time calls on a device; `timeline` is shared by all regions that are measured together."""
        self._device = device_index
        self._number = next(_numbers)
        self._timeline = timeline if timeline is not None else Timeline()
        self._pending: list[Entry] = []
        self._samples: dict[Deployment, list[Entry]] = {}

    def start(self, deployment: Deployment, *, fair: bool = True) -> _Call:
        """Begin timing a call on the device's current stream; one that is not `fair` is no sample."""
        begin = torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        idle = stream.query()
        apart = self._timeline.is_done((self._device, stream.cuda_stream))
        begin.record(stream)
        end = torch.cuda.Event(enable_timing=True)
        entry = Entry(self._number, deployment, fair, idle, time.perf_counter_ns() / 1e3, apart=apart)
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
        for entry in self._pending:
            if entry.lead_us is not None and entry.fair:
                self._samples.setdefault(entry.deployment, []).append(entry)
        self._pending = [entry for entry in self._pending if entry.lead_us is None]

    def fewest(self, deployments: Iterable[Deployment]) -> int:
        """Return the number of samples of the deployment that has the fewest."""
        return min(len(self._samples.get(deployment, ())) for deployment in deployments)

    def measurements(self) -> tuple[Measurement, ...]:
        """Return one measurement for each deployment that has samples."""
        self._timeline.expose([entry for entries in self._samples.values() for entry in entries])
        return tuple(summarize(deployment, entries) for deployment, entries in self._samples.items())


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
        busy=statistics.fmean(sample.exposed is False for sample in samples),
    )
