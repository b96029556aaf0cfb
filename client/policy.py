"""What a client decides without measurements: graphs for which there is no choice, and those that could not be measured.

What measurements speak for is `schema.policy`'s.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pygraphd.schema.messages import MAX_REASON, Decision, Deployment
from pygraphd.schema.policy import (
    NOT_RELOCATED,
    NOT_RELOCATED_FOR_NOW,
    POLICY_VERSION,
    TOO_FEW_CALLS,
    fastest,
    wins_clearly,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pygraphd.schema.messages import Measurement

NO_DEVICE = "no CUDA device"
ON_THE_CPU = "runs on the CPU"
MODE_WITHOUT_TREES = "only KERNELS in this mode: all else needs reduce-overhead or max-autotune"
NOT_CAPTURED = "PyTorch does not capture it: "
CAPTURED_DIFFERENTLY = (
    "its attention keeps random numbers elsewhere if captured: forward and backward must not differ"
)
BY_SIZE = "each dynamic size that comes back is decided apart; others are launched"
NO_MEMORY = "not enough free memory to try a capture beside launched calls"
FAILED = "measuring failed"
STILL_WAITING = "ranks: the program ended before there was a decision"
AS_BEFORE = "as before, since it could not be measured anew"
UNBEATEN = "as before, since nothing was found to be faster by more than the noise and 2 %"
LEFT_TO_OTHERS = "another process was still measuring it when the program ended"
_NUMBER = re.compile(r"[0-9.]+( [KMG]iB)?")


def spares_trees(measurements: Iterable[Measurement]) -> bool:
    """Whether trees cannot be expected to beat relocatable graphs, of which there are enough samples.

    They launch the same kernels and copy inputs, and must keep memory of their own to be tried. With trees in the process, relocated
    graphs have been seen to leave 0.35 us more between two kernels (H200, BERT: 10 %), and neither letting trees go nor new executables brought that back.
    """
    found = {each.deployment: each for each in measurements if each.deployment is not Deployment.TREES}
    if fastest(list(found.values())).deployment is not Deployment.GRAPH:
        return False
    return wins_clearly(found[Deployment.GRAPH], found[Deployment.KERNELS])


def only_launch(reason: str) -> Decision:
    """Return the decision for a graph that can only be launched, with the reason for that."""
    return Decision(Deployment.KERNELS, reason, POLICY_VERSION)


def only_launch_as_refused(refusal: str) -> Decision:
    """Return the decision for a graph that refused all that was offered beside KERNELS."""
    return only_launch(one_line(f"{NOT_RELOCATED}{refusal}"))


def only_trees(reason: str) -> Decision:
    """Return the decision for a graph that must run as PyTorch has it, with the reason for that."""
    return Decision(Deployment.TREES, reason, POLICY_VERSION)


def too_few_calls(calls: int) -> Decision:
    """Return the provisional decision for a graph that was called `calls` times before the program ended."""
    return not_measured(TOO_FEW_CALLS, calls)


def as_before(deployment: Deployment, reason: str, calls: int) -> Decision:
    """Return the provisional decision for a graph that goes on as before: what the cache says of it is not replaced by that."""
    return Decision(deployment, reason, POLICY_VERSION, final=False, calls=calls)


def only_launch_for_now(refusal: str) -> Decision:
    """Return the provisional decision for a graph that refuses all that is offered beside KERNELS, but may not do so next time."""
    return not_measured(one_line(f"{NOT_RELOCATED}{refusal}"), 0)


def without_relocation(decision: Decision, refusal: str) -> Decision:
    """Return a decision that was taken while relocatable graphs could not be had, as provisional; it was called often enough."""
    return Decision(
        decision.deployment, _without_relocation(decision.reason, refusal), decision.policy, final=False
    )


def was_refused_as(decision: Decision, refusal: str) -> bool:
    """Whether a decision was taken while relocatable graphs could not be had, for the same reason; how much memory was short does not matter."""
    reason, told, _ = decision.reason.partition(NOT_RELOCATED_FOR_NOW)
    expected = _without_relocation(reason, refusal)
    return bool(told) and not decision.final and _NUMBER.sub("", decision.reason) == _NUMBER.sub("", expected)


def _without_relocation(reason: str, refusal: str) -> str:
    return one_line(f"{reason}{NOT_RELOCATED_FOR_NOW}{refusal}")


def not_measured(reason: str, calls: int) -> Decision:
    """Return the provisional decision for a graph that could not be measured in this process."""
    return Decision(Deployment.KERNELS, reason, POLICY_VERSION, final=False, calls=calls)


def one_line(text: str) -> str:
    """Return the first line of a reason, printable and short enough for the cache."""
    line = text.strip().splitlines()[0] if text.strip() else "no reason given"
    return "".join(c if c.isprintable() else " " for c in line)[:MAX_REASON]
