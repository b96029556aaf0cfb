"""Decisions that rest on no measurement: only KERNELS can run, or no measurement was possible.

`schema.policy` decides from measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.schema import policy
from pygraphd.schema.reasons import Reason, ReasonCode, because

if TYPE_CHECKING:
    from pygraphd.schema.messages import Decision


def only_kernels(code: ReasonCode, detail: str = "") -> Decision:
    """Return the final decision for a graph that can only run as KERNELS."""
    return policy.only_kernels(because(code, detail))


def not_measured(reason: Reason, calls: int = 0) -> Decision:
    """Return the provisional decision for a graph that could not be measured in this process, after `calls` calls."""
    return policy.only_kernels(reason, final=False, calls=calls)


def too_few_calls(calls: int) -> Decision:
    """Return the provisional decision for a graph that was called `calls` times before the program ended."""
    return not_measured(Reason(ReasonCode.TOO_FEW_CALLS), calls)


def is_noisy(decision: Decision) -> bool:
    """Return whether a decision is provisional because the measurements it rests on were too noisy."""
    return policy.is_noisy(decision.reason, final=decision.final)
