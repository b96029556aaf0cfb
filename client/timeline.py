"""When the calls of measured graphs came, and when the GPU got to them: whose host time was hidden behind earlier work.

That a call finds the GPU at work does not mean that its host time costs nothing: the GPU may run out of work some calls later for
it. And while deployments alternate, those that are quick on the host keep the GPU busy for those that are not. So the calls of all
regions are laid out as they came, and it is asked whether the GPU would have run dry if all of them had been launched; if so, the
host time of all calls before that counts, and time on the GPU only as far as it is longer than what the host does until the next call. What a synchronisation of the user's does to the queue is no reason to count them.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_RUNS = 512
MAX_ENTRIES = 1024
"""Of one run: more are more of the same."""
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
    base: Event
    entries: list[Entry] = field(default_factory=list)

    def takes(self, entry: Entry) -> bool:
        """Whether a call goes on with it."""
        young = entry.began_us - self.first.began_us < MAX_RUN_US
        return not entry.idle and young and len(self.entries) < MAX_ENTRIES

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


class Timeline:
    """The latest calls of all regions that are measured together. `Profiler` writes it."""

    def __init__(self) -> None:
        self._runs: deque[Run] = deque(maxlen=MAX_RUNS)
        self._latest: dict[tuple[int, int], Run] = {}

    def add(self, entry: Entry, begin: Event, stream: tuple[int, int]) -> Run:
        """Note a call that has returned, on a stream of a device; return the run that it belongs to."""
        run = self._latest.get(stream)
        if run is None or not run.takes(entry):
            run = self._latest[stream] = Run(entry, begin)
            self._runs.append(run)
        run.entries.append(entry)
        return run

    def expose(self) -> None:
        """Say of each call whether its host time counts, and what comes after it."""
        runs = list(self._runs)  # another thread may add to it
        entries = [entry for run in runs for entry in run.entries]
        launched_us = _medians(
            (entry.region, entry.host_us) for entry in entries if entry.fair and _is_launched(entry)
        )
        after_us = _medians(pair for run in runs for pair in run.pauses())
        for run in runs:
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
