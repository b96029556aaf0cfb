"""What a client decides without measurements: graphs for which there is no choice, and those that could not be measured.

What measurements speak for is `schema.policy`'s.
"""

from __future__ import annotations

from pygraphd.schema.messages import MAX_REASON, Decision, Deployment
from pygraphd.schema.policy import POLICY_VERSION, TOO_FEW_CALLS

NO_DEVICE = "no CUDA device"
ON_THE_CPU = "runs on the CPU"
MODE_WITHOUT_TREES = "only LAUNCH in this mode: all else needs reduce-overhead or max-autotune"
NOT_CAPTURED = "PyTorch does not capture it: "
CAPTURED_DIFFERENTLY = (
    "its attention keeps random numbers elsewhere if captured: forward and backward must not differ"
)
NOT_RELOCATED = "it cannot be relocated: "
BY_SIZE = "each dynamic size that comes back is decided apart; others are launched"
NO_MEMORY = "not enough free memory to try a capture beside launched calls"
FAILED = "measuring failed"
STILL_WAITING = "ranks: the program ended before there was a decision"
AS_BEFORE = "as before, since it could not be measured anew"
LEFT_TO_OTHERS = "another process was still measuring it when the program ended"


def only_launch(reason: str) -> Decision:
    """Return the decision for a graph that can only be launched, with the reason for that."""
    return Decision(Deployment.LAUNCH, reason, POLICY_VERSION)


def only_launch_as_refused(refusal: str) -> Decision:
    """Return the decision for a graph that refused all that was offered beside LAUNCH."""
    return only_launch(one_line(f"{NOT_RELOCATED}{refusal}"))


def only_trees(reason: str) -> Decision:
    """Return the decision for a graph that must run as PyTorch has it, with the reason for that."""
    return Decision(Deployment.TREES, reason, POLICY_VERSION)


def too_few_calls(calls: int) -> Decision:
    """Return the provisional decision for a graph that was called `calls` times before the program ended."""
    return not_measured(TOO_FEW_CALLS, calls)


def as_before(deployment: Deployment, calls: int) -> Decision:
    """Return the provisional decision for a graph that was to be measured anew, and could not be."""
    return Decision(deployment, AS_BEFORE, POLICY_VERSION, final=False, calls=calls)


def not_measured(reason: str, calls: int) -> Decision:
    """Return the provisional decision for a graph that could not be measured in this process."""
    return Decision(Deployment.LAUNCH, reason, POLICY_VERSION, final=False, calls=calls)


def one_line(text: str) -> str:
    """Return the first line of a reason, printable and short enough for the cache."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return "".join(c if c.isprintable() else " " for c in line)[:MAX_REASON]
