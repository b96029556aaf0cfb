"""What a client decides without measurements: graphs for which there is no choice, and those that could not be measured.

What measurements speak for is `schema.policy`'s.
"""

from __future__ import annotations

from pygraphd.schema.messages import MAX_REASON, Decision, Deployment
from pygraphd.schema.policy import NOISY, NOT_RELOCATED, POLICY_VERSION, TOO_FEW_CALLS

NO_DEVICE = "no CUDA device"
ON_THE_CPU = "runs on the CPU"
NOT_WHOLE = "it cannot be recorded whole: not all of it runs on one GPU"
STATE_UNKNOWN = "it cannot be recorded: where its attention keeps random numbers is not known"
NOT_CAPTURED = "PyTorch does not capture it: "
HOST_OPERATORS = "has custom operators, which run at each call (PYGRAPH_GRAPH_OPS): "
BY_SIZE = "each dynamic size that comes back is decided apart; others are launched"
NO_MEMORY = "not enough free memory to try a capture beside launched calls"
FAILED = "measuring failed"
STILL_WAITING = "ranks: the program ended before there was a decision"
LEFT_TO_OTHERS = "another process was still measuring it when the program ended"


def only_launch(reason: str) -> Decision:
    """Return the decision for a graph that can only be launched, with the reason for that."""
    return Decision(Deployment.KERNELS, reason, POLICY_VERSION)


def only_launch_as_refused(refusal: str) -> Decision:
    """Return the decision for a graph of which no GRAPH can be recorded, with the reason."""
    return only_launch(one_line(f"{NOT_RELOCATED}{refusal}"))


def too_few_calls(calls: int) -> Decision:
    """Return the provisional decision for a graph that was called `calls` times before the program ended."""
    return not_measured(TOO_FEW_CALLS, calls)


def only_launch_for_now(refusal: str) -> Decision:
    """Return the provisional decision for a graph of which no GRAPH could be recorded in this process, with the reason."""
    return not_measured(one_line(f"{NOT_RELOCATED}{refusal}"), 0)


def is_noisy(decision: Decision) -> bool:
    """Whether a decision is provisional because what it rests on was too noisy."""
    return not decision.final and decision.reason.endswith(NOISY)


def not_measured(reason: str, calls: int) -> Decision:
    """Return the provisional decision for a graph that could not be measured in this process."""
    return Decision(Deployment.KERNELS, reason, POLICY_VERSION, final=False, calls=calls)


def one_line(text: str) -> str:
    """Return the first line of a reason, printable and short enough for the cache."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return "".join(c if c.isprintable() else " " for c in line)[:MAX_REASON]
