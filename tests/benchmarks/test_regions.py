"""Which ways regions are run in, without running any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import Outcome
from benchmarks.regions import _Job, measure_regions
from benchmarks.workloads import WORKLOADS
from tests.benchmarks.test_cli import benchmarks

ADDRESSES = ("addresses_ms", "addresses_beyond_fixed", "addresses_regions_beyond_fixed")


def test_a_way_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = benchmarks("regions", "--ways", "graph,nonsense", "--out", str(tmp_path / "result.json"))

    assert done.returncode == 2
    assert "unknown way nonsense; choose among: reduce-overhead, graph, kernels" in done.stderr
    assert not list(tmp_path.iterdir())


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
            None,
            [
                "three-ops.reduce-overhead",
                "three-ops.graph",
                "autoencoder-inference.reduce-overhead",
                "autoencoder-inference.graph",
            ],
        ),
        (["kernels"], ["three-ops.kernels", "autoencoder-inference.kernels"]),
    ],
)
def test_each_way_is_a_process_and_the_next_repetition_goes_backwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ways: list[str] | None, expected: list[str]
) -> None:
    ran: list[str] = []

    def note(job: _Job) -> dict[str, Any]:
        ran.append(job.name)
        return {"workload": job.workload.name, "way": job.way, "error": "not run"}

    monkeypatch.setattr("benchmarks.regions._measure", note)
    workloads = [WORKLOADS["three-ops"], WORKLOADS["autoencoder-inference"]]

    measure_regions(workloads, ways, 2, tmp_path / "result.json", None)

    first, second = ran[: len(expected)], ran[len(expected) :]
    assert first == expected
    assert sorted(second) == sorted(expected)
    assert [each for each in second if "auto" in each] == [each for each in first if "auto" in each][::-1]


@pytest.mark.parametrize("addresses", [True, False])
def test_steps_whose_addresses_alternate_are_timed_if_they_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addresses: bool
) -> None:
    told: list[list[str]] = []

    def run(arguments: list[str], *_: object, **__: object) -> Outcome:
        told.append(arguments)
        figure = {"median": 1.0, "mad": 0.0, "n": 3}
        timed = {name: {"fixed": figure} for name in ADDRESSES} if addresses else {}
        clock = {"median": 1980.4, "mad": 0.0, "n": 3}
        answer = {
            "regions": [],
            "reserved_mb": 2.0,
            "first_steps_reserved_mb": 3.0,
            "gpu_mhz": clock,
            **timed,
        }
        Path(arguments[4]).write_text(json.dumps(answer))
        return Outcome(None, "")

    monkeypatch.setattr("benchmarks.regions.run_fresh", run)

    lines = measure_regions(
        [WORKLOADS["three-ops"]], ["reduce-overhead"], 1, tmp_path / "result.json", None, addresses=addresses
    )

    assert [each[6:] for each in told] == [["addresses"] if addresses else []]
    assert lines[0].endswith("reduce-overhead reserved 2 MB (first steps 3), the GPU's clock 1980 MHz")
    assert any("beyond fixed addresses" in line for line in lines) is addresses
