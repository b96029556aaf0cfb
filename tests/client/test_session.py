"""What of the cache is believed, and what a session keeps of what it was told. No torch is hooked here."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client import _torch, options
from pygraphd.client.candidates import Candidates
from pygraphd.client.claims import Turn
from pygraphd.client.graph_facts import GraphFacts
from pygraphd.client.region import Decided, Region
from pygraphd.client.session import Session
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import (
    Conditions,
    Decision,
    Deployment,
    Entry,
    Graph,
    Kind,
    Measurement,
    Record,
    RecordRequest,
    decode,
)
from pygraphd.schema.policy import POLICY_VERSION, TOO_FEW_CALLS

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch

ENVIRONMENT = Environment("none", "", 0, 0, "", "2.13.0", "", "", "", "")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(locate({"PYGRAPHD_HOME": str(tmp_path)}))


@pytest.fixture
def without_relocation(session: Session, monkeypatch: pytest.MonkeyPatch) -> Session:
    monkeypatch.setenv(options.RELOCATE, "0")
    return Session(session.locations)


@pytest.mark.parametrize(
    ("decision", "believed"),
    [
        (Decision(Deployment.KERNELS, "", POLICY_VERSION), True),
        (Decision(Deployment.TREES, "", POLICY_VERSION), True),
        (Decision(Deployment.GRAPH, "", POLICY_VERSION), False),
        (Decision(Deployment.KERNELS, "", POLICY_VERSION + 1), False),
    ],
    ids=["launch", "trees", "not offered here", "another policy"],
)
def test_only_what_this_process_could_have_decided_is_believed(
    without_relocation: Session, decision: Decision, believed: bool
) -> None:
    assert (without_relocation.why_not_usable(decision) is None) is believed


def test_relocatable_graphs_are_believed_in_unless_they_are_not_wanted(session: Session) -> None:
    assert session.why_not_usable(Decision(Deployment.GRAPH, "", POLICY_VERSION)) is None


def test_the_helper_is_coming_once_it_was_asked_for(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pygraphd.client.bulk.helper.is_coming", lambda: True)
    monkeypatch.setattr("pygraphd.client.bulk.helper.prepare", lambda _, may_compile: None)
    monkeypatch.setattr("pygraphd.client._torch.missing_for_relocation", lambda: None)
    assert not session.helper_is_coming()

    session.prepare_helper()

    assert session.helper_is_coming()


def test_relocatable_graphs_that_are_not_wanted_are_not_missed(without_relocation: Session) -> None:
    assert without_relocation.relocatable(lambda inputs: None, 0, None, GraphFacts()) is None
    assert without_relocation.report.failures == {}


def test_without_a_driver_relocatable_graphs_are_missing_with_a_reason(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_torch, "missing_for_relocation", lambda: "this torch lacks much")

    for _ in range(3):
        assert session.relocatable(lambda inputs: None, 0, None, GraphFacts()) is None

    assert dict(session.report.failures) == {"relocatable graphs: this torch lacks much": 1}


def test_who_does_not_want_relocatable_graphs_imports_nothing_of_them() -> None:
    code = "import sys, pygraphd.client.session; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    names = {"relocatable", "recording", "replay", "verification", "capture", "driver"}
    assert {f"pygraphd.client.{name}" for name in names}.isdisjoint(done.stdout.split())
    assert "pygraphd.client.region" in done.stdout.split()


@pytest.mark.parametrize(("asked", "recordings"), [("3", 8), ("20", 20)])
def test_the_summary_has_the_bounds_of_what_is_kept(
    session: Session, monkeypatch: pytest.MonkeyPatch, asked: str, recordings: int
) -> None:
    monkeypatch.setenv(options.SIZES, asked)
    monkeypatch.setattr(Session, "_recorder_of", lambda *_: object())  # there is no driver
    session = Session(session.locations)
    before = session.report.summary()["bounds"]

    session.relocatable(lambda inputs: None, 0, None, GraphFacts())

    assert before == {
        "sizes": int(asked),
        "size_calls": 3,
        "remembered_sizes": 64,
        "setups_per_size": 4,
        "idle_ticks": 16,
        "integers": 64,
    }
    relocated = {"recordings": recordings, "executables": 64}
    assert session.report.summary()["bounds"] == before | relocated


def test_an_undecided_region_goes_with_its_model_and_is_remembered(session: Session) -> None:
    class Capture:
        def __call__(self, inputs: list[Any]) -> None: ...

    capture = Capture()
    gone = weakref.ref(capture)
    region = Region(
        Graph("a" * 64, Kind.INFERENCE, 0, 1, 1),
        Candidates(capture, capture, 0, False),
        session,
        lambda *_: None,
        1,
    )
    session.watch(region, ENVIRONMENT, object(), None)
    region([])

    del region, capture
    gc.collect()
    assert gone() is None
    session.close()

    (decision,) = session.report.summary()["decisions"]
    assert (decision["graph"], decision["environment"]) == ("a" * 64, ENVIRONMENT.digest())
    assert (decision["reason"], decision["source"]) == (TOO_FEW_CALLS, "unfinished")
    assert session.report.counts["spooled"] == 1


def test_a_region_that_goes_with_its_model_is_nobodys_turn_any_more(session: Session) -> None:
    region = Region(
        Graph("a" * 64, Kind.INFERENCE, 0, 1, 1),
        Candidates(lambda inputs: None, None, 0, False),
        session,
        lambda *_: None,
        1,
    )
    session.watch(region, ENVIRONMENT, object(), None)
    session.turn(region)
    assert len(session._claims._turns) == 1

    del region
    gc.collect()

    assert session._claims._turns == {}


def test_a_backward_has_its_forwards_options(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    from pygraphd.client import _torch

    now = {"options": (("a", "1"),)}
    monkeypatch.setattr(_torch, "kernel_options", lambda: now["options"])
    family, other = object(), object()

    forward = session._options_of(family, is_backward=False)
    now["options"] = (("a", "2"),)

    assert session._options_of(family, is_backward=True) == forward == (("a", "1"),)
    assert session._options_of(other, is_backward=True) == (("a", "2"),)


class TestConditions:
    """A backward is told how the forward runs that was measured with it; nothing else is."""

    def _watched(self, session: Session, family: object, kind: Kind, partition: int = 0) -> Region:
        graph = Graph("a" * 64, kind, partition, 2, 1)
        candidates = Candidates(lambda inputs: None, lambda inputs: None, 0, kind is Kind.BACKWARD)
        region = Region(graph, candidates, session, lambda *_: None, id(family))
        session.watch(region, ENVIRONMENT, family, None)
        return region

    def _decide(self, session: Session, region: Region, deployment: Deployment) -> None:
        measurements = (Measurement(deployment, 8, 1.0, 0.0, 1.0, 1.0, 0.0),)
        decision = Decision(deployment, "for a test", POLICY_VERSION)
        session.decided(region, Decided(region.graph, decision, measurements), decision)

    @pytest.mark.parametrize(
        ("deployments", "in_trees"),
        [
            ([Deployment.TREES, Deployment.TREES], True),
            ([Deployment.KERNELS], False),
            ([Deployment.GRAPH], False),
            ([Deployment.KERNELS, Deployment.TREES], False),
            ([Deployment.TREES, Deployment.KERNELS], False),
            ([], None),
        ],
        ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
    )
    def test_a_forward_is_in_trees_if_all_its_parts_are(
        self, session: Session, deployments: list[Deployment], in_trees: bool | None
    ) -> None:
        family = object()
        backward = self._watched(session, family, Kind.BACKWARD)
        for partition, deployment in enumerate(deployments):
            self._decide(session, self._watched(session, family, Kind.FORWARD, partition), deployment)

        assert session.conditions(backward) == Conditions(in_trees)

    @pytest.mark.parametrize("forward", [Deployment.TREES, Deployment.KERNELS])
    def test_an_answer_for_trees_is_taken_up_only_with_a_forward_in_them(
        self, session: Session, monkeypatch: pytest.MonkeyPatch, forward: Deployment
    ) -> None:
        family = object()
        backward = self._watched(session, family, Kind.BACKWARD)
        self._decide(session, self._watched(session, family, Kind.FORWARD), forward)
        decision = Decision(Deployment.TREES, "TREES is faster", POLICY_VERSION)
        answer = Entry(backward.graph.digest, decision)
        monkeypatch.setattr(session._claims, "turn", lambda interest: answer)

        assert session.turn(backward) == (answer if forward is Deployment.TREES else Turn.OURS)

    def test_a_forward_has_none(self, session: Session) -> None:
        family = object()
        self._decide(session, self._watched(session, family, Kind.FORWARD), Deployment.KERNELS)

        assert session.conditions(self._watched(session, family, Kind.FORWARD, 1)) == Conditions()

    def test_a_forward_has_what_its_backward_gains(
        self, session: Session, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        family = object()
        forward, backward = (self._watched(session, family, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
        monkeypatch.setattr(backward, "gain_in_trees_us", lambda: 60.0)
        monkeypatch.setattr(session.rota, "measured_with", {forward.family: [forward, backward]}.get)

        assert session.conditions(forward) == Conditions(backward_gain_us=60.0)

    @pytest.mark.parametrize(
        ("medians", "gain_us"),
        [
            ({Deployment.KERNELS: 100.0, Deployment.TREES: 50.0, Deployment.GRAPH: 30.0}, 40.0),
            ({}, 60.0),  # as another process found: in trees already, it loses nothing more
        ],
        ids=["measured", "adopted"],
    )
    def test_what_a_part_loses_in_trees_is_kept_for_the_others(
        self,
        session: Session,
        monkeypatch: pytest.MonkeyPatch,
        medians: dict[Deployment, float],
        gain_us: float,
    ) -> None:
        family = object()
        first, second = (self._watched(session, family, Kind.FORWARD, part) for part in (0, 1))
        backward = self._watched(session, family, Kind.BACKWARD)
        monkeypatch.setattr(backward, "gain_in_trees_us", lambda: 60.0)
        monkeypatch.setattr(session.rota, "measured_with", {first.family: [second, backward]}.get)
        measurements = tuple(
            Measurement(each, 8, time, 0.0, time, time, 0.0) for each, time in medians.items()
        )
        decision = Decision(Deployment.TREES, "for a test", POLICY_VERSION)
        adopted = None if measurements else Entry(first.graph.digest, decision)
        result = Decided(first.graph, decision, measurements, adopted=adopted)
        session.decided(first, result, decision)

        assert session.conditions(second) == Conditions(backward_gain_us=gain_us)

    def test_another_models_forward_does_not_matter(self, session: Session) -> None:
        family, other = object(), object()
        self._decide(session, self._watched(session, other, Kind.FORWARD), Deployment.KERNELS)

        assert session.conditions(self._watched(session, family, Kind.BACKWARD)) == Conditions()

    def test_they_are_recorded_with_the_decision(self, session: Session) -> None:
        region = self._watched(session, object(), Kind.BACKWARD)
        measurements = (Measurement(Deployment.KERNELS, 8, 1.0, 0.0, 1.0, 1.0, 0.0),)
        decision = Decision(Deployment.KERNELS, "for a test", POLICY_VERSION)

        session.decided(region, Decided(region.graph, decision, measurements, Conditions(False)), decision)

        (file,) = session.locations.spool.iterdir()
        (record,) = decode(RecordRequest, file.read_bytes()).records
        assert record == Record(region.graph, decision, measurements, Conditions(False))
