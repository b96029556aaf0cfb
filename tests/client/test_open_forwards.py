"""Deployments wait for backwards that come, and not for those that do not: of calls that failed, evaluations, checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pygraphd.client.open_forwards import LOST, MANY
from pygraphd.client.rota import Rota
from pygraphd.client.turns import MAX_ROUNDS
from pygraphd.schema.messages import Deployment, Kind
from tests.client.test_rota import MOST_CALLS, Region

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH
Step = Callable[[int, Callable[[], object], Callable[[], object]], None]
"""A step of a program, by its number, from the calls of a forward and of its backward."""


def fails_once(step: int, forward: Callable[[], object], backward: Callable[[], object]) -> None:
    forward()
    if step != 6:
        backward()


def fails_now_and_then(step: int, forward: Callable[[], object], backward: Callable[[], object]) -> None:
    forward()
    if step % 5:
        backward()


def evaluates_with_gradients(
    step: int, forward: Callable[[], object], backward: Callable[[], object]
) -> None:
    forward()
    backward()
    for _ in range(0 if step % 5 else 3):
        forward()


def recomputes_one(step: int, forward: Callable[[], object], backward: Callable[[], object]) -> None:
    recomputes(1, forward, backward)


def recomputes_many(step: int, forward: Callable[[], object], backward: Callable[[], object]) -> None:
    recomputes(12, forward, backward)


def recomputes(layers: int, forward: Callable[[], object], backward: Callable[[], object]) -> None:
    """As `torch.utils.checkpoint` around layers that share a graph."""
    for _ in range(layers):
        forward()
    for _ in range(layers):
        forward()
        backward()


def is_one_ahead(step: int, forward: Callable[[], object], backward: Callable[[], object]) -> None:
    forward()
    if step:
        backward()


PROGRAMS = [
    fails_once,
    fails_now_and_then,
    evaluates_with_gradients,
    recomputes_one,
    recomputes_many,
    is_one_ahead,
]


@pytest.mark.parametrize(("candidates", "most"), [((GRAPH, KERNELS), 30), ((GRAPH, TREES, KERNELS), 70)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_forwards_without_a_backward_hold_nothing_up(
    program: Step, candidates: tuple[Deployment, ...], most: int
) -> None:
    rota = Rota()
    regions = [Region(kind, candidates=candidates) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    forward, backward = regions
    steps = 0
    while not all(region.decided for region in regions) and steps < MAX_ROUNDS:
        program(steps, lambda: forward.call(rota), lambda: backward.call(rota))
        steps += 1

    assert steps <= most
    assert not any(region.turns.exhausted for region in regions), "or nothing would be known of it"


@pytest.mark.parametrize("losses", range(MANY + 2))
def test_a_forward_is_waited_for_until_its_family_has_lost_too_many(losses: int) -> None:
    rota = Rota()
    forward, backward = Region(Kind.FORWARD, delay=10**6), Region(Kind.BACKWARD, delay=10**6)
    forward.call(rota)
    backward.call(rota)
    for _ in range(losses):
        forward.call(rota)
        for _ in range(LOST):
            forward.call(rota)
            backward.call(rota)
    assert rota._open_forwards.are_none
    forward.call(rota)

    assert rota._open_forwards.is_tied(1) == (losses < MANY)
    assert rota._open_forwards.are_none == (losses >= MANY)


def test_whose_forward_is_open_when_it_is_decided_holds_up_nobody_else() -> None:
    """As one that takes what was found before; the other's deployments change as ever."""
    rota, other = Rota(), [Region(Kind.FORWARD, family=2), Region(Kind.BACKWARD, family=2)]
    told = [Region(Kind.FORWARD), Region(Kind.BACKWARD)]
    for region in (*told, *other, told[0]):
        region.call(rota)
    for region in told:
        rota.leave(region)
    for _ in range(MOST_CALLS):
        for region in other:
            region.call(rota)

    assert all(region.decided for region in other)
