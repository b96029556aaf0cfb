"""Ten workloads against stored results: what is slower, and what cannot be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.records import Record, write_result
from benchmarks.workloads import select_workloads
from tests.support.benchmark_commands import lab
from tools.lab import quick

if TYPE_CHECKING:
    from pathlib import Path


def record(workload: str, variant: str, *times: float, correct: bool = True) -> Record:
    return Record(workload, "inference", 1, variant, repetition_medians_ms=list(times), correct=correct)


STORED = quick.times_of(
    [
        record(name, variant, 1.0, 1.1)
        for name in ("a", "b", "c", "d")
        for variant in ("default", "pygraph-default")
    ]
)


def test_what_is_slower_by_more_than_the_noise_or_has_failed_is_bad() -> None:
    now = [
        *(record("a", variant, 1.3) for variant in ("default", "pygraph-default")),  # the machine is slower
        *(record("b", variant, ms) for variant, ms in (("default", 1.0), ("pygraph-default", 1.3))),
        record("c", "default", 1.0),
        record("c", "pygraph-default"),
        record("d", "default", 1.0),
        record("d", "pygraph-default", 0.5, correct=False),
    ]

    found = list(quick.changes(now, STORED, "pygraph-default"))

    assert [each.is_bad for each in found] == [False, True, True, True]
    assert [line.split()[-1] for line in quick.render(found).splitlines()[2:5]] == [
        "SLOWER",
        "FAILS",
        "FAILS",
    ]


def test_without_stored_results_of_the_gpu_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="no stored results for NVIDIA A100, only for NVIDIA H"):
        quick.stored_times(None, "NVIDIA A100")
    plain = tmp_path / "plain.json"
    write_result(plain, {}, {}, [record("bert-inference", "default", 1.0)])

    done = lab("quick", "--stored", str(plain), "--out", str(tmp_path))
    assert lab("table", str(plain)).returncode == 2, "a result of `run`"

    assert done.returncode == 2
    assert "have none of these workloads as a variant of PyGraph" in done.stderr


def test_there_are_ten_workloads_and_all_are_stored() -> None:
    names = quick.WORKLOADS.split(",")

    assert len(select_workloads(names)) == 10
    stored = quick.stored_times(None, "NVIDIA H100 80GB HBM3")
    assert {(name, "pygraph-default") for name in names} <= stored.keys()
