"""A trial waits for a reason against its recording that passes, as a message of another rank or a lack of memory, and not for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.analysis.graph_facts import GraphFacts
from pygraphd.client.autotune.candidates import Candidates
from pygraphd.client.autotune.partition_trial import MAX_WAITING_CALLS, State
from pygraphd.client.recording.device_waits import GPU_WAITS
from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import only_kernels
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Source
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


HISTORY = "the history of PyTorch's allocator is recorded"
NOTHING_FREE = "not enough free memory to verify a recording"


def refuse(case: Case, reason: str | None) -> None:
    """Have nothing be captured for a reason; None: from now on something can."""
    case.recorder.refuses = HISTORY if reason == HISTORY else None
    case.recorder.free = 0 if reason == NOTHING_FREE else 1 << 40


PASSING = [(HISTORY, ReasonCode.CANNOT_CAPTURE_NOW, 35), (NOTHING_FREE, ReasonCode.NO_MEMORY_TO_RECORD, 6)]


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("reason", "code", "calls"), PASSING)
def test_a_graph_is_tried_once_nothing_speaks_against_a_recording(
    case: Case, host: Host, reason: str, code: ReasonCode, calls: int
) -> None:
    """As at a program's first steps, which have its allocator's history recorded, or need the most memory."""
    deployed: list[Deployment] = []
    one = trial(case, host, deployed)
    refuse(case, reason)
    for number in range(calls):
        assert one([case.floats(number), case.floats(2)])[0].tolist() == [number + 2]
    assert deployed == []
    if_it_ended_now = one.pending.unfinished_as
    assert if_it_ended_now == (only_kernels(Reason(code, reason), final=False), Source.UNFINISHED)
    case.expect(captured=0)

    refuse(case, None)
    for number in range(ENOUGH + 20):
        assert one([case.floats(number), case.floats(2)])[0].tolist() == [number + 2]

    assert (one.state, deployed) == (State.DEPLOYED, [Deployment.GRAPH])
    (outcome,) = host.results
    assert (outcome.decision.reason.code, outcome.decision.final) == (ReasonCode.SAVES_HOST_TIME, True)
    assert {each.deployment: each.samples for each in outcome.measurements} == dict.fromkeys(Deployment, 8)
    assert one.pending.unfinished_as is None
    case.expect(captured=1)
    assert host.report.failures == {}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("reason", "code", "calls"), PASSING)
def test_a_reason_that_stays_ends_the_trial(
    case: Case, host: Host, reason: str, code: ReasonCode, calls: int
) -> None:
    deployed: list[Deployment] = []
    one = trial(case, host, deployed)
    refuse(case, reason)
    for number in range(MAX_WAITING_CALLS):
        assert one([case.floats(number), case.floats(2)])[0].tolist() == [number + 2]
    assert host.results == []
    for number in range(50):
        one([case.floats(number), case.floats(2)])

    assert (one.state, deployed) == (State.DEPLOYED, [Deployment.KERNELS])
    (outcome,) = host.results
    assert outcome.decision == only_kernels(Reason(code, reason), final=False)
    case.expect(captured=0, refused_for_memory=6 if reason == NOTHING_FREE else 0)
    case.recorder.free = 1 << 40
