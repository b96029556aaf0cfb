"""Which ways regions are run in, without running any."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.regions import DEFAULT_WAYS, Job, measure_regions
from benchmarks.workloads import WORKLOADS
from tests.support.benchmark_commands import benchmarks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def test_a_way_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = benchmarks("regions", "--ways", "graph,nonsense", "--out", str(tmp_path / "result.json"))

    assert done.returncode == 2
    assert "unknown way nonsense; choose among: reduce-overhead, graph, kernels" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.torch
def test_a_process_that_fails_is_in_the_file_and_in_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    out = tmp_path / "result.json"

    done = benchmarks(
        "regions", "--workloads", "three-ops", "--ways", "kernels", "--repetitions", "1", "--out", str(out)
    )

    assert done.returncode == 1
    (record,) = json.loads(out.read_text())["records"]
    assert "torch sees no CUDA device here" in record["error"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        (
            DEFAULT_WAYS,
            [
                "three-ops.reduce-overhead",
                "three-ops.graph",
                "bert-inference.reduce-overhead",
                "bert-inference.graph",
            ],
        ),
        (["kernels"], ["three-ops.kernels", "bert-inference.kernels"]),
    ],
)
def test_each_way_is_a_process_and_the_next_repetition_goes_backwards(
    tmp_path: Path, ways: list[str], expected: list[str]
) -> None:
    ran: list[str] = []

    def note(jobs: Sequence[Job]) -> list[dict[str, Any]]:
        ran.extend(job.name for job in jobs)
        return [{"workload": job.workload.name, "way": job.way, "error": "not run"} for job in jobs]

    workloads = [WORKLOADS["three-ops"], WORKLOADS["bert-inference"]]

    measure_regions(workloads, ways, 2, tmp_path / "result.json", None, note)

    first, second = ran[: len(expected)], ran[len(expected) :]
    assert first == expected
    assert sorted(second) == sorted(expected)
    assert [each for each in second if "bert" in each] == [each for each in first if "bert" in each][::-1]
