"""Whose turn it is: the balanced order in which measuring regions try the deployments on real calls.

Two levels. `Turns` is one region's own order, A A A B B B B B B A A A. `Rota` makes all regions of one step follow one of
them: PyTorch's CUDA Graph trees depend on what ran before, so a step that is half captured would be recorded anew for
every mixture. Knows nothing of torch.
"""

from __future__ import annotations

import threading
from collections import Counter

from pygraphd.schema.messages import Deployment

BLOCK = 5
"""Calls in a row before the order moves on; the first after a change is never counted."""
SAMPLES = 8
"""Counted calls of each deployment that end measuring."""
UNCOUNTED = {Deployment.LAUNCH: 1, Deployment.TREES: 3}
"""A deployment's first calls in a process, which pay for setting it up. Trees warm up, record, then replay."""


class Turns:
    """One region's progress through the deployments it may run in, `candidates`."""

    def __init__(self, candidates: tuple[Deployment, ...]) -> None:
        self._order = (*candidates, *reversed(candidates))
        self._calls: Counter[Deployment] = Counter()
        self._counted: Counter[Deployment] = Counter(dict.fromkeys(candidates, 0))
        self._previous: Deployment | None = None

    @property
    def enough(self) -> bool:
        """Whether every candidate has its samples."""
        return min(self._counted.values()) >= SAMPLES

    def next(self) -> Deployment:
        """Return the deployment that this region would run in if it could choose."""
        return self._order[self._calls.total() // BLOCK % len(self._order)]

    def take(self, deployment: Deployment) -> bool:
        """Note that the region now runs in `deployment`; return whether this call is a fair sample of it."""
        fair = deployment is self._previous and self._calls[deployment] >= UNCOUNTED[deployment]
        self._calls[deployment] += 1
        self._counted[deployment] += fair
        self._previous = deployment
        return fair


class Rota:
    """Which deployment the measuring regions of a process run in now.

    A round begins when a region comes round again; that region chooses for all that follow until the next round.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._current = Deployment.LAUNCH

    def enter(self, turns: Turns) -> Deployment:
        """Return the deployment for a region that is called now."""
        with self._lock:
            if not self._seen or id(turns) in self._seen:
                self._seen.clear()
                self._current = turns.next()
            self._seen.add(id(turns))
            return self._current
