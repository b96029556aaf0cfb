"""Compares the cost of a call that an entry states with a measurement in this process. Needs no torch.

A call that finds the GPU idle has a longer span: it includes the host time until its work is queued.
"""

from __future__ import annotations

from dataclasses import dataclass

from pygraphd.schema.messages import Deployment, Entry, Measurement

MAX_COST_DIFFERENCE = 0.2
"""The largest difference that agrees with the stated cost, as a share of that cost."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A call's time on the host and its span on the GPU, medians in microseconds."""

    host_us: float
    span_us: float

    @property
    def call_us(self) -> float:
        """The time that a call takes of a program, in microseconds: on the host or on the GPU, whichever is longer."""
        return max(self.host_us, self.span_us)

    def holds(self, seen: Measurement) -> bool:
        """Return whether a measurement of the same deployment agrees with this cost, on the host and on the GPU."""
        larger_us = self.call_us
        margin_us = MAX_COST_DIFFERENCE * larger_us
        # A call that finds the GPU at work may have waited for a place in its queue.
        may_have_waited = seen.busy > 0.5
        if (seen.host_us > larger_us + margin_us and not may_have_waited) or self._is_shorter(seen):
            return False
        if seen.deployment is Deployment.KERNELS:
            # Kernels that are launched as the GPU goes along are spaced out by the host: the span has no lower bound.
            return seen.span_us <= larger_us + margin_us
        return abs(seen.span_us - self.span_us) <= self.host_us + margin_us

    def _is_shorter(self, seen: Measurement) -> bool:
        least = 1 - MAX_COST_DIFFERENCE
        return seen.host_us < least * self.host_us and seen.span_us < least * self.span_us


def of_entry(entry: Entry) -> Cost | None:
    """Return the cost of a call in the deployment that an entry names; None: it was not measured."""
    if entry.host_us is None or entry.span_us is None:
        return None
    return Cost(entry.host_us, entry.span_us)
