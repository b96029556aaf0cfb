"""What a forward's parts and its backward lose and gain in trees: all of them go there, or none."""

from __future__ import annotations

import pytest

from pygraphd.client.families import Families
from pygraphd.client.turns import Turns
from pygraphd.schema.messages import Deployment, Graph, Kind

pytestmark = pytest.mark.torch

TREES, GRAPH = Deployment.TREES, Deployment.GRAPH
FAMILY = 7


class Part:
    """A region as far as families look at it."""

    def __init__(self, kind: Kind, gain_us: float = 0.0, loss_us: float | None = 0.0) -> None:
        self.graph = Graph("a" * 64, kind, 0, 1, 1)
        self.family = FAMILY
        self.turns = Turns((TREES, GRAPH, Deployment.KERNELS))
        self._gain_us = gain_us
        self._loss_us = loss_us

    def ready(self) -> bool:
        return True

    def gain_in_trees_us(self) -> float:
        return self._gain_us

    def loss_in_trees_us(self) -> float | None:
        return self._loss_us


def forward(loss_us: float | None) -> Part:
    return Part(Kind.FORWARD, loss_us=loss_us)


def backward(gain_us: float) -> Part:
    return Part(Kind.BACKWARD, gain_us=gain_us)


@pytest.mark.parametrize(
    ("others", "gain_us"),
    [
        ([], None),
        ([forward(5)], None),
        ([backward(0)], 0),
        ([backward(60)], 60),
        ([backward(60), backward(20)], 80),
        ([backward(60), forward(5)], 55),
        ([backward(60), forward(5), forward(50)], 5),
        ([backward(60), forward(100)], 0),
        ([backward(60), forward(None)], 0),
    ],
)
def test_a_part_has_what_the_others_leave_of_the_gain(others: list[Part], gain_us: float | None) -> None:
    mine = forward(1000)

    assert Families().gain_left_us(mine, [mine, *others]) == gain_us


@pytest.mark.parametrize(
    ("deployment", "loss_us", "gain_us"),
    [(TREES, 10.0, 50.0), (TREES, None, 60.0), (GRAPH, 10.0, 0.0), (None, 10.0, 60.0)],
)
def test_parts_that_are_decided_count_too(
    deployment: Deployment | None, loss_us: float | None, gain_us: float
) -> None:
    """One in trees from the cache loses nothing more; one that runs otherwise keeps the backward out; one to be decided may be anything."""
    families, mine = Families(), forward(0)
    families.note_forward(FAMILY, "first part", deployment)
    if loss_us is not None:
        families.note_loss(FAMILY, "first part", loss_us)

    assert families.gain_left_us(mine, [mine, backward(60)]) == gain_us
