"""A region's order: whatever is not counted, what is held against each other was measured around one middle."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.turns import CATCH_UP, HALF, SAMPLES, UNCOUNTED, Turns
from pygraphd.schema.messages import Deployment

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH
TO_CHOOSE_FROM = [(TREES, KERNELS), (GRAPH, KERNELS), (GRAPH, TREES, KERNELS)]
Positions = dict[tuple[int, Deployment], list[int]]


def counted(turns: Turns) -> Positions:
    """Return the rounds that count, by part and deployment, if the region can choose."""
    positions: Positions = defaultdict(list)
    number = 0
    while not turns.is_done:
        number += 1
        deployment = turns.next()
        if turns.take(deployment, number):
            positions[turns.part, deployment].append(number)
    return positions


def imbalance(positions: Positions) -> float:
    """Return by how many rounds the middle of a deployment is off that of the launches it is held against."""
    middles = {key: statistics.fmean(rounds) for key, rounds in positions.items()}
    return max(abs(middle - middles[part, KERNELS]) for (part, _), middle in middles.items())


@pytest.mark.parametrize("candidates", TO_CHOOSE_FROM)
def test_what_is_held_against_each_other_has_one_middle(candidates: tuple[Deployment, ...]) -> None:
    positions = counted(Turns(candidates))

    assert imbalance(positions) == 0
    assert {deployment for _, deployment in positions} == set(candidates)
    assert {len(rounds) for rounds in positions.values()} == {SAMPLES}


@pytest.mark.parametrize(("candidates", "rounds"), list(zip(TO_CHOOSE_FROM, (21, 22, 51), strict=True)))
def test_it_takes_so_many_rounds(candidates: tuple[Deployment, ...], rounds: int) -> None:
    assert max(max(each) for each in counted(Turns(candidates)).values()) == rounds


def test_trees_come_last_and_enough_is_known_of_the_others_before() -> None:
    turns, ran, fair = Turns((GRAPH, TREES, KERNELS)), [], Counter[Deployment]()
    may_end = []
    while not turns.is_done:
        deployment = turns.next()
        if deployment is TREES and TREES not in ran:
            assert min(fair[GRAPH], fair[KERNELS]) >= SAMPLES
        ran.append(deployment)
        fair[deployment] += turns.take(deployment)
        may_end.append(turns.may_end)

    assert ran[:22] == [GRAPH] * 8 + [KERNELS] * 9 + [GRAPH] * 5
    assert ran[22:] == [KERNELS] * 8 + [TREES] * 7 + [KERNELS] * 9 + [TREES] * 5
    catching_up = range(22, 22 + CATCH_UP)
    assert [number for number, each in enumerate(may_end) if each] == [*catching_up, len(ran) - 1]


def test_what_a_deployment_does_first_and_the_call_after_a_change_do_not_count() -> None:
    turns = Turns((TREES, KERNELS))
    fair = [turns.take(each) for each in [TREES] * 7 + [KERNELS] * 9 + [TREES] * 5]

    first = UNCOUNTED[TREES]
    assert fair == [False] * first + [True] * 4 + [False] + [True] * 8 + [False] + [True] * 4


def test_what_others_need_does_not_count() -> None:
    turns = Turns((TREES, KERNELS))

    assert not any(turns.take(KERNELS) for _ in range(20)), "its own trees come first"
    assert turns.next() is TREES


def test_who_waits_for_others_in_a_block_counts_no_more_than_was_due() -> None:
    turns = Turns((GRAPH, KERNELS))

    assert sum(turns.take(GRAPH) for _ in range(30)) == HALF
    assert turns.next() is KERNELS


def test_many_calls_in_a_round_make_it_shorter_and_no_less_balanced() -> None:
    turns, positions = Turns((GRAPH, KERNELS)), defaultdict[tuple[int, Deployment], list[int]](list)
    number = 0
    while not turns.is_done:
        number += 1
        deployment = turns.next()
        for _ in range(24):
            if turns.take(deployment, number):
                positions[turns.part, deployment].append(number)

    assert number == 9
    assert imbalance(positions) == 0


def test_what_refuses_is_not_waited_for() -> None:
    turns = Turns((GRAPH, TREES, KERNELS))
    for _ in range(3):
        turns.take(GRAPH)
    turns.choose_from((TREES, KERNELS))

    assert set(counted(turns)) == {(0, TREES), (0, KERNELS)}


def test_where_nothing_is_left_to_choose_all_calls_count() -> None:
    turns = Turns((GRAPH, KERNELS))
    turns.choose_from((KERNELS,))

    assert [turns.take(KERNELS) for _ in range(50)] == [False] + [True] * 49
    assert turns.may_end
    assert turns.choices == 1


@given(st.lists(st.sampled_from([KERNELS, TREES, GRAPH]), max_size=80), st.sampled_from(TO_CHOOSE_FROM))
def test_whatever_others_need_it_comes_to_all_its_samples_in_the_end(
    others: list[Deployment], candidates: tuple[Deployment, ...]
) -> None:
    turns, samples = Turns(candidates), Counter[tuple[int, Deployment]]()
    for deployment in others:
        mine = deployment if deployment in candidates else KERNELS
        samples[turns.part, mine] += turns.take(mine)
    for key, rounds in counted(turns).items():
        samples[key] += len(rounds)

    assert set(samples.values()) - {0} == {SAMPLES}
    assert turns.next() is KERNELS


def at_catching_up() -> tuple[Turns, int]:
    """Return a region that has what it needs if trees need not be tried, and how many rounds that took."""
    turns, number = Turns((GRAPH, TREES, KERNELS)), 0
    while not turns.may_end:
        number += 1
        turns.take(turns.next(), number)
    return turns, number


def test_what_others_still_need_is_no_reason_to_begin_with_trees() -> None:
    turns, number = at_catching_up()
    for more in range(1, CATCH_UP + 6):
        turns.take(KERNELS if more <= CATCH_UP else GRAPH, number + more)
    assert turns.may_end
    assert turns.next() is TREES


def test_launches_in_which_the_gpu_catches_up_are_no_samples_however_many_they_are() -> None:
    turns, number = at_catching_up()
    assert not any(turns.take(KERNELS, number + more) for more in range(1, 30))


def test_the_launches_that_trees_are_held_against_are_as_many_after_more_catching_up() -> None:
    turns, number = at_catching_up()
    positions: Positions = defaultdict(list)
    for _ in range(CATCH_UP + 5):
        number += 1
        turns.take(KERNELS, number)
    while not turns.is_done:
        number += 1
        deployment = turns.next()
        if turns.take(deployment, number):
            positions[turns.part, deployment].append(number)
    assert [len(rounds) for rounds in positions.values()] == [SAMPLES, SAMPLES]
    assert imbalance(positions) <= 1
