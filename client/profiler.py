"""Timing of real calls: a pair of CUDA events and a host timer around each, read later and never waited for.

What a call has cost, `client.timeline` says. Nothing is run twice and nothing is synchronised.
"""

from __future__ import annotations

import dataclasses
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
    from collections.abc import Iterable, Iterator, Mapping, Sequence


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

    def start(self, deployment: Deployment, *, fair: bool = True, part: int = 0) -> _Call:
        """Begin timing a call on the device's current stream; one that is not `fair` is no sample.

        What it has cost is held against launches of the same `part` of measuring.
        """
        begin = torch.cuda.Event(enable_timing=True)
        stream = torch.cuda.current_stream(self._device)
        idle = stream.query()
        apart = self._timeline.is_done((self._device, stream.cuda_stream))
        begin.record(stream)
        end = torch.cuda.Event(enable_timing=True)
        began_us = time.perf_counter_ns() / 1e3
        entry = Entry(self._number, deployment, fair, idle, began_us, apart=apart, part=part)
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

    def begin_again(self) -> None:
        """Take no notice of samples so far: what they would be held against is yet to come."""
        self._pending.clear()
        self._samples.clear()

    def collect(self) -> None:
        """Read the samples that are complete; the others stay for the next time."""
        self._timeline.collect()
        for entry in self._pending:
            if entry.lead_us is not None and entry.fair:
                self._samples.setdefault(entry.deployment, []).append(entry)
        self._pending = [entry for entry in self._pending if entry.lead_us is None]

    def fewest(self, deployments: Iterable[Deployment]) -> int:
        """Return the number of samples of the deployment that has the fewest."""
        return min(self._count(deployment) for deployment in deployments)

    def _count(self, deployment: Deployment) -> int:
        """Return the number of its samples, or of those that it is held against, if they are fewer."""
        part = min((each.part for each in self._samples.get(deployment, ())), default=0)
        both = (deployment, Deployment.KERNELS) if part else (deployment,)
        return min(sum(each.part == part for each in self._samples.get(one, ())) for one in both)

    def measurements(self) -> tuple[Measurement, ...]:
        """Return one measurement for each deployment that has samples, all as of the time when the first part was measured."""
        entries = [entry for samples in self._samples.values() for entry in samples]
        self._timeline.expose(entries)
        # Whose host time counts depends on where in the program a call comes, and not on what was tried there by chance.
        hidden = statistics.fmean(entry.exposed is False for entry in entries) if entries else 0.0
        parts: dict[int, dict[Deployment, Measurement]] = {}
        for part, deployment in sorted({(entry.part, entry.deployment) for entry in entries}):
            mine = [entry for entry in self._samples[deployment] if entry.part == part]
            parts.setdefault(part, {})[deployment] = summarize(deployment, mine, hidden)
        return tuple(_at_one_time(list(parts.values())).values())


def _at_one_time(parts: Sequence[Mapping[Deployment, Measurement]]) -> dict[Deployment, Measurement]:
    """Return what each deployment has cost in the first part that it was tried in, as if launches had cost there what they did at first."""
    found = dict(parts[0]) if parts else {}
    for part in parts[1:]:
        then, now = part.get(Deployment.KERNELS), found.get(Deployment.KERNELS)
        if then is not None and now is not None:
            found |= {
                each.deployment: as_of(now, each, then)
                for each in part.values()
                if each.deployment not in found
            }
    return found


def as_of(now: Measurement, measured: Measurement, then: Measurement) -> Measurement:
    """Return what was `measured` when a launch cost what `then` says, at a time when it costs what `now` says.

    Its relation to a launch is what stays. The noise of `then` becomes its own.
    """
    samples = min(measured.samples, then.samples)
    share = _ratio(measured.median_us, then.median_us)
    variance = measured.mad_us**2 / measured.samples + (share * then.mad_us) ** 2 / then.samples
    scale = _ratio(now.median_us, then.median_us)
    return dataclasses.replace(
        measured,
        samples=samples,
        median_us=scale * measured.median_us,
        mad_us=scale * math.sqrt(variance * samples),
        host_us=_ratio(now.host_us, then.host_us) * measured.host_us,
        span_us=_ratio(now.span_us, then.span_us) * measured.span_us,
    )


def _ratio(one: float, other: float) -> float:
    return one / other if other > 0 else 1.0


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
