"""Real runs on the CPU whose processes compile side by side; those that run to their end use forks: PyTorch is imported already."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.benchmark_commands import SMALL, run, run_here
from tests.support.repository import ROOT
from tools.lab import cli
from tools.lab.decisions import read_export

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.usefixtures("in_forks")
def test_processes_that_compile_side_by_side(tmp_path: Path) -> None:
    done, result = run_here(
        tmp_path / "result.json",
        "--workloads",
        "three-ops",
        "--variants",
        "eager,default",
        "--repetitions",
        "2",
        main=cli.main,
    )
    assert done.returncode == 0, done.stderr
    assert result["settings"]["compiled_together"] is True
    records = result["records"]
    assert [record["compiled_together"] for record in records] == [True, True]
    assert [(record["variant"], record["correct"], record["step_ms"]["n"]) for record in records] == [
        ("eager", True, 14),
        ("default", True, 14),
    ]


@pytest.mark.usefixtures("in_forks")
def test_workloads_side_by_side_are_in_one_file(tmp_path: Path) -> None:
    done, result = run_here(
        tmp_path / "result.json", "--workloads", "three-ops,mlp-training", "--variants", "eager,default",
        "--gpus", "2", "--at-once", "1", "--repetitions", "1", "--compiled", str(tmp_path / "kept"), main=cli.main,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept = tmp_path / "kept" / "caches.mlp-training.mode.default"
    assert (kept / "compiled.default").exists()
    assert (kept / "inductor").exists()
    assert (result["settings"]["gpus"], result["settings"]["at_once"]) == (2, 1)
    assert [(record["workload"], record["variant"]) for record in result["records"]] == [
        (workload, variant) for workload in ("three-ops", "mlp-training") for variant in ("eager", "default")
    ]
    assert all(record["correct"] and record["step_ms"]["n"] == 7 for record in result["records"])


@pytest.mark.parametrize("to", ["process", "another thread"])
def test_a_run_that_is_to_end_does_not_wait_for_what_compiles_side_by_side(tmp_path: Path, to: str) -> None:
    command = [sys.executable, "-m", "tools.lab", "run", *SMALL, "--out", str(tmp_path / "result.json")]
    command += [
        "--workloads",
        "mlp-training",
        "--variants",
        "default,reduce-overhead",
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


@pytest.mark.daemon
@pytest.mark.usefixtures("in_forks")
def test_the_product_finds_in_the_second_wave_what_the_first_has_measured(tmp_path: Path) -> None:
    done, result = run_here(
        tmp_path / "result.json", "--workloads", "three-ops", "--repetitions", "1",
        "--variants", "default,pygraph-default,pygraph-default-warm",
        "--decisions", str(tmp_path / "decisions.jsonl"), main=cli.main,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    _, cold, warm = result["records"]
    assert "hits 0, misses 1" in cold["note"]
    assert "hits 1, misses 0, measured 0" in warm["note"]
    assert warm["compile_s"] is None  # it found what the others had compiled
    for record in (cold, warm):
        assert record["correct"] is True
        assert "no coverage: no GPU takes part" in record["note"]
        assert record["deployed"]["KERNELS"] == 1
        assert record["measuring_s"] >= 0
        assert record["lookup_s"] > 0
        assert record["recording_s"] == 0  # nothing is recorded on a CPU
        (counted,) = record["counted"]
        assert (counted["captured"], counted["failures"]) == (0, {})
    assert len(read_export(tmp_path / "decisions.jsonl")) == 1


def test_budget_ends_the_run_after_a_whole_repetition(tmp_path: Path) -> None:
    done, result = run(
        tmp_path / "result.json", "--workloads", "three-ops", "--variants", "eager",
        "--repetitions", "50", "--budget-s", "1", package="tools.lab",
    )  # fmt: skip
    assert done.returncode == 0
    assert result["settings"]["stopped"].startswith("stopped after 1 of 50 repetitions")
    assert result["records"][0]["step_ms"]["n"] == 7
