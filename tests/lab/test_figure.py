"""The figure of steps: what is drawn is what was measured, and what cannot be drawn is said."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import pytest
from matplotlib.figure import Figure

from benchmarks.errors import BenchmarkError
from benchmarks.protocol import Answer
from benchmarks.records import Record, record_of, write_result
from benchmarks.trial import TrialResult
from benchmarks.variants import VARIANTS
from benchmarks.workloads import WORKLOADS
from tests.support.benchmark_commands import lab
from tools.lab.figure import COLOURS, draw, medians

if TYPE_CHECKING:
    from pathlib import Path

PNG = b"\x89PNG\r\n"
ENVIRONMENT: dict[str, str | None] = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "cpu": "a CPU",
    "commit": "0123456789abcdef",
}


def record(workload: str, variant: str, *repetitions: list[float], each_step: bool = True) -> Record:
    trials = [
        TrialResult(index, Answer(steps, steps, [], None, 1.0, None, "", {}), None, None, True, 1.0)
        for index, steps in enumerate(repetitions)
    ]
    return record_of(WORKLOADS[workload], VARIANTS[variant], trials, each_step=each_step)


RECORDS = [
    record("three-ops", "default", [3.0, 1.0, 1.0], [5.0, 1.2, 1.0]),
    record("three-ops", "pygraph-cold", [3.0, 1.0, 0.5]),
    record("mlp-training", "default", [2.0, 2.0]),
    record("mlp-training", "reduce-overhead", [1.5, 1.5]),
]


def result_file(folder: Path) -> Path:
    write_result(folder / "result.json", ENVIRONMENT, {"warm_up": 1}, RECORDS)
    return folder / "result.json"


def test_steps_are_kept_where_they_are_asked_for() -> None:
    assert RECORDS[0].each_step_ms == [[3.0, 1.0, 1.0], [5.0, 1.2, 1.0]]
    assert record("three-ops", "default", [3.0], each_step=False).each_step_ms is None


def test_each_step_is_the_median_of_the_repetitions_that_have_it() -> None:
    assert medians([[3.0, 1.0], [5.0, 2.0, 7.0], [4.0]]) == [4.0, 1.5, 7.0]


def test_every_peer_is_a_line_of_its_own_colour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    save = Figure.savefig

    def saved(figure: Any, *arguments: Any, **more: Any) -> None:
        drawn.append(figure)
        save(figure, *arguments, **more)

    monkeypatch.setattr(Figure, "savefig", saved)
    draw(result_file(tmp_path), tmp_path / "figure.png")

    assert (tmp_path / "figure.png").read_bytes().startswith(PNG)
    first, second = (axes for axes in drawn[0].axes if axes.lines)
    assert [axes.get_title() for axes in (first, second)] == ["three-ops", "mlp-training"]
    assert {line.get_label(): list(line.get_xydata()[:, 1]) for line in first.lines} == {
        "default": [4.0, 1.1, 1.0], "pygraph-cold": [3.0, 1.0, 0.5],
    }  # fmt: skip
    assert list(first.lines[0].get_xydata()[:, 0]) == [2, 3, 4]
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["default", "reduce-overhead", "pygraph-cold"]
    assert set(COLOURS) == set(VARIANTS)
    assert len(set(COLOURS.values())) == len(VARIANTS)


def test_a_result_file_becomes_a_picture(tmp_path: Path) -> None:
    result, picture = result_file(tmp_path), tmp_path / "figure.png"

    assert lab("figure", str(result), "--out", str(picture)).returncode == 0

    assert picture.read_bytes().startswith(PNG)


def test_results_without_steps_are_refused(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    write_result(result, ENVIRONMENT, {"warm_up": 1}, [dataclasses.replace(RECORDS[0], each_step_ms=None)])

    done = lab("figure", str(result), "--out", str(tmp_path / "figure.png"))

    assert done.returncode == 2
    assert "run --each-step" in done.stderr
    assert not (tmp_path / "figure.png").exists()


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    with pytest.raises(BenchmarkError, match="pip install matplotlib"):
        draw(result_file(tmp_path), tmp_path / "figure.png")
