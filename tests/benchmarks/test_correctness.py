from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.correctness import Verdict, check
from benchmarks.step import Step
from benchmarks.variants import Compile
from benchmarks.workloads import WORKLOADS

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.workloads.case import Case, Inputs, Model

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def judge(build: Callable[[], Case], spoil: Callable[[Case], Case] = lambda case: case) -> Verdict:
    """Check an eager step of a case that was spoilt; what it is held against is the sound one."""
    torch.manual_seed(0)
    case = build()
    generator = torch.Generator().manual_seed(1)
    step = Step(spoil(case), CPU, Compile.EAGER)
    step(case.draw(generator))
    return check(case, step, CPU, lambda: case.draw(generator))


def mlp() -> Case:
    return WORKLOADS["mlp-training"].build(CPU)


def three_ops() -> Case:
    return WORKLOADS["three-ops"].build(CPU)


def dropout_case() -> Case:
    case = mlp()
    module = torch.nn.Sequential(*case.module, torch.nn.Dropout(0.2))
    module.insert(2, torch.nn.Dropout(0.2))
    return dataclasses.replace(case, module=module, stochastic=True)


def with_loss(case: Case, change: Callable[[torch.Tensor], torch.Tensor]) -> Case:
    def call(model: Model, inputs: Inputs) -> torch.Tensor:
        return change(case.call(model, inputs))

    return dataclasses.replace(case, call=call)


@pytest.mark.parametrize("build", [mlp, three_ops, pytest.param(dropout_case, marks=pytest.mark.slow)])
def test_eager_is_right(build: Callable[[], Case]) -> None:
    verdict = judge(build)
    assert verdict.correct, verdict.note


def test_wrong_output_is_found() -> None:
    verdict = judge(three_ops, lambda case: with_loss(case, lambda output: output * 1.001))
    assert not verdict.correct
    assert verdict.note.startswith("output is off by ")


def test_wrong_gradients_are_found_when_the_loss_is_right() -> None:
    verdict = judge(mlp, lambda case: with_loss(case, lambda loss: loss * 2 - loss.detach()))
    assert not verdict.correct
    assert verdict.note.startswith("gradient ")


def test_stale_inputs_are_found() -> None:
    first: list[Inputs] = []

    def spoil(case: Case) -> Case:
        def call(model: Model, inputs: Inputs) -> torch.Tensor:
            first.append(inputs)
            return case.call(model, first[0])

        return dataclasses.replace(case, call=call)

    assert not judge(mlp, spoil).correct


def test_nan_is_wrong() -> None:
    assert not judge(three_ops, lambda case: with_loss(case, lambda output: output * float("nan"))).correct


@pytest.mark.slow
def test_missing_dropout_is_found() -> None:
    def spoil(case: Case) -> Case:
        def call(model: Model, inputs: Inputs) -> torch.Tensor:
            case.module.eval()
            loss = case.call(model, inputs)
            case.module.train()
            return loss

        return dataclasses.replace(case, call=call)

    verdict = judge(dropout_case, spoil)
    assert not verdict.correct


@pytest.mark.slow
def test_the_same_dropout_mask_every_time_is_found() -> None:
    def spoil(case: Case) -> Case:
        def call(model: Model, inputs: Inputs) -> torch.Tensor:
            torch.manual_seed(7)
            return case.call(model, inputs)

        return dataclasses.replace(case, call=call)

    verdict = judge(dropout_case, spoil)
    assert not verdict.correct
    assert "times as far" in verdict.note


def test_stochastic_gradients_of_the_wrong_size_are_found() -> None:
    verdict = judge(dropout_case, lambda case: with_loss(case, lambda loss: loss * 1.5 - loss.detach() * 0.5))
    assert not verdict.correct
