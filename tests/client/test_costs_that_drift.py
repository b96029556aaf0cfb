"""What is decided while costs rise or fall: by the order in which deployments are tried, what is made of the samples, and the policy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pygraphd.client.profiler import Profiler
from pygraphd.client.turns import SAMPLES, Turns
from pygraphd.schema.messages import Conditions, Deployment, Measurement
from pygraphd.schema.policy import decide
from tests.client.simulated import Machine

pytestmark = pytest.mark.torch

KERNELS, TREES, GRAPH = Deployment.KERNELS, Deployment.TREES, Deployment.GRAPH
Candidates = tuple[Deployment, ...]
TWO: list[Candidates] = [(TREES, KERNELS), (GRAPH, KERNELS)]
ALL: Candidates = (GRAPH, TREES, KERNELS)
HOST_US, GPU_US = 1_000.0, 100.0
MOST = 0.01
"""Share of the cost by which it changes from one call to the next."""
DRIFTS = st.floats(-MOST, MOST)


def measured(candidates: Candidates, drift: float, cheaper: float = 0.0) -> tuple[Measurement, ...]:
    """Return what is found of calls that the program waits for, whose times change by `drift` of the first with each."""
    with pytest.MonkeyPatch.context() as patch:
        machine, profiler, turns = Machine(patch), Profiler(0), Turns(candidates)
        number = 0
        while profiler.fewest(candidates) < SAMPLES or not turns.may_end:
            deployment = turns.next()
            fair = turns.take(deployment)
            call = profiler.start(deployment, fair=fair, part=turns.part)
            times = (1 + drift * number) * (1.0 if deployment is KERNELS else 1 - cheaper)
            machine.submit(HOST_US * times, GPU_US * times)
            profiler.stop(call)
            machine.synchronize()
            profiler.collect()
            number += 1
        return profiler.measurements()


def chosen(candidates: Candidates, drift: float, cheaper: float = 0.0) -> Deployment:
    return decide(measured(candidates, drift, cheaper), Conditions()).deployment


@pytest.mark.parametrize("candidates", [*TWO, ALL])
@given(DRIFTS)
def test_what_costs_as_much_is_launched_however_costs_drift(candidates: Candidates, drift: float) -> None:
    assert chosen(candidates, drift) is KERNELS


@pytest.mark.parametrize("candidates", [*TWO, ALL])
@given(DRIFTS, st.floats(0, 0.5))
def test_a_share_that_is_saved_is_found_however_costs_drift(
    candidates: Candidates, drift: float, cheaper: float
) -> None:
    found = {each.deployment: each.median_us for each in measured(candidates, drift, cheaper)}

    for deployment in candidates[:-1]:
        assert 1 - found[deployment] / found[KERNELS] == pytest.approx(cheaper, abs=1e-6)


@pytest.mark.parametrize("candidates", [*TWO, ALL])
@given(DRIFTS)
def test_a_tenth_that_is_saved_wins_unless_the_drift_is_taken_for_noise(
    candidates: Candidates, drift: float
) -> None:
    assert chosen(candidates, 0.6 * drift, cheaper=0.1) is not KERNELS
    assert chosen(candidates, drift, cheaper=0.2) is not KERNELS


def test_trees_and_relocation_are_compared_by_what_each_saves_in_its_own_time() -> None:
    found = {each.deployment: each for each in measured(ALL, -MOST, cheaper=0.3)}

    assert found[TREES].median_us == pytest.approx(found[GRAPH].median_us)
    assert found[TREES].host_us == pytest.approx(found[GRAPH].host_us)
    assert found[TREES].span_us == pytest.approx(found[GRAPH].span_us)
    assert found[TREES].samples == SAMPLES
    assert found[KERNELS].samples == SAMPLES
