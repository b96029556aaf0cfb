"""The order of a trial's calls: as many of each deployment, around one middle, whatever does not count."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.autotune.trial import (
    MAX_CYCLES,
    MAX_UNSTEADY,
    RECORDING_CALLS,
    SAMPLES,
    Schedule,
)
from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.torch

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH

Calls = list[tuple[Deployment, bool]]


def run(schedule: Schedule, is_steady: Callable[[int], bool] = lambda call: True) -> Calls:
    """Take all calls of a cycle; return their deployments, and which counted."""
    calls: Calls = []
    while not schedule.is_done:
        deployment = schedule.deployment
        calls.append((deployment, schedule.take(steady=is_steady(len(calls)))))
    return calls


def places(calls: Calls, deployment: Deployment) -> list[int]:
    return [place for place, call in enumerate(calls) if call == (deployment, True)]


def test_two_dozen_calls_are_enough() -> None:
    calls = run(Schedule())

    assert len(calls) <= 24
    assert [each for each, _ in calls[:RECORDING_CALLS]] == [GRAPH] * RECORDING_CALLS
    assert not any(counts for _, counts in calls[:RECORDING_CALLS])


@given(st.sets(st.integers(0, 40)))
def test_each_deployment_gets_its_samples_and_graph_half_of_them_on_either_side(unsteady: set[int]) -> None:
    calls = run(Schedule(), lambda call: call not in unsteady)

    graph, kernels = places(calls, GRAPH), places(calls, KERNELS)
    assert len(graph) == len(kernels) == SAMPLES
    assert sum(place < kernels[0] for place in graph) == sum(place > kernels[-1] for place in graph)
    assert not (set(graph) | set(kernels)) & unsteady or len(unsteady) > MAX_UNSTEADY


def test_both_have_one_middle_so_that_a_steady_drift_adds_the_same() -> None:
    calls = run(Schedule())

    assert statistics.fmean(places(calls, GRAPH)) == statistics.fmean(places(calls, KERNELS))


def test_what_never_is_steady_ends_as_well() -> None:
    calls = run(Schedule(), lambda call: False)

    assert len(calls) == len(run(Schedule())) + MAX_UNSTEADY


def test_a_cycle_more_is_taken_a_few_times() -> None:
    schedule = Schedule()
    run(schedule)

    for _ in range(MAX_CYCLES - 1):
        assert schedule.begin_again()
        calls = run(schedule)
        assert len(places(calls, GRAPH)) == len(places(calls, KERNELS)) == SAMPLES
    assert not schedule.begin_again()
    assert schedule.is_done


def test_kernels_run_while_the_gpu_is_waited_for() -> None:
    schedule = Schedule()
    run(schedule)

    assert schedule.deployment is KERNELS
    assert not schedule.take()
