"""Why a deployment was not chosen: said from the figures that were weighed, with the policy's own thresholds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import MIN_GAIN, MIN_SAMPLES, NOISE_FACTOR, noise_us, takes_longer, wins

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pygraphd.schema.messages import Measurement

NOT_MEASURED = "not measured"
NOT_BY_FIGURES = "ruled out, but not by its figures"


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
    if chosen.deployment is not Deployment.LAUNCH or wins(candidate, chosen):
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
