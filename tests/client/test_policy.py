"""The policy captures only what wins for sure, whatever the order of its input."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client import policy
from pygraphd.schema.messages import Deployment, Measurement

LAUNCH, TREES, RELOCATE = Deployment.LAUNCH, Deployment.TREES, Deployment.RELOCATE


def measured(deployment: Deployment, median: float, mad: float = 0.0, samples: int = 8) -> Measurement:
    return Measurement(deployment, samples, median, mad, median, median, 0.0)


TIMES = st.floats(1, 1e6)
MEASUREMENTS = st.builds(
    measured, st.sampled_from([TREES, RELOCATE]), TIMES, st.floats(0, 1e4), st.integers(1, 40)
)
LAUNCHES = st.builds(measured, st.just(LAUNCH), TIMES, st.floats(0, 1e4), st.integers(1, 40))


@pytest.mark.parametrize(
    ("launch", "trees", "deployment", "reason"),
    [
        (100.0, 50.0, TREES, "TREES is faster"),
        (100.0, 97.9, TREES, "TREES is faster"),
        (100.0, 98.1, LAUNCH, policy.NO_GAIN),
        (100.0, 100.0, LAUNCH, policy.NO_GAIN),
        (100.0, 150.0, LAUNCH, policy.NO_GAIN),
    ],
)
def test_a_capture_must_win_by_two_percent(
    launch: float, trees: float, deployment: Deployment, reason: str
) -> None:
    decision = policy.decide([measured(LAUNCH, launch), measured(TREES, trees)])

    assert (decision.deployment, decision.reason, decision.final) == (deployment, reason, True)


def test_a_gain_within_the_noise_is_none() -> None:
    decision = policy.decide([measured(LAUNCH, 100, mad=10), measured(TREES, 90, mad=10)])

    assert decision.deployment is LAUNCH


def test_the_best_of_several_is_taken() -> None:
    decision = policy.decide([measured(LAUNCH, 100), measured(TREES, 60), measured(RELOCATE, 50)])

    assert decision.deployment is RELOCATE


@pytest.mark.parametrize(
    "measurements",
    [
        [],
        [measured(LAUNCH, 100)],
        [measured(TREES, 1)],
        [measured(LAUNCH, 100, samples=7), measured(TREES, 1)],
        [measured(LAUNCH, 100), measured(TREES, 1, samples=7)],
    ],
    ids=range(5),
)
def test_too_few_samples_decide_nothing_for_good(measurements: list[Measurement]) -> None:
    decision = policy.decide(measurements)

    assert (decision.deployment, decision.final) == (LAUNCH, False)


@given(LAUNCHES, MEASUREMENTS, MEASUREMENTS)
def test_the_order_of_measurements_is_irrelevant(
    launch: Measurement, one: Measurement, two: Measurement
) -> None:
    if one.deployment is two.deployment:
        return
    assert policy.decide([launch, one, two]) == policy.decide([two, one, launch])


@given(LAUNCHES, MEASUREMENTS, st.floats(0.1, 1.0))
def test_a_faster_capture_is_never_rejected_where_a_slower_one_was_taken(
    launch: Measurement, candidate: Measurement, factor: float
) -> None:
    faster = dataclasses.replace(candidate, median_us=candidate.median_us * factor)

    if policy.decide([launch, candidate]).deployment is not LAUNCH:
        assert policy.decide([launch, faster]).deployment is not LAUNCH


@given(LAUNCHES, MEASUREMENTS)
def test_what_is_captured_is_faster_than_launching(launch: Measurement, candidate: Measurement) -> None:
    if policy.decide([launch, candidate]).deployment is not LAUNCH:
        assert candidate.median_us < (1 - policy.MIN_GAIN) * launch.median_us


@given(LAUNCHES, MEASUREMENTS, st.floats(1.0, 10.0))
def test_more_noise_never_captures_more(launch: Measurement, candidate: Measurement, factor: float) -> None:
    noisier = dataclasses.replace(candidate, mad_us=min(candidate.mad_us * factor, 1e9))

    if policy.decide([launch, candidate]).deployment is LAUNCH:
        assert policy.decide([launch, noisier]).deployment is LAUNCH
