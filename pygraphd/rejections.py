"""Why a deployment was not chosen, by the figures that were weighed and the policy's own thresholds; and why a decision is not used.

Of what was not measured, as much is said as the decision and the others' figures tell; where that leaves two causes, both are named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import (
    FOR_ITS_BACKWARD,
    FORWARD_NOT_IN_TREES,
    MIN_GAIN,
    MIN_SAMPLES,
    NO_GAIN,
    NOISE_FACTOR,
    NOT_RELOCATED,
    NOT_RELOCATED_FOR_NOW,
    POLICY_VERSION,
    TOO_FEW_CALLS,
    noise_us,
    takes_longer,
    wins,
    wins_clearly,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from pygraphd.schema.messages import Decision, Measurement

NOT_MEASURED = "not measured"
NOT_BY_FIGURES = "ruled out, but not by its figures"
BY_RULE = f"{NOT_MEASURED}: a rule decided, and left no choice"
NOT_OFFERED = f"{NOT_MEASURED}: not offered there"
OR_REFUSED = f"{NOT_OFFERED}, or refused"
OR_TOO_LATE = f"{NOT_OFFERED}, or measuring ended before its turn"
SPARED = f"{NOT_MEASURED}: not needed as GRAPH had won clearly, or not offered there"
TOO_SOON = f"{NOT_MEASURED}: too few calls, or not to be had there"
GONE = f"{NOT_MEASURED}, or its figures are gone"

_BY_FIGURES = (" is faster", NO_GAIN, FOR_ITS_BACKWARD, FORWARD_NOT_IN_TREES)


def why_rejected(
    deployment: Deployment, chosen: Deployment, weighed: Mapping[Deployment, Measurement]
) -> str:
    """Return why `chosen` was preferred to `deployment`; percentages are of the time that `chosen` takes."""
    if problem := _why_not_comparable(weighed.get(deployment)):
        return problem
    if problem := _why_not_comparable(weighed.get(chosen)):
        return f"nothing to compare it with ({chosen}: {problem})"
    return _compared(weighed[deployment], weighed[chosen])


def _why_not_comparable(measurement: Measurement | None) -> str | None:
    if measurement is None:
        return NOT_MEASURED
    if measurement.samples < MIN_SAMPLES:
        return f"too few samples ({measurement.samples} of {MIN_SAMPLES})"
    return None


def _compared(rejected: Measurement, chosen: Measurement) -> str:
    gain_us = chosen.median_us - rejected.median_us
    gain = _percent(abs(gain_us), chosen.median_us)
    if gain == "0":
        return f"as fast as {chosen.deployment}"
    if gain_us < 0:
        return f"slower by {gain} %"
    return f"faster by {gain} %{_why_not_enough(rejected, chosen)}"


def _why_not_enough(candidate: Measurement, chosen: Measurement) -> str:
    if chosen.deployment is not Deployment.KERNELS or wins(candidate, chosen):
        return f"; {NOT_BY_FIGURES}"
    if takes_longer(candidate, chosen):
        return f", but by {candidate.span_us - chosen.span_us:.0f} us longer on the GPU"
    noise = NOISE_FACTOR * noise_us(candidate, chosen)
    if noise > MIN_GAIN * chosen.median_us:
        return f", within the noise of ±{_percent(noise, chosen.median_us)} %"
    return f", less than the {_percent(MIN_GAIN, 1.0)} % that a capture must win by"


def _percent(part: float, whole: float) -> str:
    """Return a share in percent, with two decimals where they matter; "0" for what they do not show."""
    if part and not whole:
        return "over 1000"
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.0f}" if percent >= 10 else f"{percent:.2f}".rstrip("0").rstrip(".")


def why_not_measured(
    deployment: Deployment,
    decision: Decision,
    weighed: Mapping[Deployment, Measurement],
    *,
    came_alone: bool,
) -> str:
    """Return why there is no figure of `deployment`; `came_alone`: the decision was stored without any."""
    if told := _why_refused(deployment, decision.reason) or _why_undecided(decision):
        return told
    if came_alone and not decision.reason.endswith(_BY_FIGURES):
        return BY_RULE
    if came_alone or not weighed:
        return GONE
    return _why_left_out(deployment, decision.deployment, weighed)


def _why_refused(deployment: Deployment, reason: str) -> str | None:
    """Return what the decision says of relocatable graphs; that a refusal alone decided says that there were no trees."""
    _, told, refusal = reason.partition(NOT_RELOCATED_FOR_NOW)
    if deployment is Deployment.GRAPH and told:
        return f"{NOT_MEASURED}, as it could not be relocated: {refusal}"
    if not reason.startswith(NOT_RELOCATED):
        return None
    return f"{NOT_MEASURED}, as {reason}" if deployment is Deployment.GRAPH else NOT_OFFERED


def _why_undecided(decision: Decision) -> str | None:
    if decision.final or NOT_RELOCATED_FOR_NOW in decision.reason:
        return None
    return TOO_SOON if decision.reason == TOO_FEW_CALLS else f"{NOT_MEASURED}: {decision.reason}"


def _why_left_out(
    deployment: Deployment, chosen: Deployment, weighed: Mapping[Deployment, Measurement]
) -> str:
    """Return why a deployment is missing among those that were measured together."""
    if deployment is Deployment.GRAPH:
        return OR_REFUSED
    if deployment is Deployment.TREES:
        return SPARED if chosen is Deployment.GRAPH and _won_clearly(weighed) else OR_TOO_LATE
    return GONE  # launches are measured with all else


def _won_clearly(weighed: Mapping[Deployment, Measurement]) -> bool:
    """Whether relocatable graphs, which were chosen, have won so that trees are not tried."""
    relocate, launch = weighed.get(Deployment.GRAPH), weighed.get(Deployment.KERNELS)
    return relocate is not None and launch is not None and wins_clearly(relocate, launch)


def why_not_used(facts: Mapping[str, Any], *, spooled: bool) -> str:
    """Return why no program of this version goes by an entry, and what becomes of that; empty if programs do."""
    if facts["policy"] == POLICY_VERSION:
        return ""
    versions = f"decided by policy {facts['policy']}, and this is policy {POLICY_VERSION}"
    if facts["measured_at"] is None:
        return f"{versions}: decided anew when it is met"
    when = "once it is taken in, " if spooled else ""
    cure = f"{when}`pygraphd cache rederive` can apply the present policy"
    return f"{versions}: measured anew when it is met, unless {cure}"
