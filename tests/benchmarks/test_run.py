"""Real runs on the CPU, as a user starts them."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--device", "cpu", "--warm-up", "3", "--steps", "7", "--windows", "2", "--window-steps", "3")


def run(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks", "run", *SMALL, "--out", str(out), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert out.exists(), done.stderr
    return done, json.loads(out.read_text())


def test_two_peers_twice(tmp_path: Path) -> None:
    done, result = run(
        tmp_path / "result.json", "--workloads", "mlp-training", "--variants", "eager,default",
        "--repetitions", "2", "--caches", "variant",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ran = [line.split()[3].rstrip(":") for line in done.stderr.splitlines()]
    assert ran == ["eager", "default", "default", "eager"]
    assert result["environment"]["torch"]
    eager, default = result["records"]
    for record in (eager, default):
        assert record["step_ms"]["n"] == 14
        assert 0 < record["host_ms"]["median"] <= record["step_ms"]["median"]
        assert record["pipelined_ms"]["n"] == 4
        assert len(record["repetition_medians_ms"]) == 2
        assert record["correct"] is True
        assert "no coverage: no GPU takes part" in record["note"]
        assert (record["reserved_mb"], record["coverage"], record["measuring_s"], record["deployed"]) == (
            None,
        ) * 4
    for details in result["records"]:
        assert len(details["repetition_pipelined_ms"]) == 2
        assert (details["compiled_together"], details["recording_s"]) == (False, None)
    assert default["compile_s"] > eager["compile_s"]
    assert "caches filled" in default["note"]
    assert done.stdout.splitlines()[0].startswith("workload")


def test_processes_that_compile_side_by_side(tmp_path: Path) -> None:
    done, result = run(
        tmp_path / "result.json", "--workloads", "three-ops", "--variants", "eager,default", "--together",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert result["settings"]["compiled_together"] is True
    assert [details["compiled_together"] for details in result["records"]] == [True, True]
    assert [
        (record["variant"], record["correct"], record["step_ms"]["n"]) for record in result["records"]
    ] == [
        ("eager", True, 21),
        ("default", True, 21),
    ]


def test_workloads_side_by_side_are_in_one_file(tmp_path: Path) -> None:
    done, result = run(
        tmp_path / "result.json", "--workloads", "three-ops,mlp-training", "--variants", "eager,default",
        "--together", "--gpus", "2", "--at-once", "1", "--repetitions", "2", "--caches", "shared",
        "--compiled", str(tmp_path / "kept"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "kept" / "caches.mlp-training.mode.default"
    assert (kept / "compiled.default").exists()
    assert (kept / "inductor").exists()
    assert (result["settings"]["gpus"], result["settings"]["at_once"]) == (2, 1)
    assert [(record["workload"], record["variant"]) for record in result["records"]] == [
        (workload, variant) for workload in ("three-ops", "mlp-training") for variant in ("eager", "default")
    ]
    assert all(record["correct"] and record["step_ms"]["n"] == 14 for record in result["records"])


@pytest.mark.parametrize("to", ["process", "another thread"])
def test_a_run_that_is_to_end_does_not_wait_for_what_compiles_side_by_side(tmp_path: Path, to: str) -> None:
    command = [sys.executable, "-m", "benchmarks", "run", *SMALL, "--out", str(tmp_path / "result.json")]
    command += [
        "--workloads",
        "mlp-training",
        "--variants",
        "default,reduce-overhead",
        "--together",
        "--warm-up",
        "1000000",
    ]
    with subprocess.Popen(command, cwd=ROOT, env=os.environ, stderr=subprocess.PIPE, text=True) as process:
        while len(started := _children_of(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        _terminate(process, to)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            if process.poll() is None:  # a failure must not leave a million steps behind
                _kill([process.pid, *map(int, started)])

    assert process.returncode == 130
    assert "interrupted" in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def _terminate(process: subprocess.Popen[str], to: str) -> None:
    """Send SIGTERM; the kernel gives what is sent to a process to any of its threads, the main one in nearly all cases."""
    if to == "process":
        process.terminate()
        return
    others = {int(each.name) for each in Path(f"/proc/{process.pid}/task").iterdir()} - {process.pid}
    assert ctypes.CDLL(None).tgkill(process.pid, min(others), signal.SIGTERM) == 0


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _children_of(pid: int) -> list[str]:
    """Return the processes that threads of a process have started."""
    return " ".join(each.read_text() for each in Path(f"/proc/{pid}/task").glob("*/children")).split()


def test_a_failing_process_costs_only_its_own_record(tmp_path: Path) -> None:
    done, result = run(
        tmp_path / "result.json", "--workloads", "bert-inference,three-ops", "--variants", "eager", "--repetitions", "2"
    )  # fmt: skip
    if not done.returncode:
        pytest.skip("transformers is installed here")
    assert done.returncode == 1
    failed, good = result["records"]
    assert failed["step_ms"] is None
    assert "needs transformers" in failed["note"]
    assert good["correct"] is True
    assert done.stderr.count("bert-inference") == 1
    assert "Traceback" not in done.stderr


def test_budget_ends_the_run_after_a_whole_repetition(tmp_path: Path) -> None:
    done, result = run(
        tmp_path / "result.json", "--workloads", "three-ops", "--variants", "eager",
        "--repetitions", "50", "--budget-s", "1",
    )  # fmt: skip
    assert done.returncode == 0
    assert result["settings"]["stopped"].startswith("stopped after 1 of 50 repetitions")
    assert result["records"][0]["step_ms"]["n"] == 7


@pytest.mark.daemon
@pytest.mark.parametrize("variants", ["pygraph-cold,pygraph-warm", "pygraph-default,pygraph-default-warm"])
def test_the_product_with_a_cold_and_a_warm_cache(tmp_path: Path, variants: str) -> None:
    done, result = run(
        tmp_path / "result.json", "--workloads", "mlp-training", "--variants", variants,
        "--repetitions", "1", "--caches", "shared",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cold, warm = result["records"]
    assert "graphs 2, hits 0, misses 2" in cold["note"]
    assert "graphs 2, hits 2, misses 0, measured 0" in warm["note"]
    for record in (cold, warm):
        assert record["correct"] is True
        assert "no coverage: no GPU takes part" in record["note"]
        assert record["deployed"]["KERNELS"] == 2
        assert record["measuring_s"] >= 0
    for details in result["records"]:
        assert details["lookup_s"] > 0
        assert details["recording_s"] == 0  # nothing is recorded on a CPU
        (counted,) = details["counted"]
        assert (counted["captured"], counted["staged"], counted["failures"]) == (0, 0, {})
