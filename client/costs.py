"""What a call of a deployed graph cost when that was decided, and whether what is seen of it later bears that out.

How much of a call's host time is hidden behind earlier work of the GPU depends on the program around it, and is no reason to doubt.
A call that comes when the GPU is idle has the host's time before its work is queued in its span, too. Knows nothing of torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from pygraphd.schema.messages import Entry, Measurement

TOLERANCE = 0.2
"""Share by which a call may take more or less than was recorded."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A call's time on the host and its span on the GPU, medians in microseconds."""

    host_us: float
    span_us: float

    def hold(self, seen: Measurement) -> bool:
        """Whether a call still takes about as long, on either."""
        margin_us = TOLERANCE * self._larger_us
        # Of the host's time only what the program had to wait for: in a full queue, a call waits for others.
        shown_us = min(seen.host_us, seen.median_us)
        if shown_us > self._larger_us + margin_us or self._is_shorter(seen):
            return False
        if seen.deployment is Deployment.KERNELS:
            # Kernels that are launched as the GPU goes along are spaced out by the host: the span has no lower bound.
            return seen.span_us <= self._larger_us + margin_us
        return abs(seen.span_us - self.span_us) <= self.host_us + margin_us

    @property
    def _larger_us(self) -> float:
        return max(self.host_us, self.span_us)

    def _is_shorter(self, seen: Measurement) -> bool:
        least = 1 - TOLERANCE
        return seen.host_us < least * self.host_us and seen.span_us < least * self.span_us


@dataclass(frozen=True, slots=True)
class Cost:
    """The median cost of a call, in microseconds, and its parts; None: not known, as of what older daemons say."""

    cost_us: float
    parts: Parts | None = None

    def holds(self, seen: Measurement) -> bool:
        """Whether what is seen of the same deployment bears this out."""
        if self.parts is not None:
            return self.parts.hold(seen)
        least, most = sorted((seen.host_us, seen.span_us))
        return least <= self.cost_us * (1 + TOLERANCE) and self.cost_us * (1 - TOLERANCE) <= most


def of_entry(entry: Entry) -> Cost | None:
    """Return what a call costs in the deployment that an entry names, if it was measured."""
    if entry.cost_us is None:
        return None
    if entry.host_us is None or entry.span_us is None:
        return Cost(entry.cost_us)
    return Cost(entry.cost_us, Parts(entry.host_us, entry.span_us))
