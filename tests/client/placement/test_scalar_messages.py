"""Numbers of the CPU that meet tensors of the GPU and that no rule takes there are told of."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.placement import constants
from tests.support.placement.graphs import NOTED, Builder

if TYPE_CHECKING:
    from torch.fx import Node

pytestmark = pytest.mark.torch

aten = torch.ops.aten


def number_of_an_input(build: Builder) -> Node:
    return build.call(aten.erf.default, build.input(torch.tensor(0.5), on_gpu=False))


def random_number(build: Builder) -> Node:
    return build.call(aten.rand.default, [], device=torch.device("cpu"))


def number_with_side_effects(build: Builder) -> Node:
    return build.call(NOTED._opoverload, build.constant(torch.tensor(2.0)))


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (number_of_an_input, constants.INPUT),
        (random_number, constants.RANDOM),
        (number_with_side_effects, constants.NOT_PURE),
    ],
)
def test_numbers_that_meet_tensors_and_no_rule_takes_are_told_of(number: Any, reason: str) -> None:
    build = Builder()
    taken = build.call(aten.mul.Tensor, build.input(torch.randn(4)), number(build))
    graph = build.output(taken)

    assert constants.scalar_messages(graph, ()) == (
        f"aten.mul.Tensor takes a CPU value to the GPU: {reason} (model.py:12)",
    )
    assert constants.scalar_messages(graph, {taken}) == ()


def test_numbers_that_inductor_has_in_its_code_are_not_told_of() -> None:
    build = Builder()
    x = build.input(torch.randn(4))
    constant = build.constant(torch.tensor(2.0))
    full = build.call(aten.full.default, [], 3.0, device=torch.device("cpu"), pin_memory=False)
    graph = build.output(build.call(aten.mul.Tensor, x, constant), build.call(aten.mul.Tensor, x, full))

    assert constants.scalar_messages(graph, ()) == ()


def test_numbers_of_sizes_and_the_largest_of_a_constant_are_not_told_of() -> None:
    build = Builder()
    x, size = build.input(torch.randn(4)), build.graph.placeholder("s0")
    size.meta["val"] = 4  # stands for a size that is known at run time only
    full = build.call(aten.full.default, [], 3.0, device=torch.device("cpu"), pin_memory=False)
    full.args = ([], size)
    largest = build.call(aten.max.dim, build.constant(torch.tensor([1.0, 2.0])), 0)
    number = build.call(operator.getitem, largest, 0)
    graph = build.output(build.call(aten.mul.Tensor, x, full), build.call(aten.mul.Tensor, x, number))

    assert constants.scalar_messages(graph, ()) == ()
