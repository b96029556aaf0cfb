"""Timing of real calls: a pair of CUDA events and a host timer around each, read later and never waited for.

What a call has cost, `client.timeline` says. Nothing is run twice and nothing is synchronised.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pygraphd.client.timeline import Entry, Run, Timeline
from pygraphd.schema.messages import Deployment, Measurement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


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

    def stop(self, call: _Call, *, steady: bool = True) -> None:
        """End timing a call; the sample is read by `collect` when the GPU has got there.

        One that is not `steady` did what later calls need not do, as making an executable.
        """
        entry = call.entry
        entry.steady = steady
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
        entries = [entry for samples in self._samples.values() for entry in samples]
        self._timeline.expose(entries)
        # Whose host time counts depends on where in the program a call comes, and not on what was tried there by chance.
        hidden = statistics.fmean(entry.exposed is False for entry in entries) if entries else 0.0
        return tuple(summarize(deployment, samples, hidden) for deployment, samples in self._samples.items())


def summarize(deployment: Deployment, samples: Sequence[Entry], hidden: float) -> Measurement:
    """Return what at least one sample comes to; `hidden` is the share of the region's calls whose host time does not count."""
    steady = [sample for sample in samples if sample.steady]
    # Of a few samples more than half that are not say that it is never steady.
    counted = steady if 2 * len(steady) >= len(samples) else samples
    cost_us, error_us = _mean(_parts(counted, hidden))
    return Measurement(
        deployment,
        len(samples),
        median_us=cost_us,
        # As if all samples were of one kind: whoever divides it by their root has the error.
        mad_us=error_us * math.sqrt(len(samples)),
        host_us=statistics.median(sample.host_us for sample in counted),
        span_us=statistics.median(sample.span_us for sample in counted),
        busy=statistics.fmean(sample.exposed is False for sample in samples),
    )


def _parts(samples: Sequence[Entry], hidden: float) -> Iterator[tuple[float, list[float]]]:
    """Yield the costs of calls whose host time counts, and of those whose does not, with their shares."""
    spans = [sample.span_us for sample in samples if sample.exposed is False]
    others = [sample.cost_us for sample in samples if sample.exposed is not False]
    if hidden < 1:
        # A call behind others takes the host as long as one that is not.
        yield 1 - hidden, others or [sample.shown_us for sample in samples]
    if hidden > 0:
        # Of a call that the GPU has waited for, the span says how long that was; the shortest wait is nearest to none.
        yield hidden, spans or [min(sample.span_us for sample in samples)]


def _mean(parts: Iterable[tuple[float, list[float]]]) -> tuple[float, float]:
    """Return the mean of the medians, weighted by the shares, and its error, in median absolute deviations: few costs of a kind make it large."""
    cost = variance = 0.0
    for share, costs in parts:
        median = statistics.median(costs)
        cost += share * median
        variance += (share * statistics.median(abs(each - median) for each in costs)) ** 2 / len(costs)
    return cost, math.sqrt(variance)
