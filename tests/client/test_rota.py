"""Measuring is balanced, ends, and never mixes deployments within a step."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.rota import SAMPLES, Rota, Turns
from pygraphd.schema.messages import Deployment

LAUNCH, TREES = Deployment.LAUNCH, Deployment.TREES
MOST_CALLS = 40
"""A few dozen calls is what measuring may cost."""


def turns() -> Turns:
    return Turns((TREES, LAUNCH))


def steps_until_done(regions: list[Turns], rota: Rota) -> int:
    for step in range(1, MOST_CALLS + 1):
        chosen = {rota.enter(region) for region in regions}
        assert len(chosen) == 1
        for region in regions:
            region.take(*chosen)
        if all(region.enough for region in regions):
            return step
    raise AssertionError(f"not done after {MOST_CALLS} steps")


def test_one_region_is_done_after_a_few_dozen_calls() -> None:
    assert steps_until_done([turns()], Rota()) == 22


@given(st.integers(1, 12))
def test_the_regions_of_a_step_always_agree_and_end_together(count: int) -> None:
    assert steps_until_done([turns() for _ in range(count)], Rota()) == 22


def test_both_deployments_get_their_samples_and_the_first_calls_do_not_count() -> None:
    region, rota = turns(), Rota()
    fair: Counter[Deployment] = Counter()
    order = []
    while not region.enough:
        deployment = rota.enter(region)
        order.append(deployment)
        fair[deployment] += region.take(deployment)

    assert order[:20] == [TREES] * 5 + [LAUNCH] * 10 + [TREES] * 5
    assert min(fair.values()) >= SAMPLES
    assert order.index(LAUNCH) == 5


def test_the_call_after_a_change_is_not_a_fair_sample() -> None:
    region = turns()
    for _ in range(5):
        region.take(LAUNCH)

    assert [region.take(d) for d in (TREES, TREES, TREES, TREES, LAUNCH, LAUNCH)] == [
        False, False, False, True, False, True,
    ]  # fmt: skip


def test_a_region_called_once_in_many_rounds_still_ends() -> None:
    rota, often, seldom = Rota(), turns(), turns()
    calls = 0
    for step in range(40 * 50):
        if not often.enough:
            often.take(rota.enter(often))
        if step % 40 == 0:
            seldom.take(rota.enter(seldom))
            calls += 1
        if seldom.enough:
            break

    assert seldom.enough
    assert calls <= MOST_CALLS


@given(st.lists(st.integers(0, 3), min_size=1, max_size=300))
def test_any_order_of_calls_leaves_one_deployment_for_a_round(calls: list[int]) -> None:
    regions, rota = [turns() for _ in range(4)], Rota()
    round_: dict[int, Deployment] = {}
    for index in calls:
        if index in round_:
            round_.clear()
        deployment = rota.enter(regions[index])
        regions[index].take(deployment)
        round_[index] = deployment
        assert len(set(round_.values())) == 1
