"""Who takes part in the rounds of measuring, and that whoever does comes to its samples, whatever the order of calls."""

from __future__ import annotations

import itertools
import random

import pytest

from pygraphd.client.attendance import IN_VAIN, MOST_STEPS, PATIENCE
from pygraphd.client.rota import Rota
from pygraphd.client.turns import SAMPLES
from pygraphd.schema.messages import Kind
from tests.client.test_rota import MOST_CALLS, Region

FORWARD, BACKWARD = Kind.FORWARD, Kind.BACKWARD
Family = list[Region]


def trained(family: int, partitions: int = 1) -> Family:
    forwards = [Region(FORWARD, family=family, partition=part) for part in range(partitions)]
    return [*forwards, Region(BACKWARD, family=family)]


def call(rota: Rota, family: Family, layers: int = 1) -> None:
    for region in family:
        for _ in range(layers):
            region.call(rota)


@pytest.mark.parametrize("layers", [1, 3, 12])
@pytest.mark.parametrize("partitions", [1, 2])
def test_a_backward_is_put_off_where_its_forward_is(layers: int, partitions: int) -> None:
    rota, often, seldom = Rota(), trained(1), trained(2, partitions)
    puts_off = set()
    for step in range(20):
        call(rota, often)
        if step % 5 == 0:
            before = [region.put_off for region in seldom]
            call(rota, seldom, layers)
            puts_off |= {region.put_off - count for region, count in zip(seldom, before, strict=True)}

    assert puts_off == {0, layers}, "all of a step, or none"


@pytest.mark.parametrize("every", [MOST_STEPS, MOST_STEPS + 1])
def test_what_is_called_in_most_steps_is_waited_for_and_what_is_not_is_put_off(every: int) -> None:
    rota, often, other = Rota(), trained(1), Region(family=2)
    steps = 0
    while not all(region.decided for region in often) and steps < 10 * MOST_CALLS:
        if steps % every == 0:
            other.call(rota)
        call(rota, often)
        steps += 1

    assert (len(other.ran) >= 2 * SAMPLES) == (every == MOST_STEPS)
    assert (other.put_off > 0) == (every > MOST_STEPS)
    assert steps <= MOST_STEPS * 23


@pytest.mark.parametrize("layers", [4, 24])
def test_layers_that_share_a_graph_are_no_steps(layers: int) -> None:
    """What is called once in a step of many layers is not called seldom."""
    rota, small, head = Rota(), trained(1), Region(family=2)
    for _ in range(MOST_CALLS):
        call(rota, small, layers)
        head.call(rota)

    assert head.put_off == 0
    assert head.decided
    assert all(region.decided for region in small)


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("second", [1, 2, 3, 4, 5, 8])
def test_two_models_that_are_trained_in_turn_both_come_to_their_samples(first: int, second: int) -> None:
    """Neither leaves the other's deployment just when it is the other's turn."""
    rota, both = Rota(), (trained(1), trained(2))
    for _ in range(4 * MOST_CALLS):
        for family, steps in zip(both, (first, second), strict=True):
            for _ in range(steps):
                call(rota, family)

    for region in itertools.chain(*both):
        assert region.decided
        assert len(region.ran) <= 60


def test_what_is_called_seldom_is_not_put_off_when_nothing_else_is_called_any_more() -> None:
    rota, often, seldom = Rota(), trained(1), Region(family=2)
    for step in range(9):
        call(rota, often)
        if step % 4 == 0:
            seldom.call(rota)
    for _ in range(2 * PATIENCE + MOST_CALLS):
        seldom.call(rota)

    assert seldom.decided
    assert seldom.put_off > 0


@pytest.mark.parametrize("offset", range(5))
def test_a_backward_stays_put_off_though_the_others_are_decided_meanwhile(offset: int) -> None:
    rota, often, seldom = Rota(), trained(1), trained(2)
    for step in range(2 * MOST_CALLS):
        is_called = step % 5 == offset
        before = [region.put_off for region in seldom]
        if is_called:
            seldom[0].call(rota)
        call(rota, often)
        if is_called:
            seldom[1].call(rota)
        assert len({region.put_off - count for region, count in zip(seldom, before, strict=True)}) == 1

    assert all(region.decided for region in often)


@pytest.mark.parametrize("count", [2, 3, 10])
@pytest.mark.parametrize("seed", range(3))
def test_requests_in_any_order_decide_all_graphs(count: int, seed: int) -> None:
    """As of a server whose requests are mixed, and of a program that trains many models in turn."""
    random_ = random.Random(seed)
    for families in ([[Region(family=number)] for number in range(count)], list(map(trained, range(count)))):
        rota = Rota()
        for _ in range(count * 4 * MOST_CALLS):
            call(rota, random_.choice(families))
        assert all(region.decided and not region.turns.exhausted for each in families for region in each)


@pytest.mark.parametrize("every", [3, 5, 10, 20, 30])
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("kinds", [(Kind.INFERENCE,), (FORWARD, BACKWARD)])
def test_graphs_that_are_compiled_anew_all_the_time_do_not_hold_up_what_stays(
    every: int, calls: int, kinds: tuple[Kind, ...]
) -> None:
    """As where each size is compiled, called once or twice, and never again."""
    rota, stays = Rota(), [Region(kind) for kind in kinds]
    come_and_go: Family = []
    steps = 0
    while not all(region.decided for region in stays) and steps < 10 * MOST_CALLS:
        call(rota, stays)
        steps += 1
        if steps % every == 0:
            come_and_go.append(Region(family=10 + steps))
            for _ in range(calls):
                come_and_go[-1].warm_up(rota)

    assert steps <= 200
    assert not any(region.turns.exhausted for region in stays)


def test_what_comes_and_goes_is_waited_for_again_after_a_decision() -> None:
    """A step of sixty layers, of which only the head is left to be measured with the others of the next model."""
    rota, first = Rota(), Region(family=0)
    come_and_go = [Region(family=1 + number) for number in range(2 * IN_VAIN)]
    for region in come_and_go:
        region.warm_up(rota)
        for _ in range(PATIENCE + 2):
            first.call(rota)
    assert first.decided

    layer, head = Region(delay=10**6), Region(delay=10**6)
    rounds = []
    for _ in range(4):
        begun = rota.round
        for _ in range(PATIENCE):
            layer.call(rota)
        head.call(rota)
        rounds.append(rota.round - begun)
    assert rounds[-1] == 1
