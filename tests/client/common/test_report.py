"""The summary says what happened, and a worker never overwrites its parent's."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common import report
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Decision, Deployment, Graph, Kind, Measurement
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.schema.summary import Source

if TYPE_CHECKING:
    from pathlib import Path

GRAPH = Graph("a" * 64, Kind.BACKWARD, 0, 1, 17)
ENVIRONMENT = Environment("NVIDIA H200", "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400")
NO_DEVICE = Decision(Deployment.KERNELS, Reason(ReasonCode.NO_DEVICE), 1)


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYGRAPH_SUMMARY", str(tmp_path / "summary.json"))
    monkeypatch.setenv("_PYGRAPH_SUMMARY_OWNER", "")  # so that the variable is gone after the test
    monkeypatch.delenv("_PYGRAPH_SUMMARY_OWNER")
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "summary.json"


def filled() -> report.Report:
    made = report.Report()
    made.count(graphs=3, looked_up=3, hits=1, misses=2)
    made.record_deployment(GRAPH, ENVIRONMENT, NO_DEVICE, Source.RULE)
    made.record_deployment(GRAPH, ENVIRONMENT, NO_DEVICE, Source.CACHE)
    made.record_deployment(
        GRAPH, ENVIRONMENT, Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), 1), Source.MEASURED
    )
    made.count_failure("daemon: no daemon")
    return made


def test_the_summary_has_the_promised_fields(target: Path) -> None:
    report.claim_summary()
    report.write_summary(filled())

    summary = json.loads(target.read_text())
    promised = (
        "graphs", "looked_up", "hits", "misses", "measured", "deployed", "nodes_in_graphs", "reasons", "lookup_ms", "measuring_ms",
        "recording_ms", "daemon",
    )  # fmt: skip
    assert {name: summary[name] for name in promised} == {
        "graphs": 3,
        "looked_up": 3,
        "hits": 1,
        "misses": 2,
        "measured": 0,
        "deployed": {"KERNELS": 2, "GRAPH": 1},
        "nodes_in_graphs": 0,
        "reasons": {"no CUDA device": 2, "GRAPH is faster": 1},
        "lookup_ms": 0.0,
        "measuring_ms": 0.0,
        "recording_ms": 0.0,
        "daemon": {"version": None},
    }
    assert summary["failures"] == {"daemon: no daemon": 1}
    assert list(target.parent.iterdir()) == [target]


def test_the_summary_says_how_each_graph_ran_and_where() -> None:
    made = report.Report()
    made.record_deployment(
        GRAPH,
        ENVIRONMENT,
        Decision(Deployment.KERNELS, Reason(ReasonCode.TOO_FEW_CALLS), 1, final=False, calls=3),
        Source.UNFINISHED,
    )

    summary = json.loads(json.dumps(made.summary()))

    environment = ENVIRONMENT.digest()
    assert summary["environments"] == {environment: ENVIRONMENT.factors()}
    assert summary["decisions"] == [
        {
            "graph": "a" * 64,
            "kind": "backward",
            "environment": environment,
            "deployment": "KERNELS",
            "reason": {"code": "too_few_calls", "detail": ""},
            "final": False,
            "source": "unfinished",
            "sizes": [],
            "against": {"code": "not_stated", "detail": ""},
            "because": None,
        }
    ]
    assert summary["decisions_left_out"] == 0


def test_the_summary_has_the_facts_of_each_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_DECISIONS", 2)
    made = report.Report()
    made.note_graph(GRAPH.digest, (), module="L['self']/layers", places=["model.py:7 in forward"])
    made.note_graph(GRAPH.digest, (4, 8), nodes=12, memory_bytes=4096)
    made.note_graph("b" * 64, nodes=1)  # beyond the bound
    measured = Measurement(Deployment.GRAPH, 8, 50.0, 0.1, 20.0, 40.0, 0.0)
    faster = Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), 1)
    made.record_deployment(GRAPH.at((4, 8)), ENVIRONMENT, faster, Source.MEASURED, measured=[measured])

    facts = json.loads(json.dumps(made.summary()))["facts"]

    whole, sized = facts[GRAPH.digest], facts[GRAPH.at((4, 8)).digest]
    assert facts.keys() == {GRAPH.digest, GRAPH.at((4, 8)).digest}
    assert (whole["module"], whole["places"]) == ("L['self']/layers", ["model.py:7 in forward"])
    assert (sized["whole"], sized["nodes"], sized["memory_bytes"]) == (GRAPH.digest, 12, 4096)
    assert sized["figures"][0]["host_us"] == 20.0
    assert whole["seen_at"] <= sized["seen_at"] <= sized["decided_at"]


def test_reasons_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Since they name lines of the user's code, sizes or errors."""
    monkeypatch.setattr(report, "MAX_REASONS", 2)
    made = report.Report()
    for line in (1, 2, 3, 1, 4):
        for count in (made.count_failure, made.count_fallback, made.count_left_to_torch):
            count(f"model.py:{line}")
        made.note("left_on_cpu", f"model.py:{line}")
        made.note("graph_breaks", f"model.py:{line}")

    expected = {"model.py:1": 2, "model.py:2": 1, "others": 2}
    names = ("left_on_cpu", "graph_breaks", "failures", "fallbacks", "left_to_torch")
    assert [made.summary()[name] for name in names] == [expected] * len(names)
    assert [each.getMessage() for each in caplog.records if each.levelname == "WARNING"] == [
        "model.py:1",
        "model.py:2",
        "model.py:3",
    ]


def test_a_job_that_never_stops_compiling_only_counts_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MAX_DECISIONS", 3)
    made = report.Report()
    for _ in range(5):
        made.record_deployment(GRAPH, ENVIRONMENT, NO_DEVICE, Source.RULE)

    summary = made.summary()

    assert (len(summary["decisions"]), summary["decisions_left_out"]) == (3, 2)
    assert summary["deployed"]["KERNELS"] == summary["reasons"]["no CUDA device"] == 5


def test_a_child_with_graphs_writes_beside_its_parent(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PYGRAPH_SUMMARY_OWNER", "1")
    report.write_summary(filled())
    monkeypatch.setenv("RANK", "3")
    report.write_summary(filled())

    assert {path.name for path in target.parent.iterdir()} == {
        f"summary.json.{os.getpid()}",
        "summary.json.3",
    }


def test_a_child_that_compiled_nothing_writes_nothing(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PYGRAPH_SUMMARY_OWNER", "1")

    report.write_summary(report.Report())

    assert list(target.parent.iterdir()) == []


def test_without_the_variable_nothing_is_written_or_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYGRAPH_SUMMARY", raising=False)
    monkeypatch.setenv("_PYGRAPH_SUMMARY_OWNER", "")  # so that the variable is gone after the test
    monkeypatch.delenv("_PYGRAPH_SUMMARY_OWNER")
    monkeypatch.chdir(tmp_path)

    report.claim_summary()
    report.write_summary(filled())

    assert list(tmp_path.iterdir()) == []
    assert "_PYGRAPH_SUMMARY_OWNER" not in os.environ


def test_of_two_models_with_the_same_code_the_deployment_of_the_one_that_is_dropped_is_retracted() -> None:
    made, faster = report.Report(), Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), 1)
    first, second = GRAPH.at((8,)), GRAPH.at((8,))
    assert first == second
    made.record_deployment(first, ENVIRONMENT, NO_DEVICE, Source.RULE)
    made.record_deployment(second, ENVIRONMENT, faster, Source.MEASURED)

    made.retract_deployment(second, ENVIRONMENT)

    summary = made.summary()
    assert [each["deployment"] for each in summary["decisions"]] == ["KERNELS"]
    assert summary["deployed"] == {"KERNELS": 1, "GRAPH": 0}
    assert summary["reasons"] == {"no CUDA device": 1}

    made.retract_deployment(second, ENVIRONMENT)
    assert made.summary() == summary
