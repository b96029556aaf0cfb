"""The policy captures only what wins for sure, whatever the order of its input."""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from pygraphd.schema import policy
from pygraphd.schema.messages import Conditions, Decision, Deployment, Measurement

if TYPE_CHECKING:
    from collections.abc import Callable

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH


def measured(deployment: Deployment, median: float, mad: float = 0.0, samples: int = 8) -> Measurement:
    return Measurement(deployment, samples, median, mad, median, median, 0.0)


def decide(*measurements: Measurement, forward_in_trees: bool | None = None) -> Decision:
    return policy.decide(measurements, Conditions(forward_in_trees))


TIMES = st.floats(1, 1e6)
NOISE = st.floats(0, 1) | st.floats(0, 1e4) | st.floats(0, 1e6)
SAMPLES = st.integers(1, 40) | st.integers(policy.MIN_SAMPLES, 40)
GAINS = st.floats(0, 1e6)
CONDITIONS = st.builds(Conditions, st.sampled_from([None, True, False])) | st.builds(
    Conditions, st.none(), GAINS
)
"""Those of a backward, or of a forward: no graph has both."""
ANY_CONDITIONS = st.builds(Conditions, st.sampled_from([None, True, False]), st.none() | GAINS)


def of(deployments: st.SearchStrategy[Deployment]) -> st.SearchStrategy[Measurement]:
    """Return measurements whose times have nothing to do with each other."""
    return st.builds(Measurement, deployments, SAMPLES, TIMES, NOISE, TIMES, TIMES, st.floats(0, 1))


LAUNCHES = of(st.just(KERNELS))
CANDIDATES = of(st.sampled_from([TREES, GRAPH]))
ONE_OF_EACH = st.permutations([KERNELS, TREES, GRAPH]).flatmap(
    lambda order: st.tuples(*(of(st.just(each)) for each in order)).map(list)
)
SOME = st.lists(LAUNCHES | CANDIDATES, max_size=3, unique_by=lambda each: each.deployment) | ONE_OF_EACH
LESS = st.tuples(*[st.floats(0.1, 1.0)] * 3)
MORE = st.tuples(*[st.floats(1.0, 10.0)] * 3)

Factors = tuple[float, float, float]


def scaled(measurements: list[Measurement], which: Deployment, factors: Factors) -> list[Measurement]:
    """Return the same measurements, but with other times of one deployment: its cost, the host's, the GPU's."""
    cost, host, span = factors
    return [
        dataclasses.replace(
            each, median_us=each.median_us * cost, host_us=each.host_us * host, span_us=each.span_us * span
        )
        if each.deployment is which
        else each
        for each in measurements
    ]


def loses_too_much(candidate: Measurement, launch: Measurement) -> bool:
    """Whether more is lost on the GPU than a quarter of what is saved on the host."""
    saved, lost = launch.host_us - candidate.host_us, candidate.span_us - launch.span_us
    return lost > 0 and (saved <= 0 or lost > saved / 4)


@pytest.mark.parametrize(
    ("launch", "trees", "deployment", "reason"),
    [
        (100.0, 50.0, TREES, "TREES is faster"),
        (100.0, 97.9, TREES, "TREES is faster"),
        (100.0, 98.1, KERNELS, policy.NO_GAIN),
        (100.0, 100.0, KERNELS, policy.NO_GAIN),
        (100.0, 150.0, KERNELS, policy.NO_GAIN),
    ],
)
def test_a_capture_must_win_by_two_percent(
    launch: float, trees: float, deployment: Deployment, reason: str
) -> None:
    decision = decide(measured(KERNELS, launch), measured(TREES, trees))

    assert decision == Decision(deployment, reason, policy.POLICY_VERSION)


def test_a_gain_within_the_noise_is_none() -> None:
    decision = decide(measured(KERNELS, 100, mad=10), measured(TREES, 90, mad=10))

    assert decision.deployment is KERNELS


@pytest.mark.parametrize(
    ("span_us", "deployment"), [(40.0, TREES), (60.0, TREES), (61.0, KERNELS), (140.0, KERNELS)]
)
def test_host_time_is_not_bought_with_the_gpus(span_us: float, deployment: Deployment) -> None:
    """Of 100 us of host time 40 are saved: 10 us of the GPU may be lost for that."""
    launch = dataclasses.replace(measured(KERNELS, 100.0), host_us=100.0, span_us=50.0)
    trees = dataclasses.replace(measured(TREES, 60.0), host_us=60.0, span_us=span_us)

    assert decide(launch, trees).deployment is deployment


def test_the_best_of_several_is_taken() -> None:
    decision = decide(measured(KERNELS, 100), measured(TREES, 60), measured(GRAPH, 50))

    assert decision.deployment is GRAPH


@pytest.mark.parametrize(
    "measurements",
    [
        [],
        [measured(KERNELS, 100)],
        [measured(TREES, 1)],
        [measured(KERNELS, 100, samples=7), measured(TREES, 1)],
        [measured(KERNELS, 100), measured(TREES, 1, samples=7)],
    ],
    ids=range(5),
)
def test_too_few_samples_decide_nothing_for_good(measurements: list[Measurement]) -> None:
    decision = decide(*measurements)

    assert decision == Decision(KERNELS, policy.TOO_FEW_CALLS, policy.POLICY_VERSION, final=False)


@pytest.mark.parametrize(
    ("medians", "in_trees", "out_of_trees"),
    [
        ((100, 200), KERNELS, KERNELS),
        ((100, 50), TREES, KERNELS),
        ((100, 50, 70), TREES, GRAPH),
        ((100, 50, 99.9), TREES, KERNELS),
        ((100, 50, 40), GRAPH, GRAPH),
    ],
)
def test_a_backward_runs_in_trees_only_if_its_forward_does(
    medians: tuple[float, ...], in_trees: Deployment, out_of_trees: Deployment
) -> None:
    measurements = [
        measured(each, time) for each, time in zip((KERNELS, TREES, GRAPH), medians, strict=False)
    ]

    assert decide(*measurements, forward_in_trees=None).deployment is in_trees
    assert decide(*measurements, forward_in_trees=True).deployment is in_trees
    assert decide(*measurements, forward_in_trees=False).deployment is out_of_trees


def test_a_backward_that_is_launched_for_its_forwards_sake_says_so() -> None:
    decision = decide(measured(KERNELS, 100), measured(TREES, 50), forward_in_trees=False)

    assert decision == Decision(KERNELS, policy.FORWARD_NOT_IN_TREES, policy.POLICY_VERSION)


@pytest.mark.parametrize(
    ("gain_us", "deployment"), [(None, GRAPH), (0, GRAPH), (25, GRAPH), (35, TREES), (1000, TREES)]
)
def test_a_forward_runs_in_trees_if_its_backward_gains_more_there(
    gain_us: float | None, deployment: Deployment
) -> None:
    measurements = [measured(KERNELS, 100), measured(TREES, 80), measured(GRAPH, 50)]

    decision = policy.decide(measurements, Conditions(backward_gain_us=gain_us))

    assert decision.deployment is deployment
    assert (decision.reason == policy.FOR_ITS_BACKWARD) == (deployment is TREES)


@pytest.mark.parametrize(
    ("medians", "gain_us", "chosen"),
    [
        ({KERNELS: 100, TREES: 98.5, GRAPH: 95}, 3, GRAPH),
        ({KERNELS: 100, TREES: 98.5, GRAPH: 95}, 4, TREES),
        ({KERNELS: 100, TREES: 98.5, GRAPH: 99}, 1, TREES),  # for itself it is launched
        ({KERNELS: 100, TREES: 130}, 29, KERNELS),
        ({KERNELS: 100, TREES: 130}, 31, TREES),
        ({KERNELS: 100, TREES: 60}, 0, TREES),
        ({KERNELS: 100, GRAPH: 50}, 1e6, GRAPH),
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
    measurements = [measured(KERNELS, 100), trees, measured(GRAPH, 50)]

    assert policy.decide(measurements, Conditions(backward_gain_us=1e5)).deployment is GRAPH


def test_parts_of_a_forward_come_to_the_same_answer_whatever_their_noise() -> None:
    parts = [
        [measured(KERNELS, 100), measured(TREES, 59, mad=0.1), measured(GRAPH, 50)],
        [measured(KERNELS, 100), measured(TREES, 52, mad=4), measured(GRAPH, 50)],
    ]
    losses = [policy.loss_in_trees_us(each) or 0.0 for each in parts]

    for gain_us in (12.0, 19.0, 20.0, 30.0):
        left = [max(0.0, gain_us - losses[1]), max(0.0, gain_us - losses[0])]
        chosen = {
            policy.decide(part, Conditions(backward_gain_us=gain)).deployment
            for part, gain in zip(parts, left, strict=True)
        }
        assert chosen == {TREES if gain_us > sum(losses) else GRAPH}


@pytest.mark.parametrize(
    ("medians", "loss_us"),
    [
        ({KERNELS: 100, TREES: 60}, 0),
        ({KERNELS: 100, TREES: 60, GRAPH: 50}, 10),
        ({KERNELS: 100, TREES: 99}, 0),
        ({KERNELS: 100, TREES: 120}, None),  # it takes as much longer on the GPU, too
        ({KERNELS: 100, GRAPH: 50}, None),
        ({TREES: 60}, None),
        ({}, None),
    ],
)
def test_what_is_lost_in_trees_is_what_they_take_longer_than_the_fastest_way(
    medians: dict[Deployment, float], loss_us: float | None
) -> None:
    assert policy.loss_in_trees_us([measured(*each) for each in medians.items()]) == loss_us


@given(SOME, GAINS, GAINS)
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
        ({KERNELS: 100, TREES: 60}, 40),
        ({KERNELS: 100, TREES: 60, GRAPH: 90}, 30),
        ({KERNELS: 100, TREES: 60, GRAPH: 50}, 0),
        ({KERNELS: 100, TREES: 99}, 0),
        ({KERNELS: 100, GRAPH: 50}, 0),
        ({TREES: 60}, 0),
        ({}, 0),
    ],
)
def test_what_is_gained_in_trees_is_what_they_save_over_the_best_of_all_else(
    medians: dict[Deployment, float], gain_us: float
) -> None:
    assert policy.gain_in_trees_us([measured(*each) for each in medians.items()]) == gain_us


def test_what_may_be_noise_is_no_gain_in_trees() -> None:
    measurements = [measured(KERNELS, 1000), measured(TREES, 60, mad=20), measured(GRAPH, 70, mad=20)]

    assert policy.gain_in_trees_us(measurements) == 0


def refused_for_its_span_alone(measurements: list[Measurement]) -> bool:
    found = {each.deployment: each for each in measurements}
    trees, launch = found[TREES], found[KERNELS]
    harmless = dataclasses.replace(trees, span_us=launch.span_us)
    return (
        trees.host_us < launch.host_us
        and decide(launch, trees).deployment is KERNELS
        and decide(launch, harmless).deployment is TREES
    )


def bought_with_little_of_the_gpus_time(measurements: list[Measurement]) -> bool:
    found = {each.deployment: each for each in measurements}
    return found[TREES].span_us > found[KERNELS].span_us and decide(*measurements).deployment is TREES


def sent_for_its_backward(measurements: list[Measurement]) -> bool:
    decision = policy.decide(measurements, Conditions(backward_gain_us=1e5))
    return decision.reason == policy.FOR_ITS_BACKWARD


def relocated_for_its_forward(measurements: list[Measurement]) -> bool:
    without = decide(*measurements, forward_in_trees=False).deployment
    return (decide(*measurements).deployment, without) == (TREES, GRAPH)


@pytest.mark.parametrize(
    "case",
    [
        refused_for_its_span_alone,
        bought_with_little_of_the_gpus_time,
        sent_for_its_backward,
        relocated_for_its_forward,
    ],
    ids=lambda case: case.__name__,
)
def test_what_the_properties_are_tried_on_has_such_a_case(case: Callable[[list[Measurement]], bool]) -> None:
    # The first that comes will do: making it small takes a quarter of a minute.
    asked = settings(max_examples=2000, derandomize=True, database=None, phases=[Phase.generate])

    assert case(find(ONE_OF_EACH, case, settings=asked))


@given(SOME, ANY_CONDITIONS)
def test_the_order_of_measurements_is_irrelevant(
    measurements: list[Measurement], conditions: Conditions
) -> None:
    decisions = {policy.decide(each, conditions) for each in itertools.permutations(measurements)}

    assert decisions == {policy.decide(measurements, conditions)}


@given(SOME, CONDITIONS, LESS)
def test_a_capture_that_is_faster_still_is_chosen_all_the_same(
    measurements: list[Measurement], conditions: Conditions, factors: Factors
) -> None:
    chosen = policy.decide(measurements, conditions).deployment
    faster = scaled(measurements, chosen, factors)

    if chosen is not KERNELS:
        assert policy.decide(faster, conditions).deployment is chosen


@given(SOME, CONDITIONS, st.sampled_from([TREES, GRAPH]), MORE)
def test_a_capture_that_is_slower_still_is_not_chosen_either(
    measurements: list[Measurement], conditions: Conditions, which: Deployment, factors: Factors
) -> None:
    slower = scaled(measurements, which, factors)

    if policy.decide(measurements, conditions).deployment is not which:
        assert policy.decide(slower, conditions).deployment is not which


@given(SOME, CONDITIONS, MORE)
def test_a_slower_launch_never_makes_a_capture_a_launch(
    measurements: list[Measurement], conditions: Conditions, factors: Factors
) -> None:
    slower = scaled(measurements, KERNELS, factors)

    if policy.decide(measurements, conditions).deployment is not KERNELS:
        assert policy.decide(slower, conditions).deployment is not KERNELS


@given(SOME, CONDITIONS, LESS)
def test_a_faster_launch_never_makes_a_launch_a_capture(
    measurements: list[Measurement], conditions: Conditions, factors: Factors
) -> None:
    faster = scaled(measurements, KERNELS, factors)

    if policy.decide(measurements, conditions).deployment is KERNELS:
        assert policy.decide(faster, conditions).deployment is KERNELS


@given(SOME, ANY_CONDITIONS)
def test_what_is_captured_was_measured_enough_and_loses_little_on_the_gpu(
    measurements: list[Measurement], conditions: Conditions
) -> None:
    by_deployment = {m.deployment: m for m in measurements}
    chosen = policy.decide(measurements, conditions)

    if chosen.deployment is not KERNELS:
        candidate, launch = by_deployment[chosen.deployment], by_deployment[KERNELS]
        assert min(candidate.samples, launch.samples) >= policy.MIN_SAMPLES
        assert not loses_too_much(candidate, launch)
        assert chosen.final


@settings(max_examples=300)
@given(ONE_OF_EACH, ANY_CONDITIONS, st.sampled_from(Deployment), st.integers(1, policy.MIN_SAMPLES - 1))
def test_what_was_measured_too_little_is_never_captured_nor_beaten(
    measurements: list[Measurement], conditions: Conditions, which: Deployment, few: int
) -> None:
    less = [
        dataclasses.replace(each, samples=few) if each.deployment is which else each for each in measurements
    ]

    chosen = policy.decide(less, conditions).deployment

    assert chosen is KERNELS if which is KERNELS else chosen is not which


@given(LAUNCHES, CANDIDATES, st.floats(-0.5, 0.5) | st.floats(0.2, 0.3))
def test_half_the_cost_is_a_gain_unless_too_much_is_lost_on_the_gpu(
    launch: Measurement, candidate: Measurement, share: float
) -> None:
    launch = dataclasses.replace(launch, mad_us=0.0)
    span_us = max(0.0, launch.span_us + share * abs(launch.host_us - candidate.host_us))
    half = dataclasses.replace(candidate, median_us=launch.median_us / 2, mad_us=0.0, span_us=span_us)
    enough = min(launch.samples, half.samples) >= policy.MIN_SAMPLES

    captured = decide(launch, half).deployment is not KERNELS

    assert captured == (enough and not loses_too_much(half, launch))


@given(SOME, ANY_CONDITIONS)
def test_what_is_captured_is_faster_than_launching_or_pays_with_its_backward(
    measurements: list[Measurement], conditions: Conditions
) -> None:
    by_deployment = {m.deployment: m for m in measurements}
    chosen = policy.decide(measurements, conditions)

    if chosen.deployment is not KERNELS:
        candidate, launch = by_deployment[chosen.deployment], by_deployment[KERNELS]
        if chosen.reason == policy.FOR_ITS_BACKWARD:
            assert chosen.deployment is TREES
            assert (conditions.backward_gain_us or 0) > candidate.median_us - launch.median_us
        else:
            gain_us = launch.median_us - candidate.median_us
            assert candidate.median_us < (1 - policy.MIN_GAIN) * launch.median_us
            assert gain_us > policy.NOISE_FACTOR * policy.noise_us(launch, candidate)


@settings(max_examples=300)
@given(LAUNCHES, CANDIDATES, ANY_CONDITIONS)
def test_a_tie_is_launched_unless_its_backward_gains_in_trees(
    launch: Measurement, candidate: Measurement, conditions: Conditions
) -> None:
    tied = dataclasses.replace(candidate, median_us=launch.median_us)
    enough = min(launch.samples, tied.samples) >= policy.MIN_SAMPLES
    may_be_lost = policy.NOISE_FACTOR * policy.noise_us(launch, tied)
    pays = (conditions.backward_gain_us or 0) > may_be_lost and not loses_too_much(tied, launch)

    decision = policy.decide([launch, tied], conditions)

    if tied.deployment is TREES and enough and pays:
        assert decision == Decision(TREES, policy.FOR_ITS_BACKWARD, policy.POLICY_VERSION)
    else:
        assert decision.deployment is KERNELS


@given(SOME, ANY_CONDITIONS)
def test_only_a_decision_with_enough_samples_of_two_is_final(
    measurements: list[Measurement], conditions: Conditions
) -> None:
    enough = {m.deployment for m in measurements if m.samples >= policy.MIN_SAMPLES}

    assert policy.decide(measurements, conditions).final == (KERNELS in enough and len(enough) > 1)


@given(SOME)
def test_a_backward_whose_forward_is_in_no_tree_never_runs_in_them(measurements: list[Measurement]) -> None:
    assert decide(*measurements, forward_in_trees=False).deployment is not TREES


@given(LAUNCHES, CANDIDATES, CONDITIONS, st.floats(1.0, 10.0), st.floats(1.0, 10.0))
def test_more_noise_never_captures_more(
    launch: Measurement, candidate: Measurement, conditions: Conditions, one: float, other: float
) -> None:
    noisier = [
        dataclasses.replace(launch, mad_us=launch.mad_us * one),
        dataclasses.replace(candidate, mad_us=candidate.mad_us * other),
    ]

    if policy.decide([launch, candidate], conditions).deployment is KERNELS:
        assert policy.decide(noisier, conditions).deployment is KERNELS


@settings(max_examples=300)
@given(SOME, CONDITIONS, st.integers(1, 400))
def test_more_samples_never_make_a_capture_a_launch(
    measurements: list[Measurement], conditions: Conditions, more: int
) -> None:
    longer = [dataclasses.replace(each, samples=each.samples + more) for each in measurements]

    if policy.decide(measurements, conditions).deployment is not KERNELS:
        assert policy.decide(longer, conditions).deployment is not KERNELS


@settings(max_examples=300)
@given(ONE_OF_EACH)
def test_of_what_would_be_captured_alone_the_fastest_is(measurements: list[Measurement]) -> None:
    found = {each.deployment: each for each in measurements}
    alone = [
        each
        for each in (found[TREES], found[GRAPH])
        if decide(found[KERNELS], each).deployment is not KERNELS
    ]

    chosen = decide(*measurements).deployment

    if alone:
        assert found[chosen].median_us == min(each.median_us for each in alone)
    assert (chosen is KERNELS) is not bool(alone)


@given(SOME, CONDITIONS)
def test_one_more_candidate_never_makes_a_capture_a_launch(
    measurements: list[Measurement], conditions: Conditions
) -> None:
    without = [each for each in measurements if each.deployment is not GRAPH]

    if policy.decide(without, conditions).deployment is not KERNELS:
        assert policy.decide(measurements, conditions).deployment is not KERNELS


def test_a_noisy_candidate_does_not_hide_one_that_wins_for_sure() -> None:
    measurements = [measured(KERNELS, 100), measured(TREES, 59, mad=40), measured(GRAPH, 60)]

    assert decide(*measurements).deployment is GRAPH


# --- what is deployed already ---


@settings(max_examples=300)
@given(CANDIDATES, LAUNCHES, GAINS, st.floats(0.1, 1.0))
def test_a_capture_is_not_won_and_overtaken_at_a_time_and_costs_are_monotone(
    capture: Measurement, launch: Measurement, allowed_us: float, less: float
) -> None:
    overtaken = policy.is_overtaken(capture, launch, allowed_us)

    assert not (overtaken and policy.wins(capture, launch))
    if overtaken:
        assert policy.is_overtaken(dataclasses.replace(capture, median_us=capture.median_us / less), launch)
        assert policy.is_overtaken(capture, launch), "with less allowed"
    else:
        cheaper = dataclasses.replace(capture, median_us=capture.median_us * less)
        assert not policy.is_overtaken(cheaper, launch, allowed_us)


@pytest.mark.parametrize(
    ("launch_us", "mad_us", "allowed_us", "overtaken"),
    [
        (100.0, 0.0, 0.0, False),
        (99.0, 0.0, 0.0, False),  # within the least gain
        (97.0, 0.0, 0.0, True),
        (97.0, 5.0, 0.0, False),  # within the noise
        (97.0, 0.0, 2.0, False),
        (90.0, 0.0, 2.0, True),
    ],
)
def test_launches_overtake_by_more_than_noise_the_least_gain_and_what_is_allowed(
    launch_us: float, mad_us: float, allowed_us: float, overtaken: bool
) -> None:
    capture, launch = measured(TREES, 100.0, mad_us), measured(KERNELS, launch_us, mad_us)

    assert policy.is_overtaken(capture, launch, allowed_us) is overtaken


@given(SOME)
def test_what_is_gained_in_trees_for_sure_seems_to_be_gained(measurements: list[Measurement]) -> None:
    assert policy.seeming_gain_in_trees_us(measurements) >= policy.gain_in_trees_us(measurements) >= 0


@pytest.mark.parametrize(
    ("measurements", "gain_us"),
    [
        ([measured(KERNELS, 60, 20), measured(TREES, 50, 20)], 10),
        ([measured(KERNELS, 60, 20), measured(TREES, 50, 20), measured(GRAPH, 55)], 5),
        ([measured(KERNELS, 60), measured(TREES, 70)], 0),
        ([measured(KERNELS, 60), measured(TREES, 50, samples=7)], 0),
        ([measured(KERNELS, 60, samples=7), measured(TREES, 50)], 0),
        ([measured(KERNELS, 60)], 0),
    ],
)
def test_what_seems_to_be_gained_in_trees_counts_whatever_the_noise(
    measurements: list[Measurement], gain_us: float
) -> None:
    assert policy.seeming_gain_in_trees_us(measurements) == gain_us


# --- what was measured anew although nothing was found against it ---


@settings(max_examples=300)
@given(ONE_OF_EACH, ANY_CONDITIONS, st.sampled_from(Deployment))
def test_what_ran_before_stays_unless_something_is_faster_for_sure(
    measurements: list[Measurement], conditions: Conditions, before: Deployment
) -> None:
    found = {each.deployment: each for each in measurements}
    decision = policy.decide(measurements, conditions)

    unbeaten = policy.is_unbeaten(before, measurements, conditions)

    assert unbeaten == policy.is_unbeaten(before, measurements[::-1], conditions), "whatever their order"
    if unbeaten:
        assert decision.deployment is not before
        assert not policy.is_overtaken(found[before], found[decision.deployment])
        assert not (before is TREES and conditions.forward_in_trees is False)
    if before is KERNELS:
        assert not unbeaten, "what wins over launches is faster for sure"


@pytest.mark.parametrize(
    ("before", "measurements", "conditions", "unbeaten"),
    [
        (TREES, [measured(KERNELS, 60, 20), measured(TREES, 50, 20)], Conditions(), True),
        (TREES, [measured(KERNELS, 50), measured(TREES, 50.5)], Conditions(), True),  # less than the least gain
        (TREES, [measured(KERNELS, 50), measured(TREES, 60)], Conditions(), False),
        (GRAPH, [measured(KERNELS, 60, 20), measured(GRAPH, 50, 20)], Conditions(), True),
        (GRAPH, [measured(KERNELS, 100), measured(GRAPH, 50), measured(TREES, 49.9)], Conditions(), True),
        (GRAPH, [measured(KERNELS, 100), measured(GRAPH, 50), measured(TREES, 40)], Conditions(), False),
        (TREES, [measured(KERNELS, 60, 20), measured(TREES, 50, 20)], Conditions(forward_in_trees=False), False),
        (GRAPH, [measured(KERNELS, 60), measured(GRAPH, 50), measured(TREES, 51)], Conditions(backward_gain_us=9.0), False),
        (TREES, [measured(KERNELS, 60, 20), measured(TREES, 50, 20, samples=7)], Conditions(), False),
        (TREES, [measured(KERNELS, 60, 20)], Conditions(), False),
        (TREES, [measured(KERNELS, 100), measured(GRAPH, 60)], Conditions(), False),
        (TREES, [measured(KERNELS, 100), measured(TREES, 60, samples=7), measured(GRAPH, 60)], Conditions(), False),
        (GRAPH, [measured(KERNELS, 100, samples=7), measured(GRAPH, 50)], Conditions(), False),
    ],
)  # fmt: skip
def test_noise_is_no_reason_to_give_up_what_runs(
    before: Deployment, measurements: list[Measurement], conditions: Conditions, *, unbeaten: bool
) -> None:
    assert policy.is_unbeaten(before, measurements, conditions) is unbeaten
