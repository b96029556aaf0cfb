"""What is chosen where calls at other sizes come between the timed ones: their time is no cost of the measured size."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.autotune.candidates import Candidates
from pygraphd.client.autotune.partition_trial import OTHER_SIZES, State
from pygraphd.client.recording.device_waits import GPU_WAITS
from pygraphd.schema.messages import Deployment
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.simulated import Machine
from tests.support.trial_host import Host, Relocating, trial_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.autotune.partition_trial import PartitionTrial
    from pygraphd.client.decisions.decision_service import Outcome

pytestmark = pytest.mark.torch

KERNELS, GRAPH = Deployment.KERNELS, Deployment.GRAPH
MOST_CALLS = 2_000


class Server:
    """A graph that takes some time on the host and on the GPU, as GRAPH and as KERNELS; the host does something after each call."""

    def __init__(
        self, patch: pytest.MonkeyPatch, graph: tuple[float, float], kernels: tuple[float, float]
    ) -> None:
        self.machine, self.host, self.gap_us = Machine(patch), Host(), 20.0
        self.relocate = Timed(lambda: self.machine.submit(*graph))
        candidates = Candidates(lambda _: self.machine.run_kernels(*kernels), 0, self.relocate)
        self.one: PartitionTrial = trial_of(self.host, candidates)

    def call(self, size: int) -> None:
        self.one([size])
        self.machine.submit(self.gap_us, 20.0)

    def call_another_graph(self) -> None:
        """Call another size as where each has a decision of its own."""
        self.machine.run_kernels(100.0, 200.0)
        self.machine.submit(self.gap_us, 20.0)
        self.one.interrupt()

    def decide(self, between: Callable[[Deployment | None], None]) -> Outcome:
        """Call size 1 until it is decided, and something `between` two calls."""
        calls = 0
        while self.one.state is not State.DEPLOYED:
            self.call(1)
            between(self.one._trial._schedule.deployment if self.one._trial is not None else None)
            calls += 1
            assert calls < MOST_CALLS
        assert self.host.report.failures == {}
        (outcome,) = self.host.results
        return outcome


class Timed(Relocating):
    """Recordings of a graph that takes some time."""

    waits = False

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(meanwhile=work)

    @property
    def why_refused(self) -> Reason | None:
        return Reason(ReasonCode.GPU_WAITS, GPU_WAITS) if self.waits else None


def longer(patch: pytest.MonkeyPatch) -> Server:
    """A graph whose GRAPH takes longer on the host and on the GPU."""
    return Server(patch, graph=(120.0, 300.0), kernels=(100.0, 200.0))


def host_bound(patch: pytest.MonkeyPatch) -> Server:
    """A program that the host holds up, and a GRAPH that takes longer on the GPU by more than the host's time would allow."""
    server = Server(patch, graph=(20.0, 460.0), kernels=(400.0, 400.0))
    server.gap_us = 300.0
    return server


def found(outcome: Outcome) -> tuple[Deployment, ReasonCode, bool]:
    return outcome.decision.deployment, outcome.decision.reason.code, outcome.decision.final


@pytest.mark.parametrize("way", ["size", "interrupt"])
@pytest.mark.parametrize(
    ("beside", "intervals_us"),
    [
        # A few calls of GRAPH per cycle have an interval, enough of them in all cycles.
        (GRAPH, {GRAPH: (320.0, 0.0), KERNELS: (220.0, 0.0)}),
        # None is known: host time and span bound it, and the spread says that no more is known.
        (KERNELS, {GRAPH: (300.0, 300.0), KERNELS: (200.0, 200.0)}),
    ],
)
def test_other_sizes_beside_one_deployment_do_not_decide_for_the_other(
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    beside: Deployment,
    intervals_us: dict[Deployment, tuple[float, float]],
) -> None:
    server = longer(monkeypatch)

    def between(deployment: Deployment | None) -> None:
        if deployment is beside:
            for _ in range(3):
                server.call(2) if way == "size" else server.call_another_graph()

    outcome = server.decide(between)

    assert found(outcome)[:2] == (KERNELS, ReasonCode.LONGER_ON_GPU)
    measured = {each.deployment: each for each in outcome.measurements}
    assert [(measured[each].host_us, measured[each].span_us) for each in (GRAPH, KERNELS)] == [
        (120.0, 300.0),
        (100.0, 200.0),
    ]
    assert {way: (each.median_us, each.mad_us) for way, each in measured.items()} == intervals_us
    assert set(server.host.report.fallbacks) == ({OTHER_SIZES} if way == "size" else set())


@pytest.mark.parametrize("make", [longer, host_bound])
def test_where_some_calls_follow_each_other_they_tell_the_interval(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[pytest.MonkeyPatch], Server]
) -> None:
    alone = make(monkeypatch).decide(lambda _: None)
    for seed in range(20):
        server, random_ = make(monkeypatch), random.Random(seed)

        def between(
            _next: Deployment | None, server: Server = server, random_: random.Random = random_
        ) -> None:
            for _ in range(random_.choice([0, 0, 0, 8])):
                server.call_another_graph()

        assert found(server.decide(between)) == found(alone)


def test_a_load_that_changes_never_has_a_longer_graph_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(60):
        server, random_ = longer(monkeypatch), random.Random(seed)
        load = [4]

        def between(
            _next: Deployment | None,
            server: Server = server,
            random_: random.Random = random_,
            load: list[int] = load,
        ) -> None:
            if random_.random() < 0.1:
                load[0] = random_.choice([0, 1, 2, 8])
            for _ in range(load[0]):
                server.call_another_graph()

        assert found(server.decide(between))[:2] == (KERNELS, ReasonCode.LONGER_ON_GPU)


def test_where_no_interval_is_known_an_answer_that_needs_it_is_provisional(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = host_bound(monkeypatch)

    outcome = server.decide(lambda _: server.call_another_graph())

    assert found(outcome) == (KERNELS, ReasonCode.LONGER_ON_GPU, False)
    assert {each.samples for each in outcome.measurements} == {24}, "all cycles look for one"


def test_where_no_interval_is_known_an_answer_that_needs_none_is_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(monkeypatch, graph=(20.0, 200.0), kernels=(100.0, 200.0))

    outcome = server.decide(lambda _: server.call_another_graph())

    assert found(outcome) == (GRAPH, ReasonCode.SAVES_HOST_TIME, True)
    assert {each.samples for each in outcome.measurements} == {8}


@pytest.mark.parametrize("why", ["capture", "waits", "no graph"])
def test_a_call_that_is_not_timed_is_no_part_of_an_interval(
    monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    server = longer(monkeypatch)

    def between(deployment: Deployment | None) -> None:
        if deployment is KERNELS:
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: why == "capture")
            server.relocate.waits = why == "waits"
            server.relocate.not_now = "seen by a mode" if why == "no graph" else None
            for _ in range(3):
                server.call(1)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            server.relocate.waits, server.relocate.not_now = False, None
            server.machine.synchronize()  # or the samples would be known too late

    outcome = server.decide(between)

    assert outcome.decision.deployment is KERNELS
    # The larger one of host time and span. Of the kernels that the GPU waits for, the last one ends later.
    assert {each.deployment: each.median_us for each in outcome.measurements} == {
        KERNELS: 212.5,
        GRAPH: 300.0,
    }


def test_what_is_decided_or_not_yet_measured_may_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    server = longer(monkeypatch)
    server.one.interrupt()
    server.decide(lambda _: None)
    server.one.interrupt()

    assert server.host.report.failures == {}


def test_interruptions_are_those_of_any_thread_and_of_a_call_that_is_being_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = longer(monkeypatch)
    work = server.relocate.meanwhile

    def run_and_be_interrupted() -> None:
        work()
        server.one.interrupt()

    server.relocate.meanwhile = run_and_be_interrupted
    outcome: Any = server.decide(lambda _: None)

    assert {each.deployment: each.median_us for each in outcome.measurements} == {
        KERNELS: 200.0,
        GRAPH: 300.0,
    }
