"""The order of a trial's calls: GRAPH, KERNELS, GRAPH, with as many samples of GRAPH before KERNELS as after.

Costs drift while they are measured: clocks rise, caches fill, queues grow. Half of GRAPH's samples come before those of KERNELS and half
after, so that a steady drift adds the same to both. Needs no torch.
"""

from __future__ import annotations

from collections import deque

from pygraphd.schema import policy
from pygraphd.schema.messages import Deployment

SAMPLES = policy.MIN_SAMPLES
"""Samples of each deployment in a cycle."""
HALF = SAMPLES // 2
RECORDING_CALLS = 4
"""Calls as GRAPH before the first sample: the size comes back, is recorded and replayed, and memory settles."""
MAX_UNSTEADY = 16
"""The number of calls excluded from the samples because they did one-time work, such as making an executable. Later ones are samples."""
MAX_CYCLES = 3
"""The largest number of cycles in a trial. After the last one, noisy samples are used as they are."""

Calls = list[tuple[Deployment, bool]]
"""The deployment of each call, and whether the call is a sample."""


class Schedule:
    """The order of one trial's calls. With `only`, all calls run in that deployment, as in a validation."""

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
        """The deployment of the next call. When all samples have been taken, it is KERNELS, or `only`."""
        return self._ahead[0][0] if self._ahead else self._only or Deployment.KERNELS

    def take(self, *, steady: bool = True) -> bool:
        """Note that a call has run in `deployment`; return whether it is a sample.

        A call that is not `steady` did one-time work, such as making an executable.
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
        """Begin another cycle, because the samples are noisy; return False after `MAX_CYCLES` cycles."""
        if self._cycles >= MAX_CYCLES:
            return False
        self._cycles += 1
        self._ahead.extend(self._cycle(1))
        return True

    def _cycle(self, rest: int) -> Calls:
        """Return the calls of one cycle. Its first `rest` calls, and the first after each change of deployment, are no samples."""
        if self._only is not None:
            return _block(self._only, rest, SAMPLES)
        graph, kernels = Deployment.GRAPH, Deployment.KERNELS
        return [*_block(graph, rest, HALF), *_block(kernels, 1, SAMPLES), *_block(graph, 1, HALF)]


def _block(deployment: Deployment, rest: int, counted: int) -> Calls:
    return [(deployment, False)] * rest + [(deployment, True)] * counted
