"""The policy: a pure, versioned function from measurements to a decision, so that measurements outlive a better rule.

A GRAPH launches the same kernels as KERNELS and costs the host less by construction. So it is chosen if it takes longer on neither
host nor GPU, and saves time on either or the host is too noisy to tell. It is also chosen if it takes longer on the GPU alone, by at most `MAX_LOSS` of the host
time that it saves, and its time on the GPU is within the host time of KERNELS. Otherwise, if it takes longer on either, the interval from one
call to the next decides. If it takes longer on neither and saves nothing, KERNELS are chosen.
The client decides by this policy when it has measured, the daemon when it derives decisions anew from stored measurements.
`client.decisions.rules` makes the decisions that rest on no measurement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.schema.messages import Decision, Deployment, Measurement
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICY_VERSION = 6
"""Raise it with any change of `decide`: decisions of other versions are derived or measured anew.
`tests/schema/test_policy_version.py` fails until then.
"""
MIN_SAMPLES = 8
"""Samples of each deployment below which nothing is decided."""
MIN_GAIN = 0.02
"""Share of the KERNELS figure by which a difference counts."""
NOISE_FACTOR = 3.0
"""Standard errors of the difference of two medians by which a difference counts."""
MAX_LOSS = 0.1
"""Largest time that a GRAPH may lose on the GPU, as a share of the host time that it saves, to be chosen whatever the interval. A program
that waits for the host loses more by KERNELS than one that waits for the GPU loses by GRAPH."""
MAX_DOUBT = 0.1
"""Share of the KERNELS figure by which the answer may be wrong, as far as the noise tells; above, a decision is provisional."""

# The standard error of a median of normal data is 1.2533 sigma / sqrt(n), and sigma is 1.4826 times the median absolute
# deviation; both constants are textbook values.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826

_AGAINST_KERNELS = {
    ReasonCode.SAVES_HOST_TIME: ReasonCode.TAKES_MORE_HOST_TIME,
    ReasonCode.SAVES_MORE_HOST_TIME: ReasonCode.TAKES_MORE_HOST_TIME,
    ReasonCode.FASTER: ReasonCode.SLOWER,
}
"""The reason against KERNELS, by the measured reason for a GRAPH."""
_AGAINST_GRAPH = frozenset({ReasonCode.LONGER_ON_GPU, ReasonCode.LONGER_ON_HOST, ReasonCode.NO_GAIN})
"""The measured reasons against a GRAPH."""


def only_kernels(reason: Reason, *, final: bool = True, calls: int = 0) -> Decision:
    """Return a decision for KERNELS, for a reason that speaks against a GRAPH."""
    return Decision(Deployment.KERNELS, reason, POLICY_VERSION, final, calls, against=reason)


def is_noisy(reason: Reason, *, final: bool) -> bool:
    """Return whether a decision is provisional because the measurements it rests on were too noisy."""
    return not final and (reason.code in _AGAINST_KERNELS or reason.code in _AGAINST_GRAPH)


def reason_text(reason: Reason, *, final: bool) -> str:
    """Return a decision's reason as text, with a remark if the decision is provisional because of noise."""
    noisy = "; the host or GPU was too noisy to rely on it" if is_noisy(reason, final=final) else ""
    return f"{reason}{noisy}"


def decide(measurements: Sequence[Measurement]) -> Decision:
    """Return the deployment that one graph's measurements, at most one of each deployment, speak for.

    The order of `measurements` is irrelevant. The decision is not final if samples are too few, or too noisy.
    """
    found = {each.deployment: each for each in measurements if each.samples >= MIN_SAMPLES}
    graph, kernels = found.get(Deployment.GRAPH), found.get(Deployment.KERNELS)
    if graph is None or kernels is None:
        return only_kernels(Reason(ReasonCode.TOO_FEW_CALLS), final=False)
    code, is_sure = _choose(graph, kernels)
    if code in _AGAINST_GRAPH:
        return only_kernels(Reason(code), final=is_sure)
    against = Reason(_AGAINST_KERNELS[code])
    return Decision(Deployment.GRAPH, Reason(code), POLICY_VERSION, is_sure, against=against)


def _choose(graph: Measurement, kernels: Measurement) -> tuple[ReasonCode, bool]:
    """Return the reason for or against a GRAPH, and whether the noise leaves no doubt that matters."""
    host, span = _host_difference(graph, kernels), _span_difference(graph, kernels)
    if not (host.is_more or span.is_more):
        return _choose_on_a_tie(host, span)
    # A graph whose kernels are done sooner than KERNELS are launched can never hold up the host as long as these do.
    if not host.is_more and graph.span_us <= kernels.host_us and span.us <= MAX_LOSS * -host.us:
        return ReasonCode.SAVES_MORE_HOST_TIME, host.is_less
    interval = _interval_difference(graph, kernels)
    if interval.is_less:
        return ReasonCode.FASTER, True
    code = ReasonCode.LONGER_ON_GPU if span.is_more else ReasonCode.LONGER_ON_HOST
    return code, interval.least_us >= -interval.allowed_us


def _choose_on_a_tie(host: _Difference, span: _Difference) -> tuple[ReasonCode, bool]:
    """Choose where neither host nor GPU is known to take longer: GRAPH if it saves host time, or if the host is too noisy to tell."""
    # A tie goes to GRAPH where it saves host time: that frees a core, and keeps the pace on a slower host.
    if host.us < -MIN_GAIN * host.kernels_us or host.noise_us > host.allowed_us:
        return ReasonCode.SAVES_HOST_TIME, host.is_less and span.most_us <= span.allowed_us
    if span.is_less:
        return ReasonCode.FASTER, True
    return ReasonCode.NO_GAIN, span.least_us >= -span.allowed_us


@dataclass(frozen=True, slots=True)
class _Difference:
    """How much longer GRAPH takes than KERNELS: the difference of two medians, and by how much it may be wrong, in microseconds."""

    us: float
    noise_us: float
    kernels_us: float

    @property
    def is_more(self) -> bool:
        """Whether GRAPH takes longer by more than the noise and 2 %."""
        return self.us > max(self.noise_us, MIN_GAIN * self.kernels_us)

    @property
    def is_less(self) -> bool:
        """Whether KERNELS take longer by more than the noise and 2 %."""
        return -self.us > max(self.noise_us, MIN_GAIN * self.kernels_us)

    @property
    def most_us(self) -> float:
        """The largest difference that the noise allows."""
        return self.us + self.noise_us

    @property
    def least_us(self) -> float:
        """The smallest difference that the noise allows."""
        return self.us - self.noise_us

    @property
    def allowed_us(self) -> float:
        """By how much the answer may be wrong without being provisional."""
        return MAX_DOUBT * self.kernels_us


def _host_difference(graph: Measurement, kernels: Measurement) -> _Difference:
    return _difference(
        graph.host_us, kernels.host_us, _error(graph, graph.host_mad_us), _error(kernels, kernels.host_mad_us)
    )


def _span_difference(graph: Measurement, kernels: Measurement) -> _Difference:
    return _difference(
        graph.span_us, kernels.span_us, _error(graph, graph.span_mad_us), _error(kernels, kernels.span_mad_us)
    )


def _interval_difference(graph: Measurement, kernels: Measurement) -> _Difference:
    return _difference(graph.median_us, kernels.median_us, _error(graph, None), _error(kernels, None))


def _difference(graph_us: float, kernels_us: float, graph_error: float, kernels_error: float) -> _Difference:
    # Errors of independent medians add up in squares.
    return _Difference(
        graph_us - kernels_us, NOISE_FACTOR * math.hypot(graph_error, kernels_error), kernels_us
    )


def _error(measurement: Measurement, mad_us: float | None) -> float:
    """Return the standard error of a median in microseconds. `mad_us` None, from an older version: that of the interval is used."""
    return (
        _ERROR_OF_MEDIAN * (measurement.mad_us if mad_us is None else mad_us) / math.sqrt(measurement.samples)
    )
