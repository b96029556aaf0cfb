"""What our graphs reserve and take on the GPU, over PyTorch's and over calls as KERNELS."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.region_table import read_regions, render, ways
from tests.support.benchmark_commands import benchmarks

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def record(workload: str, way: str, reserved_mb: float, *gpu_us: float | None) -> dict[str, Any]:
    regions = [{"gpu_us": {"median": each, "mad": 0.0, "n": 30} if each else None} for each in gpu_us]
    clock = {"median": 1980.4, "mad": 0.0, "n": 30}
    return {
        "workload": workload,
        "way": way,
        "reserved_mb": reserved_mb,
        "regions": regions,
        "gpu_mhz": clock,
    }


def cells(records: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [line.split() for line in render(records).splitlines()[1:]]


def test_a_way_is_the_median_of_its_processes_and_the_sum_of_its_regions() -> None:
    records = [
        record("bert-training", "reduce-overhead", reserved, 1.0, gpu)
        for reserved, gpu in ((9, 9), (2, 3), (4, 2))
    ]
    records.append({"workload": "bert-training", "way": "graph", "error": "killed"})

    (found,) = ways(records)["bert-training"].values()

    assert (found.reserved_mb, found.gpu_us) == (4, 4.0)
    assert render(records).splitlines()[-1] == "bert-training graph: killed"


def test_a_line_for_each_way_over_pytorch_s_and_over_calls_as_kernels() -> None:
    records = [
        record("autoencoder-inference", "reduce-overhead", 4000, 300.0),
        record("autoencoder-inference", "graph", 3000, 210.0),
        record("autoencoder-inference", "kernels", 3000, 200.0),
    ]

    assert cells(records)[:3] == [
        [
            "autoencoder-inference",
            "reduce-overhead",
            "4000",
            "1.000",
            "-",
            "-",
            "300",
            "1.000",
            "1.500",
            "1980",
            "-",
        ],
        [
            "autoencoder-inference",
            "graph",
            "3000",
            "0.750",
            "-",
            "-",
            "210",
            "0.700",
            "1.050",
            "1980",
            "-",
        ],
        ["autoencoder-inference", "kernels", "3000", "0.750", "-", "-", "200", "0.667", "1.000", "1980", "-"],
    ]


def test_what_recording_took_is_summed_up_region_by_region() -> None:
    def again(*ms: float) -> dict[str, Any]:
        found = record("bert-training", "graph", 100, *(1.0 for _ in ms))
        for region, each in zip(found["regions"], ms, strict=True):
            region["recording"] = {"recording_ms": each}
        return found

    assert cells([again(10.0, 20.0), again(30.0, 40.0)])[0][-1] == "20+30"
    assert cells([record("bert-training", "graph", 100, 1.0), again(10.0)])[0][-1] == "-"


def test_the_hosts_time_is_held_against_pytorch_s_region_by_region() -> None:
    def of_host(way: str, *host_us: float) -> dict[str, Any]:
        found = record("bert-training", way, 100, *(1.0 for _ in host_us))
        for region, each in zip(found["regions"], host_us, strict=True):
            region["host_us"] = {"median": each}
        return found

    records = [of_host("reduce-overhead", 200.0, 700.0), of_host("reduce-overhead", 300.0, 900.0)]
    records += [of_host("graph", 100.0, 200.0), of_host("kernels", 100.0)]

    assert [line[4:6] for line in cells(records)[:3]] == [
        ["250+800", "1.00+1.00"],
        ["100+200", "0.40+0.25"],
        ["100", "-"],
    ]


def test_a_stored_file_is_printed() -> None:
    done = benchmarks("table", str(RESULTS / "regions-h200.json"), str(RESULTS / "steps-h100.json"))

    assert done.returncode == 0
    assert "deep-inference" in done.stdout
    assert "pygraph-cold" in done.stdout


def test_files_of_runs_are_none_of_regions() -> None:
    assert read_regions(RESULTS / "steps-h100.json") is None
    assert read_regions(RESULTS / "missing.json") is None
