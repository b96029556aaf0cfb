"""The policy: GRAPH unless it is known to take longer, whatever the order of its input, and never sure of what noise may have made."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pygraphd.schema import policy
from pygraphd.schema.messages import Decision, Deployment, Measurement
from pygraphd.schema.policy import MIN_SAMPLES, POLICY_VERSION, decide, is_noisy, reason_text
from pygraphd.schema.reasons import Reason, ReasonCode

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
AGAINST_KERNELS = {
    ReasonCode.SAVES_HOST_TIME: ReasonCode.TAKES_MORE_HOST_TIME,
    ReasonCode.SAVES_MORE_HOST_TIME: ReasonCode.TAKES_MORE_HOST_TIME,
    ReasonCode.FASTER: ReasonCode.SLOWER,
}
HOST_US, SPAN_US, INTERVAL_US = 400.0, 300.0, 1_000.0
"""What KERNELS take in the examples."""

TIMES = st.floats(1, 1e6)
NOISE = st.floats(0, 1) | st.floats(0, 1e4) | st.floats(0, 1e6)
SAMPLES = st.integers(MIN_SAMPLES, 40)


def of(deployment: Deployment, samples: st.SearchStrategy[int] = SAMPLES) -> st.SearchStrategy[Measurement]:
    """Return measurements whose times have nothing to do with each other."""
    busy, spread = st.floats(0, 1), NOISE | st.none()
    return st.builds(
        Measurement, st.just(deployment), samples, TIMES, NOISE, TIMES, TIMES, busy, spread, spread
    )


def kernels(noise: float = 0.0) -> Measurement:
    """Return what KERNELS take; `noise` is the share by which samples deviate."""
    return graph(1.0, 1.0, 1.0, noise, deployment=KERNELS)


def graph(
    host: float, span: float, interval: float, noise: float = 0.0, deployment: Deployment = GRAPH
) -> Measurement:
    """Return what GRAPH takes, as multiples of KERNELS' times."""
    host_us, span_us, interval_us = host * HOST_US, span * SPAN_US, interval * INTERVAL_US
    mads = interval_us * noise, host_us * noise, span_us * noise
    return Measurement(deployment, 8, interval_us, mads[0], host_us, span_us, 0.0, mads[1], mads[2])


def changed(measurement: Measurement, factor: float, noise: float) -> Measurement:
    """Return a measurement on a machine that is slower by a factor, and noisier by another."""

    def wider(mad_us: float | None) -> float | None:
        return None if mad_us is None else noise * factor * mad_us

    return dataclasses.replace(
        measurement,
        median_us=factor * measurement.median_us,
        mad_us=noise * factor * measurement.mad_us,
        host_us=factor * measurement.host_us,
        span_us=factor * measurement.span_us,
        host_mad_us=wider(measurement.host_mad_us),
        span_mad_us=wider(measurement.span_mad_us),
    )


@pytest.mark.parametrize(
    ("host", "span", "interval", "deployment", "code"),
    [
        (
            0.2,
            1.0,
            1.0,
            GRAPH,
            ReasonCode.SAVES_HOST_TIME,
        ),  # also where the GPU bounds the step, and nothing is won by it
        (0.2, 1.019, 1.0, GRAPH, ReasonCode.SAVES_HOST_TIME),
        (0.97, 1.0, 1.0, GRAPH, ReasonCode.SAVES_HOST_TIME),
        (0.2, 0.5, 0.4, GRAPH, ReasonCode.SAVES_HOST_TIME),
        (0.2, 1.05, 1.0, GRAPH, ReasonCode.SAVES_MORE_HOST_TIME),
        (0.2, 1.2, 0.9, GRAPH, ReasonCode.FASTER),
        (0.2, 1.2, 1.0, KERNELS, ReasonCode.LONGER_ON_GPU),
        (0.2, 1.2, 1.1, KERNELS, ReasonCode.LONGER_ON_GPU),
        (0.99, 1.0, 1.0, KERNELS, ReasonCode.NO_GAIN),
        (0.99, 0.9, 1.0, GRAPH, ReasonCode.FASTER),
        (1.1, 1.0, 1.0, KERNELS, ReasonCode.LONGER_ON_HOST),
        (1.1, 0.5, 0.6, GRAPH, ReasonCode.FASTER),
        (1.1, 1.1, 1.1, KERNELS, ReasonCode.LONGER_ON_GPU),
    ],
)
def test_graph_is_chosen_unless_it_takes_longer(
    host: float, span: float, interval: float, deployment: Deployment, code: ReasonCode
) -> None:
    decision = decide([graph(host, span, interval), kernels()])

    assert (decision.deployment, decision.reason, decision.final) == (deployment, Reason(code), True)
    against = {GRAPH: code, KERNELS: AGAINST_KERNELS.get(code)}
    assert decision.against.code is against[KERNELS if deployment is GRAPH else GRAPH]


@pytest.mark.parametrize("noise", [0.05, 0.3, 1.0, 10.0])
def test_a_noisy_machine_leads_to_graph_where_it_saves_host_time(noise: float) -> None:
    """The host is busiest when graphs help most."""
    assert decide([graph(0.3, 1.0, 0.8, noise), kernels(noise)]).deployment is GRAPH


def test_a_host_so_noisy_that_graph_seems_to_cost_more_leads_to_graph_for_now() -> None:
    unlucky = graph(1.1, 1.0, 1.1, noise=0.5)

    decision = decide([unlucky, kernels(0.5)])

    assert (decision.deployment, decision.reason.code) == (GRAPH, ReasonCode.SAVES_HOST_TIME)
    assert (decision.policy, decision.final) == (POLICY_VERSION, False)


@pytest.mark.parametrize(
    ("host", "span", "interval"), [(0.3, 1.0, 0.8), (0.3, 1.3, 1.0), (0.99, 1.0, 1.0), (1.3, 1.0, 1.0)]
)
@pytest.mark.parametrize("noise", [0.2, 0.5])
def test_what_is_noisy_is_provisional(host: float, span: float, interval: float, noise: float) -> None:
    quiet = decide([graph(host, span, interval), kernels()])
    noisy = decide([graph(host, span, interval, noise), kernels(noise)])

    assert quiet.final
    assert not noisy.final
    assert is_noisy(noisy.reason, final=noisy.final)
    assert not is_noisy(quiet.reason, final=quiet.final)
    assert "too noisy" in reason_text(noisy.reason, final=noisy.final)
    assert reason_text(quiet.reason, final=quiet.final) == str(quiet.reason)


def test_spreads_that_an_old_version_did_not_store_are_those_of_the_interval() -> None:
    one, other = graph(0.3, 1.03, 1.0, noise=0.02), kernels(0.02)
    old = [dataclasses.replace(each, host_mad_us=None, span_mad_us=None) for each in (one, other)]
    same = [dataclasses.replace(each, host_mad_us=each.mad_us, span_mad_us=each.mad_us) for each in old]

    assert decide(old) == decide(same)


@given(of(GRAPH, st.integers(1, 40)), of(KERNELS, st.integers(1, 40)))
def test_too_few_samples_of_either_decide_nothing(one: Measurement, other: Measurement) -> None:
    assume(min(one.samples, other.samples) < MIN_SAMPLES)
    why = Reason(ReasonCode.TOO_FEW_CALLS)
    nothing = Decision(KERNELS, why, POLICY_VERSION, final=False, against=why)

    assert decide([one, other]) == decide([one]) == decide([other]) == decide([]) == nothing


@given(of(GRAPH), of(KERNELS))
def test_the_order_is_irrelevant(one: Measurement, other: Measurement) -> None:
    assert decide([one, other]) == decide([other, one])


@given(of(GRAPH), of(KERNELS), st.sampled_from([0.25, 0.5, 2.0, 4.0]))
def test_a_machine_that_is_slower_in_all_decides_the_same(
    one: Measurement, other: Measurement, factor: float
) -> None:
    assert decide([changed(one, factor, 1), changed(other, factor, 1)]) == decide([one, other])


@given(of(KERNELS))
def test_what_takes_the_same_is_not_recorded_for_nothing(other: Measurement) -> None:
    decision = decide([dataclasses.replace(other, deployment=GRAPH), other])

    assert decision.deployment is KERNELS or not decision.final


@given(of(GRAPH), of(KERNELS))
def test_graph_for_good_loses_at_most_a_tenth_on_the_gpu_or_wins_elsewhere(
    one: Measurement, other: Measurement
) -> None:
    decision = decide([one, other])
    assume(decision.final and decision.deployment is GRAPH)

    saved_us, lost_us = other.host_us - one.host_us, one.span_us - other.span_us
    if decision.reason.code is ReasonCode.SAVES_HOST_TIME:
        assert saved_us > policy.MIN_GAIN * other.host_us
        assert lost_us <= policy.MAX_DOUBT * other.span_us
    elif decision.reason.code is ReasonCode.SAVES_MORE_HOST_TIME:
        assert lost_us <= policy.MAX_LOSS * saved_us
        assert one.span_us <= other.host_us
    else:
        gains = other.median_us / one.median_us, other.span_us / one.span_us
        assert max(gains) > 1 / (1 - policy.MIN_GAIN) - 1e-9


@given(of(GRAPH), of(KERNELS), st.floats(1e-6, 0.899), st.floats(1e-6, 1))
def test_kernels_are_chosen_only_for_a_reason(
    one: Measurement, other: Measurement, host: float, span: float
) -> None:
    """Where GRAPH saves host time and takes no longer on the GPU, it is chosen, however noisy that was."""
    one = dataclasses.replace(one, host_us=host * other.host_us, span_us=span * other.span_us)

    assert decide([one, other]).deployment is GRAPH


@given(of(GRAPH), of(KERNELS), st.floats(1, 100))
def test_noise_makes_nothing_final(one: Measurement, other: Measurement, noise: float) -> None:
    """What stays chosen for the same reason is no surer with more noise."""
    before, after = decide([one, other]), decide([changed(one, 1, noise), changed(other, 1, noise)])
    assume((before.deployment, before.reason) == (after.deployment, after.reason))

    assert before.final or not after.final


@given(of(GRAPH), of(KERNELS), st.floats(1e-6, 0.899), *[st.floats(0.01, 1)] * 3)
def test_a_graph_that_takes_less_in_all_is_not_given_up_for_kernels(
    one: Measurement, other: Measurement, share: float, host: float, span: float, interval: float
) -> None:
    one = dataclasses.replace(one, host_us=share * other.host_us)
    assume(decide([one, other]).deployment is GRAPH)
    less = dataclasses.replace(
        one, host_us=host * one.host_us, span_us=span * one.span_us, median_us=interval * one.median_us
    )

    assert decide([less, other]).deployment is GRAPH
