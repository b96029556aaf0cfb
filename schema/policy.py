"""Measurements in, decision out: a pure function with a version, so that stored measurements outlive a better rule.

A GRAPH launches the same kernels as KERNELS and costs the host less by construction. So it is chosen unless the measurements
show that it takes longer: on the host, or on the GPU. The client decides with this rule when it has measured, the daemon when
it derives decisions anew from stored measurements. Decisions without measurements are made in `client.policy`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pygraphd.schema.messages import Decision, Deployment, Measurement

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICY_VERSION = 5
"""Raise it with any change to what `decide` answers: decisions of other versions are derived or measured anew.
`tests/schema/test_policy_version.py` fails while that is forgotten."""
MIN_SAMPLES = 8
"""Samples of each deployment below which nothing is decided."""
MIN_GAIN = 0.02
"""Share of the KERNELS figure by which a difference counts."""
NOISE_FACTOR = 3.0
"""Standard errors of the difference of two medians by which a difference counts."""
MAX_NOISE = 0.05
"""Standard error of a call's cost, as a share of it, above which a decision is provisional."""

# The standard error of a median of normal data is 1.2533 sigma / sqrt(n), and sigma is 1.4826 times the median absolute
# deviation; both constants are textbook values.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826

TOO_FEW_CALLS = "too few calls to measure"
SAVES_HOST_TIME = "GRAPH saves host time, and the GPU takes no longer"
FASTER = "GRAPH is faster"
LONGER_ON_THE_GPU = "GRAPH takes longer on the GPU"
LONGER_ON_THE_HOST = "GRAPH takes longer on the host"
NO_GAIN = "GRAPH saves nothing beyond noise and 2 %"
NOISY = "; the host or GPU was too noisy to rely on it"
"""Ends the reason of a provisional decision that rests on noisy measurements."""
NOT_RELOCATED = "it cannot be relocated: "
"""Begins the reason of a decision for KERNELS because no GRAPH can be recorded."""
NOT_RELOCATED_FOR_NOW = "; could not be relocated: "
"""Stands in the reason of a provisional decision before the reason for which no GRAPH could be recorded there."""


def decide(measurements: Sequence[Measurement]) -> Decision:
    """Return the deployment that one graph's measurements, at most one of each deployment, speak for.

    The order of `measurements` is irrelevant. The decision is not final if samples are too few, or too noisy.
    """
    found = {each.deployment: each for each in measurements if each.samples >= MIN_SAMPLES}
    graph, kernels = found.get(Deployment.GRAPH), found.get(Deployment.KERNELS)
    if graph is None or kernels is None:
        return Decision(Deployment.KERNELS, TOO_FEW_CALLS, POLICY_VERSION, final=False)
    deployment, reason = _choose(graph, kernels)
    if is_noisy(graph) or is_noisy(kernels):
        return Decision(deployment, f"{reason}{NOISY}", POLICY_VERSION, final=False)
    return Decision(deployment, reason, POLICY_VERSION)


def _choose(graph: Measurement, kernels: Measurement) -> tuple[Deployment, str]:
    span_us, host_us = span_difference_us(graph, kernels), host_difference_us(graph, kernels)
    if span_us > 0 or host_us > 0:
        if _costs_less(graph, kernels):
            return Deployment.GRAPH, FASTER
        return Deployment.KERNELS, LONGER_ON_THE_GPU if span_us > 0 else LONGER_ON_THE_HOST
    if host_us < 0:
        return Deployment.GRAPH, SAVES_HOST_TIME
    return (Deployment.GRAPH, FASTER) if span_us < 0 else (Deployment.KERNELS, NO_GAIN)


def _costs_less(graph: Measurement, kernels: Measurement) -> bool:
    return _difference_us(graph.median_us, kernels.median_us, noise_us(graph, kernels)) < 0


def span_difference_us(graph: Measurement, kernels: Measurement) -> float:
    """Return how much longer GRAPH takes on the GPU, in microseconds; 0.0 within the noise or 2 %, negative if it takes less."""
    return _difference_us(
        graph.span_us, kernels.span_us, math.hypot(_span_error(graph), _span_error(kernels))
    )


def host_difference_us(graph: Measurement, kernels: Measurement) -> float:
    """Return how much longer GRAPH takes on the host, in microseconds; 0.0 within the noise or 2 %, negative if it takes less."""
    return _difference_us(
        graph.host_us, kernels.host_us, math.hypot(_host_error(graph), _host_error(kernels))
    )


def _difference_us(graph_us: float, kernels_us: float, error_us: float) -> float:
    difference_us = graph_us - kernels_us
    return difference_us if abs(difference_us) > max(MIN_GAIN * kernels_us, NOISE_FACTOR * error_us) else 0.0


def is_noisy(measurement: Measurement) -> bool:
    """Whether a call's cost is known so badly that the next process should measure it again."""
    return _error(measurement.mad_us, measurement.samples) > MAX_NOISE * measurement.median_us


def noise_us(first: Measurement, second: Measurement) -> float:
    """Return the standard error of the difference of the median costs of two measurements, in microseconds."""
    return math.hypot(_error(first.mad_us, first.samples), _error(second.mad_us, second.samples))


def _span_error(measurement: Measurement) -> float:
    mad_us = measurement.span_mad_us
    return _error(measurement.mad_us if mad_us is None else mad_us, measurement.samples)


def _host_error(measurement: Measurement) -> float:
    mad_us = measurement.host_mad_us
    return _error(measurement.mad_us if mad_us is None else mad_us, measurement.samples)


def _error(mad_us: float, samples: int) -> float:
    return _ERROR_OF_MEDIAN * mad_us / math.sqrt(samples)
