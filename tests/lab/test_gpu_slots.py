"""GPUs side by side: each with its own cores and its share of the workloads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.errors import BenchmarkError
from benchmarks.run import Plan
from benchmarks.trial import CachePolicy, Settings, Trial, TrialResult
from benchmarks.variants import VARIANTS, select_variants
from benchmarks.workloads import WORKLOADS, select_workloads
from tools.lab.barrier import THREADS_VARIABLE, Barrier
from tools.lab.gpu_slots import GpuSlot, dealt, gpu_slots, parts
from tools.lab.run import SharedRun, SharedRunner, Sharing

if TYPE_CHECKING:
    from pathlib import Path


CORES = frozenset(range(10, 18))


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(CORES))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_one_gpu_is_left_as_it_is() -> None:
    assert gpu_slots(1) == (GpuSlot(0, (), None),)


def test_cores_and_gpus_are_shared_out() -> None:
    first, second, third = gpu_slots(3)

    assert [dict(slot.environ) for slot in (first, second, third)] == [
        {"CUDA_VISIBLE_DEVICES": number} for number in ("0", "1", "2")
    ]
    assert [sorted(slot.cores or ()) for slot in (first, second, third)] == [[10, 11], [12, 13], [14, 15]]


def test_gpus_are_those_that_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    assert [dict(slot.environ)["CUDA_VISIBLE_DEVICES"] for slot in gpu_slots(2)] == ["3", "5"]
    with pytest.raises(BenchmarkError, match="names 2"):
        gpu_slots(3)


def test_more_gpus_than_cores_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="there are 8 cores"):
        gpu_slots(9)


def test_what_a_thread_starts_in_a_lane_stays_on_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    mine = sorted(os.sched_getaffinity(0))
    slot = GpuSlot(0, (), frozenset(mine[-1:]))
    said: list[bytes] = []

    def start() -> None:
        slot.enter()
        code = "import os; print(*os.sched_getaffinity(0))"
        said.append(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()

    assert said == [f"{mine[-1]}\n".encode()]
    assert sorted(os.sched_getaffinity(0)) == mine


@given(st.lists(st.integers(), max_size=30), st.integers(1, 5), st.none() | st.integers(1, 7))
def test_each_workload_is_in_one_part_of_one_lane(items: list[int], count: int, size: int | None) -> None:
    numbered = list(enumerate(items))
    shares = [dealt(numbered, GpuSlot(number), count) for number in range(count)]
    all_parts = [part for share in shares for part in parts(share, size)]

    assert sorted(each for part in all_parts for each in part) == numbered
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert size is None or all(len(part) <= size for part in all_parts)


def test_processes_of_a_slot_compile_in_as_many_threads_as_it_has_cores_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    mine = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(CORES))
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    threads: list[str] = []

    def note(_: SharedRunner, trial: Trial, barrier: Barrier) -> TrialResult:
        threads.append(barrier.place(trial.name).environ[THREADS_VARIABLE])
        return TrialResult(trial.repetition, None, None, "not run", True, 0.0)

    monkeypatch.setattr(SharedRunner, "run_beside", note)
    settings = Settings(1, 1, 1, 1, "cpu", CachePolicy.SHARED, 1.0, None)
    workloads, variants = select_workloads(["three-ops"]), select_variants(["default"])
    plan = Plan(workloads, variants, 1, settings, tmp_path / "out")
    for cores in (None, frozenset(mine[-1:])):
        SharedRun(plan, sharing=Sharing((GpuSlot(0, (), cores),))).execute()

    assert threads == ["8", "1"]


def test_nobody_waits_for_what_is_compiled(tmp_path: Path) -> None:
    runner = SharedRunner(
        tmp_path, Settings(1, 1, 1, 1, "cpu", CachePolicy.SHARED, 10, None), None, full_speed=False
    )
    variants = [
        Trial(0, WORKLOADS["three-ops"], VARIANTS[name]) for name in ("reduce-overhead", "pygraph-cold")
    ]
    runner.caches(variants[0]).mkdir()  # as of a run that was ended while it compiled
    assert len({runner.compiles_with(trial) for trial in variants}) == 1
    runner._mark(variants[0]).touch()
    assert len({runner.compiles_with(trial) for trial in variants}) == 2


def test_warm_trials_come_a_wave_after_the_cold_ones_that_fill_their_caches(tmp_path: Path) -> None:
    settings = Settings(1, 1, 1, 1, "cpu", CachePolicy.SHARED, 1.0, None)
    workloads = select_workloads(["three-ops", "adam-step", "mlp-training"])
    variants = select_variants(["default", "pygraph-default", "pygraph-default-warm"])
    run = SharedRun(Plan(workloads, variants, 2, settings, tmp_path / "out"), sharing=Sharing(at_once=2))
    waves = [[(each.repetition, each.name) for each in wave] for wave in run._waves(GpuSlot(0), 0.0)]

    first, second = ("three-ops", "adam-step"), ("mlp-training",)

    def named(repetition: int, part: tuple[str, ...], *names: str) -> list[tuple[int, str]]:
        return [(repetition, f"{workload}.{name}") for workload in part for name in names]

    plain, ours, warm = (each.name for each in variants)
    assert waves == [
        named(0, first, plain, ours),
        named(0, second, plain, ours),
        named(0, first, warm),
        named(1, first, ours, plain),
        named(0, second, warm),
        named(1, second, ours, plain),
        named(1, first, warm),
        named(1, second, warm),
    ]
