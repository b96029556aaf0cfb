"""Which deployment each call of a trial runs in, and which calls count: GRAPH, KERNELS and GRAPH around one middle.

Costs drift while they are measured: clocks rise, caches fill, queues grow. Half of GRAPH's samples come before those of KERNELS and half
after, so that a steady drift adds the same to both. Knows nothing of torch.
"""

from __future__ import annotations

from collections import deque

from pygraphd.schema import policy
from pygraphd.schema.messages import Deployment

SAMPLES = policy.MIN_SAMPLES
"""Samples of each deployment that a cycle takes."""
HALF = SAMPLES // 2
RECORDING_CALLS = 4
"""The first calls in GRAPH, uncounted: they see that sizes come back, record, replay, and in training begin to keep memory."""
MAX_UNSTEADY = 16
"""Calls that may go uncounted because they did what later calls need not do: if there are more, it is what calls cost."""
MAX_CYCLES = 3
"""Cycles that a noisy machine gets before what it says is taken as it is."""

Calls = list[tuple[Deployment, bool]]
"""Of some calls the deployment, and whether each counts."""


class Schedule:
    """The order of one trial's calls. `only`: all calls run in one deployment, which is held against what is known of it."""

    def __init__(self, only: Deployment | None = None) -> None:
        self._only = only
        self._ahead = deque(self._cycle(RECORDING_CALLS))
        self._cycles = 1
        self._unsteady = 0

    @property
    def is_done(self) -> bool:
        """Whether all samples have been taken."""
        return not self._ahead

    @property
    def deployment(self) -> Deployment:
        """What the next call runs in: KERNELS if all samples have been taken."""
        return self._ahead[0][0] if self._ahead else self._only or Deployment.KERNELS

    def take(self, *, steady: bool = True) -> bool:
        """Note that a call has run in `deployment`; return whether it is a sample.

        One that is not `steady` did what later calls need not do, as making an executable.
        """
        if not self._ahead:
            return False
        counts = self._ahead[0][1]
        if counts and not steady and self._unsteady < MAX_UNSTEADY:
            self._unsteady += 1
            return False
        self._ahead.popleft()
        return counts

    def begin_again(self) -> bool:
        """Take as many samples once more, for what was measured is noisy; return False if that was done often enough."""
        if self._cycles >= MAX_CYCLES:
            return False
        self._cycles += 1
        self._ahead.extend(self._cycle(1))
        return True

    def _cycle(self, rest: int) -> Calls:
        """Return the calls of one cycle; the first `rest` of them, and then the first after each change, do not count."""
        if self._only is not None:
            return _block(self._only, rest, SAMPLES)
        graph, kernels = Deployment.GRAPH, Deployment.KERNELS
        return [*_block(graph, rest, HALF), *_block(kernels, 1, SAMPLES), *_block(graph, 1, HALF)]


def _block(deployment: Deployment, rest: int, counted: int) -> Calls:
    return [(deployment, False)] * rest + [(deployment, True)] * counted
