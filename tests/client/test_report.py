"""The summary says what happened, and a worker never overwrites its parent's."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.client import report
from pygraphd.schema.messages import Decision, Deployment

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYGRAPH_SUMMARY", str(tmp_path / "summary.json"))
    monkeypatch.delenv("_PYGRAPH_SUMMARY_OWNER", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    return tmp_path / "summary.json"


def filled() -> report.Report:
    made = report.Report()
    made.count(graphs=3, looked_up=3, hits=1, misses=2)
    made.deploy(Decision(Deployment.LAUNCH, "no CUDA device", 1))
    made.deploy(Decision(Deployment.LAUNCH, "no CUDA device", 1))
    made.deploy(Decision(Deployment.TREES, "TREES is faster", 1))
    made.fail("daemon: no daemon")
    return made


def test_the_summary_has_the_promised_fields(target: Path) -> None:
    report.claim_summary()
    report.write_summary(filled())

    summary = json.loads(target.read_text())
    promised = (
        "graphs", "looked_up", "hits", "misses", "measured", "deployed", "reasons", "lookup_ms", "measuring_ms", "daemon",
    )  # fmt: skip
    assert {name: summary[name] for name in promised} == {
        "graphs": 3,
        "looked_up": 3,
        "hits": 1,
        "misses": 2,
        "measured": 0,
        "deployed": {"LAUNCH": 2, "TREES": 1, "RELOCATE": 0},
        "reasons": {"no CUDA device": 2, "TREES is faster": 1},
        "lookup_ms": 0.0,
        "measuring_ms": 0.0,
        "daemon": {"version": None},
    }
    assert summary["failures"] == {"daemon: no daemon": 1}
    assert list(target.parent.iterdir()) == [target]


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
    monkeypatch.delenv("_PYGRAPH_SUMMARY_OWNER", raising=False)
    monkeypatch.chdir(tmp_path)

    report.claim_summary()
    report.write_summary(filled())

    assert list(tmp_path.iterdir()) == []
    assert "_PYGRAPH_SUMMARY_OWNER" not in os.environ
