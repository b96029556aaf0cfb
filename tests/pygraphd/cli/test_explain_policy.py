"""An entry that another version of the policy has decided is not shown as if programs of this one went by it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.cli.explain import explain
from pygraphd.cli.render_explanations import answer_text
from pygraphd.daemon.rederiving import RederiveRequest
from pygraphd.daemon.store import Store
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Graph,
    Kind,
    Measurement,
    Origin,
    Record,
    RecordRequest,
    encode,
)
from pygraphd.schema.policy import POLICY_VERSION, decide
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Deployed, Source
from tests.support.environments import HERE, OLD_DRIVER

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pygraphd.schema.keys import Environment

KERNELS, GRAPHS = Deployment.KERNELS, Deployment.GRAPH
GRAPH = Graph("ab" * 32, Kind.FORWARD, 0, 3, 17)
FIGURES = (
    Measurement(KERNELS, 8, 100.0, 0.1, 100.0, 30.0, 0.5),
    Measurement(GRAPHS, 8, 60.0, 0.1, 60.0, 30.0, 0.5),
)
PRESENT = decide(FIGURES)
OTHERS = (POLICY_VERSION - 1, POLICY_VERSION + 1)
NO_DEVICE = Decision(KERNELS, Reason(ReasonCode.NO_DEVICE), POLICY_VERSION)
CURE = "measured anew when it is met, unless `pygraphd cache rederive` can apply the present policy"


def of_policy(version: int, decision: Decision = PRESENT) -> Decision:
    return dataclasses.replace(decision, policy=version)


def versions(version: int) -> str:
    return f"decided by policy {version}, and this is policy {POLICY_VERSION}"


def request(
    decision: Decision, environment: Environment = HERE, figures: Sequence[Measurement] = FIGURES
) -> RecordRequest:
    record = Record(GRAPH, decision, tuple(figures))
    return RecordRequest(environment, Origin("host-a", "0.1.0"), (record,))


def fill(locations: Locations, *requests: RecordRequest) -> None:
    with Store(locations.database) as store:
        for each in requests:
            store.record(each, 7)


def summary(folder: Path, source: Source = Source.CACHE) -> str:
    """Write what a program that ran here would leave; return the file's name."""
    ran = Deployed(GRAPH.digest, GRAPH.kind, HERE.digest(), PRESENT.deployment, PRESENT.reason, True, source)
    path = folder / "summary.json"
    environments = {HERE.digest(): HERE.factors()}
    value = {"schema": 2, "environments": environments, "decisions": [dataclasses.asdict(ran)]}
    path.write_text(json.dumps(value))
    return str(path)


def explained(target: str, locations: Locations) -> tuple[dict[str, Any], list[str]]:
    """Return the one graph of the answer as JSON, and the lines of the text."""
    answer = explain(target, locations)
    (graph,) = json.loads(json.dumps(answer.as_json()))["graphs"]
    return graph, answer_text(answer).splitlines()


@pytest.fixture
def locations(tmp_path: Path) -> Locations:
    return locate({"PYGRAPHD_HOME": str(tmp_path)})


@pytest.mark.parametrize("version", OTHERS)
def test_of_a_graph_it_is_said(locations: Locations, version: int) -> None:
    fill(locations, request(of_policy(version)))

    graph, lines = explained(GRAPH.digest, locations)

    assert graph["entry"]["not_used"] == f"{versions(version)}: {CURE}"
    (at,) = (number for number, line in enumerate(lines) if line.startswith("decided "))
    assert lines[at + 1] == f"not used     {versions(version)}: {CURE}"


@pytest.mark.parametrize("version", OTHERS)
def test_of_a_summary_it_is_said(locations: Locations, tmp_path: Path, version: int) -> None:
    fill(locations, request(of_policy(version)))

    graph, lines = explained(summary(tmp_path), locations)

    assert graph["entry"]["not_used"] == f"{versions(version)}: {CURE}"
    (at,) = (number for number, line in enumerate(lines) if line.startswith("cache "))
    assert lines[at].startswith("cache        the same, decided ")
    assert lines[at + 1] == f"not used     {versions(version)}: {CURE}"


@pytest.mark.parametrize("decision", [PRESENT, NO_DEVICE])
def test_of_what_is_used_it_is_not(locations: Locations, tmp_path: Path, decision: Decision) -> None:
    fill(locations, request(decision, figures=FIGURES if decision is PRESENT else ()))

    for target in (GRAPH.digest, summary(tmp_path)):
        graph, lines = explained(target, locations)
        assert graph["entry"]["not_used"] == ""
        assert not any(line.startswith("not used") for line in lines)


def test_a_rule_is_not_derived_anew(locations: Locations) -> None:
    fill(locations, request(of_policy(1, NO_DEVICE), figures=()))

    graph, _ = explained(GRAPH.digest, locations)

    assert graph["entry"]["not_used"] == f"{versions(1)}: decided anew when a program next uses the graph"


def test_what_waits_in_the_spool_has_to_be_taken_in_first(locations: Locations) -> None:
    locations.spool.mkdir()
    (locations.spool / "1.json").write_bytes(encode(request(of_policy(1))))

    graph, lines = explained(GRAPH.digest, locations)

    expected = f"{versions(1)}: {CURE.replace('`', 'once it is taken in, `', 1)}"
    assert graph["entry"]["not_used"] == expected
    assert f"not used     {expected}" in lines


def test_a_neighbour_that_is_not_used_there_either_says_so(locations: Locations, tmp_path: Path) -> None:
    fill(locations, request(of_policy(1), OLD_DRIVER))

    graph, lines = explained(summary(tmp_path, Source.MEASURED), locations)

    assert graph["entry"] is None
    assert graph["nearest"]["entry"]["not_used"] == f"{versions(1)}: {CURE}"
    (nearest,) = (line for line in lines if line.startswith("nearest "))
    assert nearest.endswith(" ago by uid 7, by policy 1)")
    assert not any(line.startswith("not used") for line in lines)


def test_a_neighbour_that_is_used_there_names_no_policy(locations: Locations, tmp_path: Path) -> None:
    fill(locations, request(PRESENT, OLD_DRIVER))

    graph, lines = explained(summary(tmp_path, Source.MEASURED), locations)

    assert graph["nearest"]["entry"]["not_used"] == ""
    assert any(line.startswith("nearest ") and line.endswith(" ago by uid 7)") for line in lines)


def test_what_was_derived_anew_is_used(locations: Locations) -> None:
    fill(locations, request(of_policy(POLICY_VERSION - 1)))
    with Store(locations.database) as store:
        store.rederive(RederiveRequest())

    graph, _ = explained(GRAPH.digest, locations)

    assert (graph["entry"]["policy"], graph["entry"]["not_used"]) == (POLICY_VERSION, "")
