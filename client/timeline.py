"""When the calls of measured graphs came, and when the GPU got to them: whose host time was hidden behind earlier work.

That a call finds the GPU at work does not mean that its host time costs nothing: the GPU may run out of work some calls later for
it. And while deployments alternate, those that are quick on the host keep the GPU busy for those that are not. So the calls of all
regions are laid out as they came, and it is asked whether the GPU would have run dry if all of them had been launched; if so, the
host time of all calls before that counts, and time on the GPU only as far as it is longer than what the host does until the next call. What a synchronisation of the user's does to the queue is no reason to count them.
"""

from __future__ import annotations

import itertools
import statistics
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_KEPT = 16_384
"""Calls; of a model with a hundred regions, a few thousand are timed."""
MAX_ENTRIES = 1_024
"""Calls of one run: more are more of the same."""
UNCHANGED = 32
"""One part of so many may have changed before it is worth while to find out anew whose host time counts."""
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
    lead_us: float | None = None
    """None until the GPU has got to it."""
    exposed: bool = True
    """Whether its host time counts."""
    after_us: float = 0.0
    """What the host usually does from then to the next call, while the GPU is at work."""

    @property
    def cost_us(self) -> float:
        """What the call cost the program."""
        return max(self.host_us, self.span_us - self.after_us) if self.exposed else self.span_us


@dataclass(slots=True, eq=False)
class Run:
    """Calls on one stream, of which all but the first found the GPU at work."""

    first: Entry
    base: Event | None
    """Where the GPU's time is counted from; None when all are complete."""
    entries: list[Entry] = field(default_factory=list)

    def takes(self, entry: Entry) -> bool:
        """Whether a call goes on with it."""
        young = entry.began_us - self.first.began_us < MAX_RUN_US
        return not entry.idle and young and len(self.entries) < MAX_ENTRIES

    def let_go(self) -> None:
        """Give the event back if no call needs it any more; there will be no others."""
        if self.entries[-1].lead_us is not None:
            self.base = None

    def expose(self, launched_us: Mapping[int, float]) -> None:
        """Say of each call whether its host time counts; `launched_us` is what a launch of each region takes on the host."""
        leads = list(self._leads(launched_us))
        if self.first.idle:
            starved = max((number for number, lead in enumerate(leads) if lead <= 0), default=0)
        else:
            starved = len(self.entries) - 1 if self._dries(leads) else -1
        for number, entry in enumerate(self.entries):
            entry.exposed = number <= starved

    def pauses(self) -> Iterable[tuple[int, float]]:
        """Yield what the host did between two calls, with the region of the first.

        The second found the GPU at work, so the host has not waited for all of it.
        """
        for entry, following in itertools.pairwise(self.entries):
            if entry.host_us:
                yield entry.region, max(0.0, following.began_us - entry.began_us - entry.host_us)

    def _leads(self, launched_us: Mapping[int, float]) -> Iterable[float]:
        """Yield how far the GPU would have been behind at each call, if all calls had been launched."""
        later = 0.0
        for entry in self.entries:
            if entry.lead_us is None:
                return
            yield entry.lead_us - later
            if entry.deployment is not Deployment.LAUNCH:
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

    def read(self, run: Run) -> bool:
        """Complete its entry if the GPU has done it; whether it has."""


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
        self._exposed_at = -1

    @property
    def kept(self) -> int:
        """How many calls are remembered."""
        return self._kept

    def add(self, call: Timed, stream: Stream) -> Run:
        """Note a call; return the run that it belongs to."""
        with self._lock:
            run = self._latest.get(stream)
            if run is None or not run.takes(call.entry):
                if run is not None:
                    run.let_go()
                run = self._latest[stream] = Run(call.entry, call.begin)
                self._runs.append(run)
            run.entries.append(call.entry)
            self._pending.setdefault(stream, deque()).append((call, run))
            self._kept += 1
            self._changes += 1
            while self._kept > MAX_KEPT and len(self._runs) > 1:
                self._kept -= len(self._runs.popleft().entries)
            return run

    def collect(self) -> None:
        """Complete what the GPU has done."""
        with self._lock:
            for stream, calls in self._pending.items():
                while calls and calls[0][0].read(calls[0][1]):
                    _, run = calls.popleft()
                    self._changes += 1
                    if run is not self._latest[stream]:
                        run.let_go()

    def expose(self) -> None:
        """Say of each call whether its host time counts, and what comes after it."""
        with self._lock:
            # All regions of a step ask in turn, and between two of them little changes.
            if self._exposed_at >= 0 and self._changes - self._exposed_at <= self._changes // UNCHANGED:
                return
            self._exposed_at = self._changes
            entries = [entry for run in self._runs for entry in run.entries]
            launched_us = _medians(
                (entry.region, entry.host_us) for entry in entries if entry.fair and _is_launched(entry)
            )
            after_us = _medians(pair for run in self._runs for pair in run.pauses())
            for run in self._runs:
                run.expose(launched_us)
            for entry in entries:
                entry.after_us = after_us.get(entry.region, 0.0)


def _is_launched(entry: Entry) -> bool:
    return entry.deployment is Deployment.LAUNCH and entry.lead_us is not None


def _medians(pairs: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the median of each region's values."""
    found: dict[int, list[float]] = {}
    for region, value in pairs:
        found.setdefault(region, []).append(value)
    return {region: statistics.median(values) for region, values in found.items()}
