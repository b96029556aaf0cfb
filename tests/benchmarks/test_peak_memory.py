"""Peak memory over that of `reduce-overhead`: which processes count, and when a bound is broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.peak_memory import line, peak_memory
from benchmarks.records import Record, write_result
from tests.support.benchmark_commands import benchmarks

if TYPE_CHECKING:
    from pathlib import Path


def record(workload: str, variant: str, mb: float | None, *, ran: bool = True) -> Record:
    mode = "training" if workload.endswith("training") else "inference"
    return Record(
        workload,
        mode,
        1,
        variant,
        repetition_medians_ms=[1.0] if ran else [],
        repetition_pipelined_ms=[1.0] if ran else [],
        reserved_mb=mb,
    )


def test_the_process_that_reserved_most_counts_and_modes_are_apart() -> None:
    records = [
        record("a-inference", "reduce-overhead", 100.0),
        record("a-inference", "pygraph-cold", 90.0),
        record("a-inference", "pygraph-cold", 121.0),
        record("b-inference", "reduce-overhead", 100.0),
        record("b-inference", "pygraph-cold", 100.0),
        record("c-training", "reduce-overhead", 100.0),
        record("c-training", "pygraph-cold", 116.0),
    ]

    inference, training = peak_memory(records, "pygraph-cold")

    assert inference.mean == pytest.approx(1.10)
    assert inference.is_kept
    assert inference.most == ("a-inference", 1.21)
    assert training.mean == pytest.approx(1.16)
    assert not training.is_kept
    assert line(training) == (
        "peak memory over reduce-overhead, training, 1 workloads: geometric mean 1.160, at most 1.160 (c-training); "
        "bound of the mean 1.15: BROKEN"
    )


def test_what_has_failed_or_was_not_run_is_left_out() -> None:
    records = [
        record("a-inference", "reduce-overhead", 100.0, ran=False),
        record("a-inference", "pygraph-cold", 500.0),
        record("b-inference", "pygraph-cold", 500.0),
        record("c-inference", "reduce-overhead", None),
        record("c-inference", "pygraph-cold", 500.0),
    ]

    assert peak_memory(records, "pygraph-cold") == []


@pytest.mark.parametrize(("mb", "code", "verdict"), [(109.0, 0, "kept"), (111.0, 1, "BROKEN")])
def test_compare_fails_where_the_bound_is_broken(tmp_path: Path, mb: float, code: int, verdict: str) -> None:
    file = tmp_path / "result.json"
    records = [
        record("three-ops", "default", 50.0),
        record("three-ops", "reduce-overhead", 100.0),
        record("three-ops", "pygraph-cold", mb),
    ]
    write_result(file, {"gpu": "a GPU", "torch": "2.11.0"}, {}, records)

    done = benchmarks("compare", str(file))

    assert done.returncode == code
    assert f"bound of the mean 1.10: {verdict}" in done.stdout
