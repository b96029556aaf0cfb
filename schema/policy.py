"""Measurements in, decision out: a pure function with a version, so that cached facts outlive a better rule.

A graph is captured only if that wins by more than the noise and by at least `MIN_GAIN`, and takes no longer on the GPU but for a
little; a tie goes to LAUNCH, which costs no memory and has no semantics of its own. The client decides with it when it has measured, the daemon when it derives
decisions anew from stored facts. What a client decides without measurements is `client.policy`'s.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pygraphd.schema.messages import Decision, Deployment, Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.schema.messages import Conditions

POLICY_VERSION = 4
"""Raise it with any change to what `decide` answers: decisions of other versions are derived or measured anew.
`tests/schema/test_policy_version.py` fails while that is forgotten."""
MIN_SAMPLES = 8
MIN_GAIN = 0.02
"""Share of LAUNCH's time that a capture must save."""
MAX_LOSS = 0.25
"""Share of the host time saved by which a capture may take longer on the GPU. What is saved on the host may turn out to be hidden behind
the GPU's work, and what is lost there is lost all the time."""
CLEARLY = 0.5
"""Share of a launch's host time that a relocated call takes at most, if trees need not be tried."""
NOISE_FACTOR = 3.0
"""How many standard errors of the difference of two medians a gain must exceed."""

# The standard error of a median of normal data is 1.2533 sigma / sqrt(n), and sigma is 1.4826 times the median absolute
# deviation; both constants are textbook values.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826

TOO_FEW_CALLS = "too few calls to measure"
NO_GAIN = "no gain over LAUNCH beyond noise and 2 %"
NOT_RELOCATED = "it cannot be relocated: "
"""Begins the reason of a decision that is due to why."""
NOT_RELOCATED_FOR_NOW = "; could not be relocated: "
"""Stands in the reason of a provisional decision before why relocatable graphs could not be had where it was taken."""
FOR_ITS_BACKWARD = "its backward gains more in trees than this graph loses there"
FORWARD_NOT_IN_TREES = "its forward is in no tree, so all that was saved for it would have to be copied"


def decide(measurements: Sequence[Measurement], conditions: Conditions) -> Decision:
    """Return the deployment that one graph's measurements, at most one of each deployment, and conditions speak for.

    The order of `measurements` is irrelevant. A decision that is not final says that they are too few.
    """
    decision = fastest(measurements)
    if decision.deployment is Deployment.TREES and conditions.forward_in_trees is False:
        return _without_trees(measurements)
    if conditions.backward_gain_us and decision.deployment is not Deployment.TREES:
        return _with_its_backward(measurements, decision, conditions.backward_gain_us)
    return decision


def _with_its_backward(measurements: Sequence[Measurement], decision: Decision, gain_us: float) -> Decision:
    """Decide for a forward that is fastest outside of trees, while its backward, which follows it in or out, is fastest in them."""
    loss_us = loss_in_trees_us(measurements)
    if loss_us is None or gain_us <= loss_us:
        return decision
    return Decision(Deployment.TREES, FOR_ITS_BACKWARD, POLICY_VERSION)


def loss_in_trees_us(measurements: Sequence[Measurement]) -> float | None:
    """Return what a call in TREES may take longer than in the fastest way, in microseconds; None if it is not known, or TREES are no choice.

    With the noise: of a forward's parts each has what the others leave of the gain, and so all come to the same answer.
    """
    found = {each.deployment: each for each in measurements}
    decision, trees = fastest(measurements), found.get(Deployment.TREES)
    if decision.deployment is Deployment.TREES:
        return 0.0
    if not decision.final or trees is None or trees.samples < MIN_SAMPLES:
        return None
    if takes_longer(trees, found[Deployment.LAUNCH]):
        return None
    fast = found[decision.deployment]
    return max(0.0, trees.median_us - fast.median_us + NOISE_FACTOR * noise_us(trees, fast))


def seeming_gain_in_trees_us(measurements: Sequence[Measurement]) -> float:
    """Return what a call in TREES seems to save over the best of all else, in microseconds, whatever the noise."""
    enough = {each.deployment: each for each in measurements if each.samples >= MIN_SAMPLES}
    trees = enough.pop(Deployment.TREES, None)
    if trees is None or not enough:
        return 0.0
    seeming_us = min(each.median_us for each in enough.values()) - trees.median_us
    # What is sure may be more, where the fastest of all else is no choice.
    return max(gain_in_trees_us(measurements), seeming_us)


def gain_in_trees_us(measurements: Sequence[Measurement]) -> float:
    """Return what a call in TREES saves over the best of all else, in microseconds; 0 if that is not beyond the noise."""
    if fastest(measurements).deployment is not Deployment.TREES:
        return 0.0
    found = {each.deployment: each for each in measurements}
    best = fastest([each for each in measurements if each.deployment is not Deployment.TREES]).deployment
    trees, rest = found[Deployment.TREES], found[best]
    gain_us = rest.median_us - trees.median_us
    return gain_us if gain_us > NOISE_FACTOR * noise_us(trees, rest) else 0.0


def _without_trees(measurements: Sequence[Measurement]) -> Decision:
    """Decide for a backward whose forward is in no tree, although it was fastest with both in trees.

    Trees take what their own forward has saved where it lies, and copy what comes from anywhere else.
    """
    rest = fastest([each for each in measurements if each.deployment is not Deployment.TREES])
    return rest if rest.deployment is not Deployment.LAUNCH else _launch(FORWARD_NOT_IN_TREES)


def fastest(measurements: Sequence[Measurement]) -> Decision:
    """Return the deployment that the measurements alone speak for."""
    enough = {m.deployment: m for m in measurements if m.samples >= MIN_SAMPLES}
    launch = enough.pop(Deployment.LAUNCH, None)
    if launch is None or not enough:
        return _launch(TOO_FEW_CALLS, final=False)
    # Each is held against LAUNCH by itself: a noisy one that may be faster still does not hide one that wins for sure.
    winners = [each for each in enough.values() if wins(each, launch)]
    if not winners:
        return _launch(NO_GAIN)
    best = min(winners, key=lambda m: (m.median_us, m.deployment))
    return Decision(best.deployment, f"{best.deployment} is faster", POLICY_VERSION)


def wins(candidate: Measurement, launch: Measurement) -> bool:
    """Whether `candidate` beats `launch` by more than the noise and the minimum gain, and risks little where it may lose."""
    if takes_longer(candidate, launch):
        return False
    gain = launch.median_us - candidate.median_us
    return gain > max(MIN_GAIN * launch.median_us, NOISE_FACTOR * noise_us(candidate, launch))


def wins_clearly(relocate: Measurement, launch: Measurement) -> bool:
    """Whether relocatable graphs, which are the fastest so far, leave PyTorch's trees nothing to win."""
    return relocate.host_us <= max(CLEARLY * launch.host_us, relocate.span_us)


def is_overtaken(deployed: Measurement, launch: Measurement, allowed_us: float = 0.0) -> bool:
    """Whether a launch has come to be faster than what was deployed, by more than the noise, the minimum gain and what is allowed."""
    loss_us = deployed.median_us - launch.median_us - allowed_us
    return loss_us > max(MIN_GAIN * launch.median_us, NOISE_FACTOR * noise_us(deployed, launch))


def is_unbeaten(before: Deployment, measurements: Sequence[Measurement], conditions: Conditions) -> bool:
    """Whether how a graph ran until it was measured anew is to stay, though `decide` speaks for another deployment.

    A graph that is not known is launched if what was measured is too noisy to tell; one that runs well must not be stopped for that.
    """
    decision, found = decide(measurements, conditions), {each.deployment: each for each in measurements}
    mine, best = found.get(before), found.get(decision.deployment)
    if mine is None or best is None or decision.deployment is before or decision.reason == FOR_ITS_BACKWARD:
        return False
    if before is Deployment.TREES and conditions.forward_in_trees is False:
        return False
    return decision.final and mine.samples >= MIN_SAMPLES and not is_overtaken(mine, best)


def takes_longer(candidate: Measurement, launch: Measurement) -> bool:
    """Whether `candidate` takes so much longer on the GPU that what it saves on the host is not worth the risk."""
    saved_us = max(0.0, launch.host_us - candidate.host_us)
    return candidate.span_us - launch.span_us > MAX_LOSS * saved_us


def noise_us(first: Measurement, second: Measurement) -> float:
    """Return the standard error of the difference of two medians, in microseconds."""
    return math.hypot(_standard_error(first), _standard_error(second))


def _standard_error(measurement: Measurement) -> float:
    return _ERROR_OF_MEDIAN * measurement.mad_us / math.sqrt(measurement.samples)


def _launch(reason: str, *, final: bool = True) -> Decision:
    return Decision(Deployment.LAUNCH, reason, POLICY_VERSION, final=final)
