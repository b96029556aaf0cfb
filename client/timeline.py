"""When the calls of measured graphs came, and when the GPU got to them: whose host time was hidden behind earlier work.

That a call finds the GPU at work does not mean that its host time costs nothing: the GPU may run out of work some calls later for
it. And while deployments alternate, those that are quick on the host keep the GPU busy for those that are not. So the calls of all
regions are laid out as they came, and it is asked whether the GPU would have run dry if all of them had been launched; if so, the
host time of all calls before that counts, and time on the GPU only as far as it is longer than what the host does meanwhile
(`client.slack`). What a synchronisation of the user's does to the queue is no reason to count them.
"""

from __future__ import annotations

import itertools
import statistics
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pygraphd.client.slack import add_slack
from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

MAX_KEPT = 16_384
"""Calls; of a model with a hundred regions, a few thousand are timed."""
MAX_ENTRIES = 1_024
"""Calls of one run: more are more of the same."""
UNCHANGED = 32
"""One part of so many of all calls may have changed before it is worth while to find out anew whose host time counts,"""
FEW = 8
"""and one of so many of those that are asked for may be new: their host time is taken to count."""
MAX_RUN_US = 10e6
"""The difference of two events is a float32 in milliseconds, which is a microsecond's precision for so long."""
DRYING = 0.05
"""Share of the time by which the queue of a GPU that is never seen idle must shrink, for it to run dry in the end."""


class Event(Protocol):
    """A `torch.cuda.Event` with a time."""

    def elapsed_time(self, end: Any, /) -> float:
        """Return the milliseconds from here to `end`, another one of its kind."""


@dataclass(slots=True, eq=False)
class Entry:
    """One call of a region; times in microseconds, `began_us` on the host's clock.

    `idle`: the GPU had done all that came before when it came, or when it had returned. `lead_us` is how much work the GPU
    had before it when it came, more than when the run began.
    """

    region: int
    deployment: Deployment
    fair: bool
    idle: bool
    began_us: float
    host_us: float = 0.0
    span_us: float = 0.0
    apart: bool = False
    """Whether the GPU had done the measured call before it when it came: the host may have waited for that."""
    lead_us: float | None = None
    """None until the GPU has got to it."""
    exposed: bool | None = None
    """Whether its host time counts; None until that was found out."""
    after_us: float = 0.0
    """What the host does after it at least, while the GPU is at work on it."""
    steady: bool = True
    """Whether it did only what later calls do."""
    part: int = 0
    """The part of measuring that it belongs to (`client.turns`)."""

    @property
    def cost_us(self) -> float:
        """What the call cost the program."""
        return self.span_us if self.exposed is False else self.shown_us

    @property
    def shown_us(self) -> float:
        """What it costs if its host time counts."""
        return max(self.host_us, self.span_us - self.after_us)

    def pause_us(self, following: Entry) -> float:
        """Return the time from its end to the next call."""
        return max(0.0, following.began_us - self.began_us - self.host_us)


@dataclass(slots=True, eq=False)
class Run:
    """Calls on one stream, of which all but the first found the GPU at work on what was before them."""

    first: Entry
    base: Event | None
    """Where the GPU's time is counted from; None when all are complete."""
    entries: list[Entry] = field(default_factory=list)
    following: Run | None = None
    """The next one on its stream."""

    def takes(self, entry: Entry) -> bool:
        """Whether a call goes on with it."""
        young = entry.began_us - self.first.began_us < MAX_RUN_US
        return not (entry.idle or entry.apart) and young and len(self.entries) < MAX_ENTRIES

    def let_go(self) -> None:
        """Give the event back if no call needs it any more; there will be no others."""
        if self.entries[-1].lead_us is not None:
            self.base = None

    def expose(self, launched_us: Mapping[int, float], pause_us: Mapping[int, float]) -> None:
        """Say of each call whether its host time counts.

        `launched_us` is what a launch of each region takes on the host, `pause_us` what the host does at least after its calls.
        """
        leads = list(self._leads(launched_us, pause_us))
        if self.first.idle:
            starved = max((number for number, lead in enumerate(leads) if lead <= 0), default=0)
        else:
            starved = len(self.entries) - 1 if self._dries(leads) else -1
        for number, entry in enumerate(self.entries):
            entry.exposed = number <= starved
            entry.after_us = pause_us.get(entry.region, 0.0)

    def pairs(self) -> Iterable[tuple[Entry, Entry | None]]:
        """Yield each call with the next one on its stream."""
        yield from itertools.pairwise(self.entries)
        yield self.entries[-1], self.following.entries[0] if self.following is not None else None

    def pauses(self) -> Iterable[tuple[int, float]]:
        """Yield the time between two calls, with the region of the first.

        The second found the GPU still at the first, so that the host has not waited for it; for what was before, it may have.
        """
        for entry, following in itertools.pairwise(self.entries):
            yield entry.region, entry.pause_us(following)

    def _leads(self, launched_us: Mapping[int, float], pause_us: Mapping[int, float]) -> Iterable[float]:
        """Yield how far the GPU would have been behind at each call, if all calls had been launched."""
        later = 0.0
        for number, entry in enumerate(self.entries):
            if entry.lead_us is None:
                return
            if number:
                before = self.entries[number - 1]
                # The host may have waited, for a step in flight or for data, and come later would wait the less.
                waited = before.pause_us(entry) - pause_us.get(before.region, 0.0)
                later = max(0.0, later - waited)
            yield entry.lead_us - later
            if entry.deployment is not Deployment.KERNELS:
                later += max(0.0, launched_us.get(entry.region, 0.0) - entry.host_us)

    def _dries(self, leads: list[float]) -> bool:
        passed = self.entries[len(leads) - 1].began_us - self.first.began_us if leads else 0.0
        return bool(leads) and leads[-1] < -DRYING * passed


class Timed(Protocol):
    """A call that has returned and that the GPU may still be busy with."""

    @property
    def entry(self) -> Entry:
        """What is known of it."""

    @property
    def begin(self) -> Event:
        """What the GPU came to before it."""

    def is_done(self) -> bool:
        """Whether the GPU has done it."""

    def read(self, run: Run) -> None:
        """Complete its entry, when the GPU has done it."""


Stream = tuple[int, int]
"""A device, and the handle of a stream there."""


class Timeline:
    """The latest calls of all regions that are measured together, whichever threads they come from. `Profiler` writes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: deque[Run] = deque()
        self._kept = 0
        self._latest: dict[Stream, Run] = {}
        self._pending: dict[Stream, deque[tuple[Timed, Run]]] = {}
        self._changes = 0
        self._exposed_at = 0

    @property
    def kept(self) -> int:
        """How many calls are remembered."""
        return self._kept

    def is_done(self, stream: Stream) -> bool:
        """Whether the GPU has done all measured calls on a stream."""
        with self._lock:
            calls = self._pending.get(stream)
            return not calls or calls[-1][0].is_done()

    def add(self, call: Timed, stream: Stream) -> Run:
        """Note a call; return the run that it belongs to."""
        with self._lock:
            run = self._latest.get(stream)
            if run is None or not run.takes(call.entry):
                before, run = run, Run(call.entry, call.begin)
                if before is not None:
                    before.let_go()
                    before.following = run
                self._latest[stream] = run
                self._runs.append(run)
            run.entries.append(call.entry)
            self._pending.setdefault(stream, deque()).append((call, run))
            self._kept += 1
            self._changes += 1
            while self._kept > MAX_KEPT and len(self._runs) > 1:
                self._forget(self._runs.popleft())
            return run

    def _forget(self, run: Run) -> None:
        self._kept -= len(run.entries)
        for entry in run.entries:
            if entry.exposed is None:
                # It will not be found out any more: no reason for each region that asks to have all others looked at.
                entry.exposed = True
        for stream, latest in list(self._latest.items()):
            if latest is run:
                # Of a stream that was not used for long; its next call begins another one.
                del self._latest[stream]

    def collect(self) -> None:
        """Complete what the GPU has done."""
        with self._lock:
            for stream, calls in self._pending.items():
                while calls and calls[0][0].is_done():
                    # First, so that one that cannot be read is not in the way of all others.
                    call, run = calls.popleft()
                    self._changes += 1
                    call.read(run)
                    if run is not self._latest.get(stream):
                        run.let_go()

    def expose(self, asked: Sequence[Entry]) -> None:
        """Say of each call whether its host time counts, and what comes after it; of those that are `asked` for at least."""
        with self._lock:
            # All regions of a step ask in turn, and between two of them little changes.
            new = sum(entry.exposed is None for entry in asked)
            changed = self._changes - self._exposed_at
            if new <= len(asked) // FEW and changed <= self._kept // UNCHANGED:
                return
            self._exposed_at = self._changes
            launched_us = _by_region(self._launches(), statistics.median)
            pause_us = _by_region((pair for run in self._runs for pair in run.pauses()), min)
            for run in self._runs:
                run.expose(launched_us, pause_us)
            add_slack([pair for run in self._runs for pair in run.pairs()])

    def _launches(self) -> Iterable[tuple[int, float]]:
        for run in self._runs:
            for entry in run.entries:
                if entry.fair and _is_launched(entry):
                    yield entry.region, entry.host_us


def _is_launched(entry: Entry) -> bool:
    return entry.deployment is Deployment.KERNELS and entry.lead_us is not None


def _by_region(
    pairs: Iterable[tuple[int, float]], reduce: Callable[[list[float]], float]
) -> dict[int, float]:
    """Return what the values of each region come to."""
    found: dict[int, list[float]] = {}
    for region, value in pairs:
        found.setdefault(region, []).append(value)
    return {region: reduce(values) for region, values in found.items()}
