"""A host for the trial of a partition: what it is told of, and what it is asked for."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.autotune import trial
from pygraphd.client.autotune.candidates import Candidates
from pygraphd.client.autotune.partition_trial import (
    WARM_UP_CALLS,
    PartitionTrial,
    State,
)
from pygraphd.client.autotune.trial import RECORDING_CALLS, SAMPLES, Trial
from pygraphd.client.common.report import Report
from pygraphd.client.decisions.leases import LeaseState, PendingGraph
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Decision, Deployment, Entry, Graph, Kind, Measurement
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.clock import Clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.decisions.decision_service import Outcome


ENVIRONMENT = Environment("GPU", "9.0", 1, 1, "", "t", "t", "c", "d", "c")
ENOUGH = WARM_UP_CALLS + RECORDING_CALLS + 2 * SAMPLES + 4
"""Calls until there is a decision, with one more that is the first in it."""


class Host:
    """Decisions, and a process group, that keep what they are told."""

    leads = True

    def __init__(self) -> None:
        self.report = Report()
        self.results: list[Outcome] = []
        self.recorded: list[Outcome] = []
        self.leases: list[Entry | LeaseState] = []

    def open(self, pending: PendingGraph, owner: object, *, lease: bool = True) -> None: ...

    def acquire(self, pending: PendingGraph) -> Entry | LeaseState:
        return self.leases.pop(0) if self.leases else LeaseState.OURS

    def renew(self, pending: PendingGraph) -> None: ...

    def propose(self, graph: str, decision: Decision) -> Decision:
        return decision

    def publish(self, pending: PendingGraph, outcome: Outcome, runs: Decision) -> None:
        self.results.append(outcome)

    def record(self, pending: PendingGraph, outcome: Outcome) -> None:
        self.recorded.append(outcome)


def trial_of(
    host: Host,
    candidates: Candidates,
    deploy: Callable[[Candidates, Deployment], object] = Candidates.release_other,
    warm_up_calls: int = 0,
    digest: str = "a" * 64,
) -> PartitionTrial:
    """Return the trial of an inference graph with this digest."""
    pending = PendingGraph(Graph(digest, Kind.INFERENCE, 0, 1, 9), ENVIRONMENT)
    told: Any = host
    return PartitionTrial(pending, candidates, told, deploy, warm_up_calls, told)


def run_kernels(inputs: list[Any]) -> str:
    return "kernels"


class Relocating:
    """Stands where relocatable graphs do; the second call makes an executable."""

    refused_for_good = is_awaited = False
    not_now: str | None = None
    run_kernels_or_record = None
    one_time_work = replayed = 0
    recording_us = 0.0
    calls = 0
    trimmed = closed = 0

    def __init__(self, refusal: str | None = None, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.refusal = refusal
        self.meanwhile = meanwhile

    def why_not(self, inputs: list[Any]) -> str | None:
        return self.not_now

    @property
    def why_refused(self) -> Reason | None:
        return None if self.refusal is None else Reason(ReasonCode.CANNOT_BE_RECORDED, self.refusal)

    @property
    def run(self) -> Relocating:
        return self

    def __call__(self, inputs: list[Any]) -> str:
        self.meanwhile()
        self.calls += 1
        self.replayed += 1
        self.one_time_work += self.calls == 2
        return "relocated"

    def empty_cache(self, *, workspaces: bool = False) -> None:
        pass

    def trim(self) -> None:
        self.trimmed += 1

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def host() -> Host:
    return Host()


def partition_trial(host: Host, warm_up_calls: int = 0, relocate: Relocating | None = None) -> PartitionTrial:
    ways = Candidates(run_kernels, 0, relocate or Relocating())
    return trial_of(host, ways, warm_up_calls=warm_up_calls)


OF_KERNELS = Measurement(Deployment.KERNELS, 8, 100.0, 1.0, 80.0, 100.0, 0.0)


FAST = Measurement(Deployment.GRAPH, 8, 10.0, 0.1, 10.0, 10.0, 0.0)


class Measured(Trial):
    """A trial that is over, and has measured this."""

    def __init__(self, *measurements: Measurement) -> None:
        self._measurements = measurements

    def is_over(self) -> bool:
        return True

    def measurements(self) -> tuple[Measurement, ...]:
        return self._measurements

    def price_ms(self, deployment: Deployment) -> float:
        return 0.0


def judged(one: PartitionTrial, *measurements: Measurement) -> PartitionTrial:
    one.state = State.MEASURE
    one._decide(Measured(*measurements))
    return one


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Find what the clock says."""
    monkeypatch.setattr(trial, "Sampler", Clock)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
