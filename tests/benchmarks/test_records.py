from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.coverage import Coverage
from benchmarks.errors import BenchmarkError
from benchmarks.figures import Figure
from benchmarks.records import Record, check_writable, read_records, record_of, write_result
from benchmarks.trial import TrialResult
from benchmarks.variants import VARIANTS
from benchmarks.workloads import WORKLOADS
from tests.support.benchmark_records import answered, record

if TYPE_CHECKING:
    from pathlib import Path


def failed(repetition: int, error: str) -> TrialResult:
    return TrialResult(repetition, None, None, error, compiled_cold=True, seconds=1.0)


def summary(measuring_ms: float, graphs: int) -> dict[str, Any]:
    return {
        "graphs": 2,
        "hits": 0,
        "misses": 2,
        "measured": 2,
        "measuring_ms": measuring_ms,
        "deployed": {"KERNELS": 2 - graphs, "GRAPH": graphs},
        "reasons": {},
        "fallbacks": {"sizes that had not come back yet": 2, "verification: output 1 differs": 1},
    }


def test_figures_are_over_all_steps_of_all_repetitions() -> None:
    made = record(
        answered(0, [1.0, 2.0, 3.0], compile_s=10.0), answered(1, [11.0, 12.0, 13.0], compile_s=20.0)
    )
    assert made.step_ms == Figure(median=7.0, mad=5.0, n=6)
    assert made.repetition_medians_ms == [2.0, 12.0]
    assert made.host_ms == Figure(0.5, 0.0, 2)
    assert made.pipelined_ms == Figure(1.5, 0.0, 2)
    assert made.compile_s == 15.0
    assert made.reserved_mb == 101.0
    assert made.note == ""


def test_compile_time_is_only_of_empty_caches() -> None:
    made = record(answered(0, [1.0], compile_s=20.0), answered(1, [1.0], compile_s=4.0, cold=False))
    assert made.compile_s == 20.0
    assert made.note == "first step with the compiler's caches filled: 4.0 s"


def test_failure_leaves_nulls_and_a_note() -> None:
    made = record(failed(0, "RuntimeError: no"))
    assert (made.step_ms, made.host_ms, made.pipelined_ms, made.correct) == (None, None, None, None)
    assert (made.reserved_mb, made.compile_s, made.measuring_s, made.deployed) == (None, None, None, None)
    assert made.note == "RuntimeError: no"


def test_late_failure_keeps_what_was_measured() -> None:
    made = record(answered(0, [1.0]), failed(1, "RuntimeError: no"))
    assert made.step_ms == Figure(1.0, 0.0, 1)
    assert made.note == "repetition 2: RuntimeError: no"


def test_one_wrong_repetition_makes_the_record_wrong() -> None:
    assert record(answered(0, [1.0]), answered(1, [1.0], correct=False)).correct is False


def test_what_the_product_summed_up_is_taken_over() -> None:
    made = record(
        answered(0, [1.0], summary=summary(100.0, graphs=1)),
        answered(1, [1.0], summary=summary(300.0, graphs=2)),
        variant="pygraph-cold",
    )
    assert made.measuring_s == 0.2
    assert made.deployed == {"KERNELS": 0, "GRAPH": 2}
    assert "graphs 2, hits 0, misses 2, measured 2" in made.note
    assert "repetition 1: deployed 1 KERNELS, 1 GRAPH" in made.note
    assert "repetition 2: deployed 2 GRAPH" in made.note
    assert "ran as KERNELS: verification: output 1 differs" in made.note
    assert "come back" not in made.note


def test_what_the_rules_did_is_noted_of_each_repetition() -> None:
    did = {"placed": 2, "placed_inputs": 0, "sent": 90, "left_on_cpu": {"a": 1, "b": 2}}
    made = record(
        answered(0, [1.0], summary=summary(1.0, graphs=1) | did),
        answered(1, [1.0], summary=summary(1.0, graphs=1) | {"placed": 0, "sent": 80, "left_on_cpu": {}}),
        answered(2, [1.0], summary=summary(1.0, graphs=1)),
        variant="pygraph-cold",
    )

    assert "repetition 1: CPU values: 2 placed, 90 sent, 3 left_on_cpu" in made.note
    assert "repetition 2: CPU values: 80 sent" in made.note
    assert "repetition 3: CPU values: none" in made.note


def test_coverage_is_of_the_last_repetition_that_has_one_and_differences_are_noted() -> None:
    made = record(
        answered(0, [1.0], coverage=Coverage(0, 8, 0)),
        answered(1, [1.0], coverage=Coverage(5, 8, 2)),
        answered(2, [1.0]),
    )
    assert (made.coverage, made.kernels, made.graph_launches) == (0.625, 8, 2)
    assert "repetition 1: 0 of 8 kernels" in made.note
    assert "repetition 2: 5 of 8 kernels" in made.note


def test_no_kernel_in_a_graph_is_a_coverage_too() -> None:
    assert record(answered(0, [1.0], coverage=Coverage(0, 8, 0))).coverage == 0.0


def test_file_has_the_documented_shape_and_reads_back(tmp_path: Path) -> None:
    records = [record(answered(0, [1.0])), record(failed(0, "no"), variant="eager")]
    file = tmp_path / "result.json"
    write_result(file, {"gpu": None}, {"steps": 1}, records)
    content = json.loads(file.read_text())
    assert content["schema"] == 2
    assert all(
        set(entry) == {each.name for each in dataclasses.fields(Record)} for entry in content["records"]
    )
    assert set(content["records"][0]["step_ms"]) == {"median", "mad", "n"}
    assert content["records"][0]["mode"] == "training"
    assert read_records(file) == records
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_what_was_recorded_and_fell_back_is_kept_of_each_process() -> None:
    fallbacks = {"sizes that had not come back yet": 2, "verification: output 1 differs": 1}
    of_first = {"captured": 3, "failures": {"giving memory back: RuntimeError": 1}}
    made = record(
        answered(0, [1.0], summary=summary(1.0, graphs=1) | of_first),
        failed(1, "killed"),
        answered(2, [1.0], summary=summary(1.0, graphs=1) | {"captured": 0, "fallbacks": {}}),
        variant="pygraph-cold",
    )

    assert made.counted == [
        {**of_first, "fallbacks": fallbacks},
        {"captured": 0, "fallbacks": {}, "failures": None},
    ]


def test_the_parts_of_the_overhead_are_medians_in_seconds() -> None:
    timed = summary(0.0, graphs=0) | {"lookup_ms": 1.5, "checking_ms": 0.0, "recording_ms": 250.0}
    trials = [answered(0, [1.0], summary=timed), answered(1, [1.0], summary=timed | {"lookup_ms": 2.5})]

    warm = record_of(WORKLOADS["mlp-training"], VARIANTS["pygraph-warm"], trials, together=True)

    assert (warm.lookup_s, warm.checking_s, warm.recording_s) == (0.002, 0.0, 0.25)
    assert warm.repetition_pipelined_ms == [1.5, 1.5]
    assert warm.compiled_together


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 3}', '{"schema": 2, "records": [{}]}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(BenchmarkError, match=r"other\.json"):
        read_records(file)


def test_an_impossible_place_for_the_result_is_refused_and_nothing_touched(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="--out"):
        check_writable(tmp_path / "missing" / "result.json")
    old = tmp_path / "old.json"
    old.write_text("old")
    check_writable(old)
    assert old.read_text() == "old"
