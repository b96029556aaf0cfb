"""Decisions that a run leaves for the package: all that its daemons know, and what of that is chosen."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import BenchmarkError
from pygraphd.daemon.store import Store
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Graph,
    Kind,
    Measurement,
    Origin,
    Record,
    RecordRequest,
)
from pygraphd.schema.portable import Portable
from pygraphd.schema.reasons import Reason, ReasonCode
from tests.support.benchmark_commands import lab
from tools.lab import decisions
from tools.lab.campaign_steps import DECISIONS
from tools.lab.decisions import DISAGREE, NOT_MEASURED, NOT_ON_A_GPU, NOT_SURE, choose, gather, read_export

if TYPE_CHECKING:
    from pathlib import Path

H100 = Environment("NVIDIA H100 80GB HBM3", "9.0", 132, 81079, "", "2.11.0", "3.5", "12.8", "570.1", "91002")
KERNELS = Measurement(Deployment.KERNELS, 8, 100.0, 1.0, 90.0, 80.0, 0.25, 1.0, 1.0)
FASTER = Measurement(Deployment.GRAPH, 8, 50.0, 1.0, 20.0, 40.0, 0.25, 1.0, 1.0)
SLOWER = Measurement(Deployment.GRAPH, 8, 250.0, 1.0, 120.0, 240.0, 0.25, 1.0, 1.0)
TOO_FEW = dataclasses.replace(FASTER, samples=3)


def record(name: str, *measurements: Measurement, policy: int = 6) -> Record:
    graph = Graph(hashlib.sha256(name.encode()).hexdigest(), Kind.INFERENCE, 0, 1, 5)
    return Record(
        graph, Decision(Deployment.GRAPH, Reason(ReasonCode.FASTER), policy, calls=22), measurements
    )


def portable(made: Record, at: float = 1e9, environment: Environment = H100) -> Portable:
    return Portable(environment, Origin("node-7", "0.1.0"), made, at if made.measurements else None)


def filled_home(folder: Path, *records: Record) -> None:
    folder.mkdir(parents=True)
    with Store(folder / "cache.db") as store:
        store.record(RecordRequest(H100, Origin("node-7", "0.1.0"), records), 0)


def test_all_repetitions_of_all_steps_are_gathered(tmp_path: Path) -> None:
    filled_home(tmp_path / "first" / "home.a.1", record("a", KERNELS, FASTER))
    filled_home(tmp_path / "first" / "home.a.2", record("a", KERNELS, FASTER))
    filled_home(tmp_path / "second" / "home.b.1", record("b", KERNELS, FASTER))
    (tmp_path / "second" / "home.c.1").mkdir()
    (tmp_path / "second" / "home.c.1" / "cache.db").write_text("no database")
    file = tmp_path / "out" / DECISIONS

    assert gather(tmp_path / "first", file) == []
    (error,) = gather(tmp_path / "second", file)

    assert error.startswith("home.c.1: ")
    names = [entry.record.graph.digest for entry in read_export(file)]
    assert names == [hashlib.sha256(name).hexdigest() for name in (b"a", b"a", b"b")]


def test_only_what_a_program_elsewhere_can_validate_is_chosen() -> None:
    on_cpu = dataclasses.replace(H100, gpu="none")
    broken = dataclasses.replace(H100, driver="unknown: OSError")
    sure = record("sure", KERNELS, FASTER)
    chosen, left_out = choose(
        [
            portable(sure),
            portable(record("cpu", KERNELS, FASTER), environment=on_cpu),
            portable(record("broken", KERNELS, FASTER), environment=broken),
            portable(record("unmeasured")),
            portable(record("few", KERNELS, TOO_FEW)),
            portable(record("either", KERNELS, FASTER)),
            portable(record("either", KERNELS, SLOWER)),
        ]
    )
    assert [entry.record.graph for entry in chosen] == [sure.graph]
    assert left_out == {NOT_ON_A_GPU: 2, NOT_MEASURED: 1, NOT_SURE: 1, DISAGREE: 2}


def test_the_newest_is_chosen_by_the_present_policy_and_names_no_host() -> None:
    old = portable(record("a", KERNELS, FASTER, policy=1), at=1e9)
    new = portable(record("a", KERNELS, SLOWER, policy=1), at=2e9)

    (chosen,), _ = choose([new, portable(record("a", KERNELS, SLOWER, policy=1), at=1.5e9)])

    assert (chosen.measured_at, chosen.record.measurements) == (2e9, new.record.measurements)
    assert chosen.record.decision.deployment is Deployment.KERNELS  # whatever an older policy said
    assert chosen.record.decision.policy != 1
    assert chosen.origin == Origin("pygraphd", "0.1.0")
    assert old.key == new.key


def test_each_gpu_model_has_a_file_which_keeps_what_it_had(tmp_path: Path) -> None:
    h200 = dataclasses.replace(H100, gpu="NVIDIA H200")
    first, second, into = tmp_path / "1.jsonl", tmp_path / "2.jsonl", tmp_path / "shipped"
    a, b = record("a", KERNELS, FASTER), record("b", KERNELS, FASTER)
    decisions.write_export(first, [portable(a), portable(b), portable(a, environment=h200)])
    decisions.write_export(second, [portable(a, at=2e9), portable(b, at=0.5e9)])

    assert lab("ship", "--into", str(into), str(first)).returncode == 0
    done = lab("ship", "--into", str(into), str(second))

    assert done.returncode == 0, done.stderr
    assert "2 entries" in done.stdout
    assert sorted(file.name for file in into.iterdir()) == [
        "nvidia-h100-80gb-hbm3.jsonl",
        "nvidia-h200.jsonl",
    ]
    kept = read_export(into / "nvidia-h100-80gb-hbm3.jsonl")
    assert {entry.record.graph: entry.measured_at for entry in kept} == {a.graph: 2e9, b.graph: 1e9}
    assert [entry.key for entry in kept] == sorted(entry.key for entry in kept)


def test_an_export_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    file = tmp_path / DECISIONS
    decisions.write_export(file, [portable(record("a", KERNELS, FASTER))])
    file.write_bytes(file.read_bytes()[:-20])

    with pytest.raises(BenchmarkError, match="too early"):
        read_export(file)
