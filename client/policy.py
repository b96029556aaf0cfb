"""Measurements in, decision out: a pure function with a version, so that cached facts outlive a better rule.

A graph is captured only if that wins by more than the noise and by at least `MIN_GAIN`; a tie goes to LAUNCH, which costs no
memory and has no semantics of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.schema.messages import Decision, Deployment, Measurement
from pygraphd.schema.policy import MIN_GAIN as MIN_GAIN
from pygraphd.schema.policy import MIN_SAMPLES as MIN_SAMPLES
from pygraphd.schema.policy import wins

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICY_VERSION = 1

TOO_FEW_CALLS = "too few calls to measure"
NO_GAIN = "no gain over LAUNCH beyond noise and 2 %"
FORWARD_NOT_IN_TREES = "its forward is in no tree, so all that was saved for it would have to be copied"
NO_MEMORY = "not enough free memory to try a capture beside launched calls"
FAILED = "measuring failed"


def decide(measurements: Sequence[Measurement]) -> Decision:
    """Return the deployment that the measurements of one graph speak for; the order of `measurements` is irrelevant."""
    enough = {m.deployment: m for m in measurements if m.samples >= MIN_SAMPLES}
    launch = enough.pop(Deployment.LAUNCH, None)
    if launch is None or not enough:
        return _launch(TOO_FEW_CALLS, final=False)
    best = min(enough.values(), key=lambda m: (m.median_us, m.deployment))
    if not wins(best, launch):
        return _launch(NO_GAIN)
    return Decision(best.deployment, f"{best.deployment} is faster", POLICY_VERSION)


def only_launch(reason: str) -> Decision:
    """Return the decision for a graph that can only be launched, with the reason for that."""
    return _launch(reason)


def only_trees(reason: str) -> Decision:
    """Return the decision for a graph that must run as PyTorch has it, with the reason for that."""
    return Decision(Deployment.TREES, reason, POLICY_VERSION)


def too_few_calls(calls: int) -> Decision:
    """Return the provisional decision for a graph that was called `calls` times before the program ended."""
    return not_measured(TOO_FEW_CALLS, calls)


def not_measured(reason: str, calls: int) -> Decision:
    """Return the provisional decision for a graph that could not be measured in this process."""
    return Decision(Deployment.LAUNCH, reason, POLICY_VERSION, final=False, calls=calls)


def settle_backward(
    decision: Decision, measurements: Sequence[Measurement], *, forward_in_trees: bool
) -> Decision:
    """Return the decision for a backward that was measured together with its forward.

    It was timed with its forward in the same deployment. Trees take what their own forward has saved where it lies, and copy
    what comes from anywhere else.
    """
    if decision.deployment is not Deployment.TREES or forward_in_trees:
        return decision
    without = decide([each for each in measurements if each.deployment is not Deployment.TREES])
    return without if without.deployment is not Deployment.LAUNCH else _launch(FORWARD_NOT_IN_TREES)


def _launch(reason: str, *, final: bool = True) -> Decision:
    return Decision(Deployment.LAUNCH, reason, POLICY_VERSION, final=final)
