"""Real runs on the CPU: one as a user starts it, those that compile in forks of a process that has imported PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.benchmark_commands import run, run_here

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.usefixtures("in_forks")
def test_two_peers_twice(tmp_path: Path) -> None:
    done, result = run_here(
        tmp_path / "result.json", "--workloads", "three-ops", "--variants", "eager,default",
        "--repetitions", "2", "--caches", "shared",
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
    assert default["compile_s"] > 0
    assert "caches filled" in default["note"]
    assert done.stdout.splitlines()[0].startswith("workload")


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


@pytest.mark.daemon
@pytest.mark.usefixtures("in_forks")
def test_the_product_with_a_cold_and_a_warm_cache(tmp_path: Path) -> None:
    """The variants that compile by default are in a run of the lab, in `tests/lab/test_run.py`."""
    done, result = run_here(
        tmp_path / "result.json", "--workloads", "mlp-training", "--variants", "pygraph-cold,pygraph-warm",
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
        assert (counted["captured"], counted["failures"]) == (0, {})
