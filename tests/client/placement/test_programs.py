"""Random programs that keep things on the CPU compute what they do in eager mode. On a GPU: tests/gpu/test_placement_programs.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from pygraphd.client.placement import inputs
from tests.support.placement.habits import HABITS, Habit, compare, programs

if TYPE_CHECKING:
    from pygraphd.client.common.report import Report

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("default")]

MODE = "reduce-overhead"
FEW = inputs.FEW_SCALARS


@pytest.mark.slow  # each of them is compiled and run in several ways: a minute in all
@pytest.mark.parametrize("habit", HABITS)
def test_each_habit_alone_stays_what_it_is(matrices_elsewhere: Report, habit: type[Habit]) -> None:
    compare((habit,), "cpu", 4, mode=MODE)

    assert matrices_elsewhere.failures == {}


@pytest.mark.slow
@given(programs)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_program_stays_what_it_is(matrices_elsewhere: Report, habits: tuple[type[Habit], ...]) -> None:
    torch._dynamo.reset()
    compare(habits, "cpu", 4, mode=MODE)

    assert matrices_elsewhere.failures == {}


@pytest.mark.slow
@given(programs)
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_program_of_which_a_few_numbers_are_left_to_pytorch(
    matrices_elsewhere: Report, monkeypatch: pytest.MonkeyPatch, habits: tuple[type[Habit], ...]
) -> None:
    monkeypatch.setattr(inputs, "FEW_SCALARS", FEW)
    torch._dynamo.reset()
    compare(habits, "cpu", 4, mode=MODE)

    assert matrices_elsewhere.failures == {}
