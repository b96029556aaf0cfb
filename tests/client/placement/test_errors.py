"""What is called wrongly fails as it does without the rules, with the same words, and the next call is right."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch._dynamo.config as dynamo_config

from tests.support.placement.with_rules import with_rules

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("for_all_rules")]

Call = tuple[torch.Tensor, ...]
Failure = tuple[type[Exception], str]

SIZE = 4
GENERATED = re.compile(r"kernel, \S+, |\btmp\d+\b")
"""Names in the code that Inductor makes."""


def matrix(rows: int = SIZE, columns: int = SIZE) -> torch.Tensor:
    return torch.arange(1.0, 1 + rows * columns).view(rows, columns) / 16


def added(x: torch.Tensor) -> torch.Tensor:
    return (x + torch.tensor([0.1, 0.2, 0.3, 0.4])) @ x


def picked(x: torch.Tensor) -> torch.Tensor:
    """Pick by more indices than Inductor writes into its code."""
    return x[:, torch.tensor([3, 1, 0, 2, 3, 2, 1, 0, 3, 1, 2, 0])] @ x.new_ones(12, SIZE)


def softened(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return (x @ x / by) @ x


def ordered(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return (x @ x)[index] @ x


def stepped(x: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    y = x @ x
    step += 1
    return (y / (1 - 0.9**step)) @ x


def index(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)


@dataclass(frozen=True)
class Case:
    """A program that a rule changes, calls that are right, and calls that are not."""

    function: Callable[..., torch.Tensor]
    rule: str
    right: tuple[Call, ...]
    wrong: tuple[Call, ...]


CASES = (
    Case(added, "placed", ((matrix(),), (-matrix(),)), ((matrix(SIZE, 5),), (matrix(2, SIZE),))),
    Case(picked, "placed", ((matrix(),), (-matrix(),)), ((matrix(SIZE, 3),),)),
    Case(
        softened,
        "placed_inputs",
        ((matrix(), torch.tensor(2.0)), (matrix(), torch.tensor(3.0))),
        ((matrix(), torch.ones(3)), (matrix(SIZE, 3), torch.tensor(2.0))),
    ),
    Case(
        ordered,
        "placed_inputs",
        ((matrix(), index(3, 1, 0, 2)), (matrix(), index(0, 2, 2, 1))),
        ((matrix(), index(3, 1, 0, 4)), (matrix(3, 3), index(3, 1, 0, 2)), (matrix(), index(0, 1).float())),
    ),
    Case(
        stepped,
        "placed_inputs",
        ((matrix(), torch.tensor(2.0)), (matrix(), torch.tensor(9.0))),
        ((matrix(), torch.ones(3)), (matrix(SIZE, 3), torch.tensor(2.0))),
    ),
)


def failures(case: Case) -> list[Failure]:
    """Return how a compiled program fails at each wrong call, and see that it computes what is right before and after."""
    compiled = torch.compile(case.function, mode="reduce-overhead", dynamic=False)
    found: list[Failure] = []
    for call in case.wrong:
        _hold(compiled, case)
        given = _copied(call)
        with pytest.raises(Exception) as raised:  # noqa: PT011 - its kind and words are compared below
            compiled(*given)
        found.append((raised.type, GENERATED.sub("", str(raised.value))))
        torch.testing.assert_close(given, call, rtol=0, atol=0)  # a counter has not counted
    _hold(compiled, case)
    return found


def _hold(compiled: Callable[..., torch.Tensor], case: Case) -> None:
    for call in case.right:
        mine, plain = _copied(call), _copied(call)
        torch.testing.assert_close(compiled(*mine), case.function(*plain))
        torch.testing.assert_close(mine, plain, rtol=0, atol=0)


def _copied(call: Call) -> Call:
    return tuple(each.clone() for each in call)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.function.__name__)
def test_a_wrong_call_fails_as_it_does_without_the_rules(case: Case) -> None:
    torch._dynamo.reset()
    with torch.no_grad(), dynamo_config.patch(capture_scalar_outputs=True):
        expected = failures(case)
        with with_rules() as report:
            found = failures(case)

    assert found == expected
    assert report.counts[case.rule] > 0
    assert report.failures == {}
