"""What a call of a deployed graph took when that was decided, and whether what is seen of it elsewhere bears that out.

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
class Cost:
    """A call's time on the host and its span on the GPU, medians in microseconds."""

    host_us: float
    span_us: float

    def holds(self, seen: Measurement) -> bool:
        """Whether a call of the same deployment still takes about as long, on either."""
        larger_us = max(self.host_us, self.span_us)
        margin_us = TOLERANCE * larger_us
        # A call that finds the GPU at work may have waited for a place in its queue.
        may_have_waited = seen.busy > 0.5
        if (seen.host_us > larger_us + margin_us and not may_have_waited) or self._is_shorter(seen):
            return False
        if seen.deployment is Deployment.KERNELS:
            # Kernels that are launched as the GPU goes along are spaced out by the host: the span has no lower bound.
            return seen.span_us <= larger_us + margin_us
        return abs(seen.span_us - self.span_us) <= self.host_us + margin_us

    def _is_shorter(self, seen: Measurement) -> bool:
        least = 1 - TOLERANCE
        return seen.host_us < least * self.host_us and seen.span_us < least * self.span_us


def of_entry(entry: Entry) -> Cost | None:
    """Return what a call takes in the deployment that an entry names, if it was measured."""
    if entry.host_us is None or entry.span_us is None:
        return None
    return Cost(entry.host_us, entry.span_us)
