"""A trial waits for a reason against its recording that passes, as a message of another rank, and not for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.autotune.candidates import Candidates
from pygraphd.client.autotune.partition_trial import MAX_WAITING_CALLS, State
from pygraphd.client.recording.device_waits import GPU_WAITS
from pygraphd.schema.messages import Deployment
from pygraphd.schema.reasons import ReasonCode
from tests.support.recording_case import Case, add, case
from tests.support.trial_host import ENOUGH, Host, gpu, host, trial_of

if TYPE_CHECKING:
    from pygraphd.client.autotune.partition_trial import PartitionTrial

__all__ = ["case", "gpu", "host"]  # fixtures

pytestmark = pytest.mark.torch


def trial(case: Case, host: Host, deployed: list[Deployment]) -> PartitionTrial:
    recordings: Any = case.made(add, GraphFacts())

    def deploy(candidates: Candidates, deployment: Deployment) -> None:
        deployed.append(deployment)
        candidates.release_other(deployment)

    return trial_of(host, Candidates(recordings._run_kernels, 0, recordings), deploy)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("refusals", [0, 1, 2])
def test_a_graph_that_could_not_be_recorded_at_once_is_tried_all_the_same(
    case: Case, host: Host, refusals: int
) -> None:
    case.recorder.may_wait_next = [False] * refusals
    deployed: list[Deployment] = []
    one = trial(case, host, deployed)
    for number in range(ENOUGH + 50):
        assert one([case.floats(number), case.floats(2)])[0].tolist() == [number + 2]

    assert (one.state, deployed) == (State.DEPLOYED, [Deployment.GRAPH])
    case.expect(captured=1)


@pytest.mark.usefixtures("gpu")
def test_a_training_whose_first_steps_overflow_is_tried(case: Case, host: Host) -> None:
    """A gradient scaler begins with a scale that gives NaN."""
    deployed: list[Deployment] = []
    one = trial(case, host, deployed)
    for number in [float("nan")] * 8 + [1.0] * (ENOUGH + 50):
        one([case.floats(number), case.floats(2)])

    assert (one.state, deployed) == (State.DEPLOYED, [Deployment.GRAPH])
    case.expect(captured=1)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_that_always_waits_ends_the_trial(case: Case, host: Host) -> None:
    case.recorder.may_wait_next = [False] * 1000
    deployed: list[Deployment] = []
    one = trial(case, host, deployed)
    for number in range(MAX_WAITING_CALLS + 50):
        assert one([case.floats(number), case.floats(2)])[0].tolist() == [number + 2]

    assert (one.state, deployed) == (State.DEPLOYED, [Deployment.KERNELS])
    (outcome,) = host.results
    assert (outcome.decision.reason.code, outcome.decision.reason.detail) == (ReasonCode.GPU_WAITS, GPU_WAITS)
    assert not outcome.decision.final
    assert 1000 - len(case.recorder.may_wait_next) == 6  # at most so many calls wait for the GPU
