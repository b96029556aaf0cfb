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
from benchmarks.gate import THREADS_VARIABLE, Gate
from benchmarks.lanes import Lane, dealt, lanes, parts
from benchmarks.run import Plan, Run
from benchmarks.trial import CachePolicy, Settings, Trial, Trials
from benchmarks.variants import select_variants
from benchmarks.workloads import select_workloads

if TYPE_CHECKING:
    from pathlib import Path

    from benchmarks.schedule import Turn

CORES = frozenset(range(10, 18))


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(CORES))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_one_gpu_is_left_as_it_is() -> None:
    assert lanes(1) == (Lane(0, (), None),)


def test_cores_and_gpus_are_shared_out() -> None:
    first, second, third = lanes(3)

    assert [dict(lane.environ) for lane in (first, second, third)] == [
        {"CUDA_VISIBLE_DEVICES": number} for number in ("0", "1", "2")
    ]
    assert [sorted(lane.cores or ()) for lane in (first, second, third)] == [[10, 11], [12, 13], [14, 15]]


def test_gpus_are_those_that_may_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")

    assert [dict(lane.environ)["CUDA_VISIBLE_DEVICES"] for lane in lanes(2)] == ["3", "5"]
    with pytest.raises(BenchmarkError, match="names 2"):
        lanes(3)


def test_more_gpus_than_cores_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="there are 8 cores"):
        lanes(9)


def test_what_a_thread_starts_in_a_lane_stays_on_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    mine = sorted(os.sched_getaffinity(0))
    lane = Lane(0, (), frozenset(mine[-1:]))
    said: list[bytes] = []

    def start() -> None:
        lane.enter()
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
    shares = [dealt(numbered, Lane(number), count) for number in range(count)]
    all_parts = [part for share in shares for part in parts(share, size)]

    assert sorted(each for part in all_parts for each in part) == numbered
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert size is None or all(len(part) <= size for part in all_parts)


def test_processes_of_a_lane_compile_in_as_many_threads_as_it_has_cores_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    mine = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(CORES))
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    threads: list[str] = []

    def note(_: Trials, turn: Turn, gate: Gate | None = None) -> Trial:
        assert gate is not None
        threads.append(gate.place(turn.name).environ[THREADS_VARIABLE])
        return Trial(turn.repetition, None, None, "not run", True, 0.0)

    monkeypatch.setattr(Trials, "run", note)
    settings = Settings(1, 1, 1, 1, "cpu", CachePolicy.FRESH, 1.0, None)
    for cores in (None, frozenset(mine[-1:])):
        plan = Plan(
            tuple(select_workloads(["three-ops"])), tuple(select_variants(["default"])), 1, settings, tmp_path / "out",
            None, together=True, lanes=(Lane(0, (), cores),),
        )  # fmt: skip
        Run(plan).execute()

    assert threads == ["8", "1"]
