"""The graphs that programs have missed, and for which the team is asked. In memory, and bounded."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from pygraphd.daemon.queries import Key

MAX_WAITING = 8192
"""Graphs that wait for being asked for; beyond, those that have waited longest are not asked for."""
MAX_ANSWERED = 65_536
"""Graphs of which it is remembered when they were asked for."""
AGAIN_S = 30.0
"""How long after an answer the team is not asked for a graph again: a program that waits looks it up every few seconds."""
BATCH_GRAPHS = 64
"""Graphs asked for at once."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some graphs (digests) of one environment (digest) that are asked for at once."""

    environment: str
    graphs: tuple[str, ...]

    @property
    def keys(self) -> list[Key]:
        """Return the keys of all graphs."""
        return [(self.environment, graph) for graph in self.graphs]

    @property
    def halves(self) -> tuple[Batch, Batch]:
        """Return two batches with half of the graphs each."""
        middle = len(self.graphs) // 2
        return Batch(self.environment, self.graphs[:middle]), Batch(self.environment, self.graphs[middle:])


class Wanted:
    """Each key once: waiting, being asked for, or answered lately. For any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[Key, float] = {}
        self._asked: dict[Key, float] = {}
        self._answered: dict[Key, float] = {}

    def __len__(self) -> int:
        """Return the number of graphs that wait."""
        return len(self._waiting)

    def add(self, environment: str, graphs: Iterable[str]) -> bool:
        """Note graphs that are to be asked for; return whether any of them is new."""
        now, is_any_new = self._clock(), False
        with self._lock:
            for key in ((environment, graph) for graph in graphs):
                answered = self._answered.get(key)
                if key in self._waiting or key in self._asked:
                    continue
                if answered is not None and now < answered + AGAIN_S:
                    continue
                self._waiting[key] = now
                is_any_new = True
            _shorten(self._waiting, MAX_WAITING)
        return is_any_new

    def is_awaited(self, environment: str, graph: str, within_s: float) -> bool:
        """Return whether a graph was noted less than `within_s` seconds ago, and has not been answered yet."""
        key = (environment, graph)
        with self._lock:
            noted = self._waiting.get(key, self._asked.get(key))
        return noted is not None and self._clock() < noted + within_s

    def take(self) -> Batch | None:
        """Return the graphs to ask for next, until `answered` or `put_back`; None if none waits."""
        with self._lock:
            if not self._waiting:
                return None
            environment, _ = next(iter(self._waiting))
            same = (key for key in self._waiting if key[0] == environment)
            keys = list(itertools.islice(same, BATCH_GRAPHS))
            for key in keys:
                # With the time at which it was missed: from then on the program waits for an answer.
                self._asked[key] = self._waiting.pop(key)
        return Batch(environment, tuple(graph for _, graph in keys))

    def answered(self, batch: Batch) -> None:
        """Note that the team has been asked, whatever it knew."""
        now = self._clock()
        with self._lock:
            for key in batch.keys:
                self._asked.pop(key, None)
                self._answered.pop(key, None)  # to the end, so that the oldest come first
                self._answered[key] = now
            _shorten(self._answered, MAX_ANSWERED)

    def put_back(self, batch: Batch) -> None:
        """Note that the team could not be asked: they wait again, before all others."""
        with self._lock:
            again = {key: self._asked.pop(key) for key in batch.keys if key in self._asked}
            self._waiting = {**again, **self._waiting}
            _shorten(self._waiting, MAX_WAITING)


def _shorten(times: dict[Key, float], most: int) -> None:
    for key in list(itertools.islice(times, max(len(times) - most, 0))):
        del times[key]
