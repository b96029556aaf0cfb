"""Where memory goes: readings and tables of made-up figures, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import regions
from benchmarks.processes import Outcome
from benchmarks.region_table import read_regions
from benchmarks.workloads import WORKLOADS
from tests.support.allocator_stats import stats
from tools.lab import memory
from tools.lab.memory import render
from tools.lab.memory_marks import Reading, most, over_steps, reading

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
MB = 1 << 20


def test_points_of_several_steps_are_the_most_and_what_they_differ_by() -> None:
    steps = [
        {"before": reading(stats(10, 4, 12, 9)), "after": reading(stats(10, 8, 10, 8))},
        {"before": reading(stats(14, 3, 14, 5)), "after": reading(stats(14, 8, 15, 20))},
    ]

    before, after = over_steps(steps)

    assert (before.name, before.most) == ("before", Reading(14, 4, 14, 9))
    assert (before.reserved_differs, before.allocated_differs) == (4, 1)
    assert after.most == Reading(14, 8, 15, 20)
    assert after.allocated_differs == 0
    assert most([before.most, after.most]) == Reading(14, 8, 15, 20)


def part(reserved: int, fragments: int, empty: int, allocated: int = 0) -> dict[str, int]:
    sizes = {"reserved": reserved, "fragments": fragments, "empty": empty, "allocated": allocated}
    return {name: size * MB for name, size in sizes.items()}


def answer(way: str, **more: Any) -> dict[str, Any]:
    """Return what a process says of a way, as far as the table looks at it."""
    figures = {"reserved": 6 * MB, "allocated": 3 * MB, "most_reserved": 7 * MB, "most_allocated": 5 * MB}
    pools = {"default": part(6, 2, 1)}
    snapshot = {"by_pool": pools, "by_class": {"small": part(2, 1, 0)}, "by_owner": {"parameters": 3 * MB}}
    return {
        "way": way,
        "warm_up": [[0] * 4] * 40,
        "after_warm_up": figures,
        "over_steps": figures,
        "device_used": 9 * MB,
        "points": [{"name": name, "most": figures} for name in ("before forward", "after forward")],
        "snapshots": {
            name: {"all": part(6, 2, 1, allocated), **snapshot}
            for name, allocated in (("before forward", 2), ("after forward", 3))
        },
        "recordings": [],
        **more,
    }


def cells(answers: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the columns of each row, by its label."""
    rows = [line.split("  ") for line in render(answers).splitlines()]
    return {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}


def test_a_column_for_each_way_and_a_row_for_each_figure() -> None:
    def allocation(role: str, size: int) -> dict[str, Any]:
        return {"role": role, "bytes": size * MB}

    recording = {
        "kind": "forward",
        "allocations": [
            allocation("outputs", 1),
            allocation("scratch", 4),
        ],
    }

    found = cells([answer("reduce-overhead"), answer("graph", recordings=[recording, recording])])

    assert found["MB"] == ["reduce-overhead", "graph"]
    assert found["most reserved in the first 40 steps"] == ["7.0", "7.0"]
    assert found["in use on the device"] == ["9.0", "9.0"]
    point = "after forward: reserved / allocated / most allocated since the point before"
    assert found[point] == ["6.0 / 3.0 / 5.0"] * 2
    pool = "after forward, pool default: reserved / free beside something / empty"
    assert found[pool] == ["6.0 / 2.0 / 1.0"] * 2
    assert found["after forward, allocated: parameters"] == ["3.0", "3.0"]
    kinds = "forward: outputs / scratch"
    assert found[kinds] == ["-", "2.0 / 8.0"]
    assert not [label for label in found if label.startswith("before forward, ")]  # less is allocated there


def test_what_only_one_way_has_is_left_out_of_the_other() -> None:
    trees = answer("reduce-overhead")
    trees["snapshots"]["after forward"]["by_pool"] = {"0.1": part(5, 0, 0)}

    found = cells([trees, answer("graph")])

    label = "after forward, pool {}: reserved / free beside something / empty"
    assert found[label.format("0.1")] == ["5.0 / 0.0 / 0.0", "-"]
    assert found[label.format("default")] == ["-", "6.0 / 2.0 / 1.0"]


def test_a_way_that_failed_is_said_and_the_other_is_shown() -> None:
    failed = {"way": "reduce-overhead", "error": "RuntimeError: no"}

    assert render([failed, answer("graph")]).splitlines()[-1] == "reduce-overhead: RuntimeError: no"
    assert cells([failed, answer("graph")])["MB"] == ["graph"]
    assert render([failed]) == "reduce-overhead: RuntimeError: no"


def lab_memory(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command where no device can be seen."""
    command = [sys.executable, "-m", "tools.lab", "memory", *arguments]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.torch
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = lab_memory("mlp-training", "--out", str(tmp_path / "memory.json"))

    assert done.returncode == 2
    assert "torch sees no CUDA device here" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nonsense",), "unknown workload nonsense"),
        (
            ("three-ops", "--ways", "graph,other"),
            "unknown way other; choose among: reduce-overhead, graph, kernels",
        ),
        (("three-ops", "--out", "/nonexistent/memory.json"), "cannot write"),
    ],
)
def test_bad_requests_are_refused_before_torch_is_imported(arguments: tuple[str, ...], said: str) -> None:
    done = lab_memory(*arguments)

    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_each_way_is_a_process_and_one_that_fails_costs_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_fresh(
        arguments: list[str], _environ: Mapping[str, str], _timeout_s: float, stop: None
    ) -> Outcome:
        *_, way, file = arguments
        if way == "reduce-overhead":
            return Outcome("RuntimeError: no", "")
        Path(file).write_text(json.dumps({**answer(way), "environment": {"gpu": "H200"}}))
        return Outcome(None, "")

    monkeypatch.setattr(memory, "missing_device", lambda: None)
    monkeypatch.setattr(regions, "run_fresh", run_fresh)
    out = tmp_path / "memory.json"

    trees, relocated = memory.measure_memory(WORKLOADS["three-ops"], ["reduce-overhead", "graph"], out)

    assert trees == {"way": "reduce-overhead", "error": "RuntimeError: no"}
    assert relocated == answer("graph")
    content = json.loads(out.read_text())
    assert content["ways"] == [trees, relocated]
    assert (content["workload"], content["environment"]["gpu"]) == ("three-ops", "H200")
    assert read_regions(out) is None
