"""The policy captures only what wins for sure, whatever the order of its input."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.schema import policy
from pygraphd.schema.messages import Conditions, Decision, Deployment, Measurement

LAUNCH, TREES, RELOCATE = Deployment.LAUNCH, Deployment.TREES, Deployment.RELOCATE


def measured(deployment: Deployment, median: float, mad: float = 0.0, samples: int = 8) -> Measurement:
    return Measurement(deployment, samples, median, mad, median, median, 0.0)


def decide(*measurements: Measurement, forward_in_trees: bool | None = None) -> Decision:
    return policy.decide(measurements, Conditions(forward_in_trees))


TIMES = st.floats(1, 1e6)
NOISE = st.floats(0, 1e4)
SAMPLES = st.integers(1, 40)
FOR_ITSELF = st.builds(Conditions, st.sampled_from([None, True, False]))
CONDITIONS = FOR_ITSELF | st.builds(Conditions, st.none(), st.floats(0, 1e6))
LAUNCHES = st.builds(measured, st.just(LAUNCH), TIMES, NOISE, SAMPLES)
CANDIDATES = st.builds(measured, st.sampled_from([TREES, RELOCATE]), TIMES, NOISE, SAMPLES)
CLEAR = st.sampled_from([TREES, RELOCATE]).flatmap(
    lambda deployment: st.builds(measured, st.just(deployment), TIMES, st.floats(0, 1), st.integers(8, 40))
)
ONE_OF_EACH = st.lists(
    LAUNCHES | CANDIDATES | CLEAR, max_size=3, unique_by=lambda measurement: measurement.deployment
)


def with_median(measurements: list[Measurement], which: Deployment, factor: float) -> list[Measurement]:
    """Return the same measurements, but with another median of one deployment."""
    return [
        dataclasses.replace(m, median_us=m.median_us * factor) if m.deployment is which else m
        for m in measurements
    ]


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
    decision = decide(measured(LAUNCH, launch), measured(TREES, trees))

    assert decision == Decision(deployment, reason, policy.POLICY_VERSION)


def test_a_gain_within_the_noise_is_none() -> None:
    decision = decide(measured(LAUNCH, 100, mad=10), measured(TREES, 90, mad=10))

    assert decision.deployment is LAUNCH


@pytest.mark.parametrize(
    ("span_us", "deployment"), [(40.0, TREES), (60.0, TREES), (61.0, LAUNCH), (140.0, LAUNCH)]
)
def test_host_time_is_not_bought_with_the_gpus(span_us: float, deployment: Deployment) -> None:
    """Of 100 us of host time 40 are saved: 10 us of the GPU may be lost for that."""
    launch = dataclasses.replace(measured(LAUNCH, 100.0), host_us=100.0, span_us=50.0)
    trees = dataclasses.replace(measured(TREES, 60.0), host_us=60.0, span_us=span_us)

    assert decide(launch, trees).deployment is deployment


def test_the_best_of_several_is_taken() -> None:
    decision = decide(measured(LAUNCH, 100), measured(TREES, 60), measured(RELOCATE, 50))

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
    decision = decide(*measurements)

    assert decision == Decision(LAUNCH, policy.TOO_FEW_CALLS, policy.POLICY_VERSION, final=False)


@pytest.mark.parametrize(
    ("medians", "in_trees", "out_of_trees"),
    [
        ((100, 200), LAUNCH, LAUNCH),
        ((100, 50), TREES, LAUNCH),
        ((100, 50, 70), TREES, RELOCATE),
        ((100, 50, 99.9), TREES, LAUNCH),
        ((100, 50, 40), RELOCATE, RELOCATE),
    ],
)
def test_a_backward_runs_in_trees_only_if_its_forward_does(
    medians: tuple[float, ...], in_trees: Deployment, out_of_trees: Deployment
) -> None:
    measurements = [
        measured(each, time) for each, time in zip((LAUNCH, TREES, RELOCATE), medians, strict=False)
    ]

    assert decide(*measurements, forward_in_trees=None).deployment is in_trees
    assert decide(*measurements, forward_in_trees=True).deployment is in_trees
    assert decide(*measurements, forward_in_trees=False).deployment is out_of_trees


def test_a_backward_that_is_launched_for_its_forwards_sake_says_so() -> None:
    decision = decide(measured(LAUNCH, 100), measured(TREES, 50), forward_in_trees=False)

    assert decision == Decision(LAUNCH, policy.FORWARD_NOT_IN_TREES, policy.POLICY_VERSION)


@pytest.mark.parametrize(
    ("gain_us", "deployment"), [(None, RELOCATE), (0, RELOCATE), (25, RELOCATE), (35, TREES), (1000, TREES)]
)
def test_a_forward_runs_in_trees_if_its_backward_gains_more_there(
    gain_us: float | None, deployment: Deployment
) -> None:
    measurements = [measured(LAUNCH, 100), measured(TREES, 80), measured(RELOCATE, 50)]

    decision = policy.decide(measurements, Conditions(backward_gain_us=gain_us))

    assert decision.deployment is deployment
    assert (decision.reason == policy.FOR_ITS_BACKWARD) == (deployment is TREES)


@pytest.mark.parametrize(
    ("medians", "gain_us", "chosen"),
    [
        ({LAUNCH: 100, TREES: 98.5, RELOCATE: 95}, 3, RELOCATE),
        ({LAUNCH: 100, TREES: 98.5, RELOCATE: 95}, 4, TREES),
        ({LAUNCH: 100, TREES: 98.5, RELOCATE: 99}, 1, TREES),  # for itself it is launched
        ({LAUNCH: 100, TREES: 130}, 29, LAUNCH),
        ({LAUNCH: 100, TREES: 130}, 31, TREES),
        ({LAUNCH: 100, TREES: 60}, 0, TREES),
        ({LAUNCH: 100, RELOCATE: 50}, 1e6, RELOCATE),
    ],
)
def test_what_a_step_takes_is_compared(
    medians: dict[Deployment, float], gain_us: float, chosen: Deployment
) -> None:
    # On the GPU all take as long: what differs is the host's time.
    measurements = [
        dataclasses.replace(measured(*each), span_us=40.0, host_us=100.0) for each in medians.items()
    ]

    assert policy.decide(measurements, Conditions(backward_gain_us=gain_us)).deployment is chosen


@pytest.mark.parametrize(
    "trees",
    [
        measured(TREES, 80, mad=1e6),
        measured(TREES, 80, samples=7),
        dataclasses.replace(
            measured(TREES, 80), span_us=150.0
        ),  # where the GPU is busy, that is lost all the time
    ],
)
def test_a_forward_whose_time_in_trees_is_not_known_well_is_not_sent_there_for_its_backward(
    trees: Measurement,
) -> None:
    measurements = [measured(LAUNCH, 100), trees, measured(RELOCATE, 50)]

    assert policy.decide(measurements, Conditions(backward_gain_us=1e5)).deployment is RELOCATE


def test_parts_of_a_forward_come_to_the_same_answer_whatever_their_noise() -> None:
    parts = [
        [measured(LAUNCH, 100), measured(TREES, 59, mad=0.1), measured(RELOCATE, 50)],
        [measured(LAUNCH, 100), measured(TREES, 52, mad=4), measured(RELOCATE, 50)],
    ]
    losses = [policy.loss_in_trees_us(each) or 0.0 for each in parts]

    for gain_us in (12.0, 19.0, 20.0, 30.0):
        left = [max(0.0, gain_us - losses[1]), max(0.0, gain_us - losses[0])]
        chosen = {
            policy.decide(part, Conditions(backward_gain_us=gain)).deployment
            for part, gain in zip(parts, left, strict=True)
        }
        assert chosen == {TREES if gain_us > sum(losses) else RELOCATE}


@pytest.mark.parametrize(
    ("medians", "loss_us"),
    [
        ({LAUNCH: 100, TREES: 60}, 0),
        ({LAUNCH: 100, TREES: 60, RELOCATE: 50}, 10),
        ({LAUNCH: 100, TREES: 99}, 0),
        ({LAUNCH: 100, TREES: 120}, None),  # it takes as much longer on the GPU, too
        ({LAUNCH: 100, RELOCATE: 50}, None),
        ({TREES: 60}, None),
        ({}, None),
    ],
)
def test_what_is_lost_in_trees_is_what_they_take_longer_than_the_fastest_way(
    medians: dict[Deployment, float], loss_us: float | None
) -> None:
    assert policy.loss_in_trees_us([measured(*each) for each in medians.items()]) == loss_us


@given(ONE_OF_EACH, st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_larger_gain_of_the_backward_never_takes_a_forward_out_of_trees(
    measurements: list[Measurement], one: float, other: float
) -> None:
    less, more = (
        policy.decide(measurements, Conditions(backward_gain_us=gain_us)) for gain_us in sorted((one, other))
    )

    assert more == less or more == Decision(TREES, policy.FOR_ITS_BACKWARD, policy.POLICY_VERSION)


@pytest.mark.parametrize(
    ("medians", "gain_us"),
    [
        ({LAUNCH: 100, TREES: 60}, 40),
        ({LAUNCH: 100, TREES: 60, RELOCATE: 90}, 30),
        ({LAUNCH: 100, TREES: 60, RELOCATE: 50}, 0),
        ({LAUNCH: 100, TREES: 99}, 0),
        ({LAUNCH: 100, RELOCATE: 50}, 0),
        ({TREES: 60}, 0),
        ({}, 0),
    ],
)
def test_what_is_gained_in_trees_is_what_they_save_over_the_best_of_all_else(
    medians: dict[Deployment, float], gain_us: float
) -> None:
    assert policy.gain_in_trees_us([measured(*each) for each in medians.items()]) == gain_us


def test_what_may_be_noise_is_no_gain_in_trees() -> None:
    measurements = [measured(LAUNCH, 1000), measured(TREES, 60, mad=20), measured(RELOCATE, 70, mad=20)]

    assert policy.gain_in_trees_us(measurements) == 0


@given(ONE_OF_EACH, CONDITIONS)
def test_the_order_of_measurements_is_irrelevant(
    measurements: list[Measurement], conditions: Conditions
) -> None:
    decision = policy.decide(measurements, conditions)

    assert policy.decide(measurements[::-1], conditions) == decision
    assert policy.decide(measurements[1:] + measurements[:1], conditions) == decision
    assert policy.decide(tuple(measurements), conditions) == decision


@given(ONE_OF_EACH, CONDITIONS, st.floats(0.1, 1.0))
def test_a_capture_that_is_faster_still_is_chosen_all_the_same(
    measurements: list[Measurement], conditions: Conditions, factor: float
) -> None:
    chosen = policy.decide(measurements, conditions).deployment
    faster = with_median(measurements, chosen, factor)

    if chosen is not LAUNCH:
        assert policy.decide(faster, conditions).deployment is chosen


@given(ONE_OF_EACH, CONDITIONS, st.floats(1.0, 10.0))
def test_a_slower_launch_never_makes_a_capture_a_launch(
    measurements: list[Measurement], conditions: Conditions, factor: float
) -> None:
    chosen = policy.decide(measurements, conditions).deployment
    slower = with_median(measurements, LAUNCH, factor)

    if chosen is not LAUNCH:
        assert policy.decide(slower, conditions).deployment is not LAUNCH


@given(ONE_OF_EACH, CONDITIONS, st.floats(0.1, 1.0))
def test_a_faster_launch_never_makes_a_launch_a_capture(
    measurements: list[Measurement], conditions: Conditions, factor: float
) -> None:
    faster = with_median(measurements, LAUNCH, factor)

    if policy.decide(measurements, conditions).deployment is LAUNCH:
        assert policy.decide(faster, conditions).deployment is LAUNCH


@given(ONE_OF_EACH, FOR_ITSELF)
def test_what_is_captured_was_measured_enough_and_is_faster_than_launching(
    measurements: list[Measurement], conditions: Conditions
) -> None:
    by_deployment = {m.deployment: m for m in measurements}
    chosen = policy.decide(measurements, conditions)

    if chosen.deployment is not LAUNCH:
        candidate, launch = by_deployment[chosen.deployment], by_deployment[LAUNCH]
        assert candidate.median_us < (1 - policy.MIN_GAIN) * launch.median_us
        assert min(candidate.samples, launch.samples) >= policy.MIN_SAMPLES
        assert chosen.final


@given(LAUNCHES, st.sampled_from([TREES, RELOCATE]), FOR_ITSELF)
def test_a_tie_is_launched(launch: Measurement, deployment: Deployment, conditions: Conditions) -> None:
    tied = dataclasses.replace(launch, deployment=deployment)

    assert policy.decide([launch, tied], conditions).deployment is LAUNCH


@given(ONE_OF_EACH, CONDITIONS)
def test_only_a_decision_with_enough_samples_of_two_is_final(
    measurements: list[Measurement], conditions: Conditions
) -> None:
    enough = {m.deployment for m in measurements if m.samples >= policy.MIN_SAMPLES}

    assert policy.decide(measurements, conditions).final == (LAUNCH in enough and len(enough) > 1)


@given(ONE_OF_EACH)
def test_a_backward_whose_forward_is_in_no_tree_never_runs_in_them(measurements: list[Measurement]) -> None:
    assert decide(*measurements, forward_in_trees=False).deployment is not TREES


@given(LAUNCHES, CANDIDATES, st.floats(1.0, 10.0))
def test_more_noise_never_captures_more(launch: Measurement, candidate: Measurement, factor: float) -> None:
    noisier = dataclasses.replace(candidate, mad_us=min(candidate.mad_us * factor, 1e9))

    if decide(launch, candidate).deployment is LAUNCH:
        assert decide(launch, noisier).deployment is LAUNCH


@given(ONE_OF_EACH)
def test_one_more_candidate_never_makes_a_capture_a_launch(measurements: list[Measurement]) -> None:
    without = [each for each in measurements if each.deployment is not RELOCATE]

    if decide(*without).deployment is not LAUNCH:
        assert decide(*measurements).deployment is not LAUNCH


def test_a_noisy_candidate_does_not_hide_one_that_wins_for_sure() -> None:
    measurements = [measured(LAUNCH, 100), measured(TREES, 59, mad=40), measured(RELOCATE, 60)]

    assert decide(*measurements).deployment is RELOCATE
