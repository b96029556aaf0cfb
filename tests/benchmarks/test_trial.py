from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import trial as trial_module
from benchmarks.coverage import Coverage
from benchmarks.errors import BenchmarkError
from benchmarks.processes import Outcome
from benchmarks.protocol import Answer, Task
from benchmarks.trial import (
    FILLED,
    OFFLINE,
    CachePolicy,
    Settings,
    Trial,
    TrialRunner,
    plain_environment,
    product_environment,
    trials_of,
)
from benchmarks.variants import VARIANTS, Compile
from benchmarks.workloads import WORKLOADS

INHERITED = {"PATH": "/bin", "PYGRAPH": "1", "PYGRAPHD_HOME": "/mine", "PYGRAPH_SUMMARY": "/mine/summary"}


def test_plain_processes_see_nothing_of_the_product() -> None:
    environ = plain_environment(INHERITED, Path("/caches"))
    assert not [name for name in environ if name.startswith("PYGRAPH")]
    assert environ["PATH"] == "/bin"
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert environ["TORCHINDUCTOR_CACHE_DIR"] == "/caches/inductor"


def test_product_processes_see_only_the_benchmarks_daemon() -> None:
    environ = product_environment(INHERITED, Path("/caches"), Path("/home"), Path("/summary"))
    assert {name: value for name, value in environ.items() if name.startswith("PYGRAPH")} == {
        "PYGRAPH": "1",
        "PYGRAPH_SUMMARY": "/summary",
        "PYGRAPHD_HOME": "/home",
        "PYGRAPHD_AUTOSTART": "0",
        "PYGRAPHD_SHIPPED": "0",
    }
    assert environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


@pytest.mark.parametrize("model", ["", "DistillGPT2"])
def test_models_of_suites_download_nothing(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, str]] = []

    def run_fresh(_arguments: list[str], environ: dict[str, str], _timeout_s: float, **_: object) -> Outcome:
        seen.append(environ)
        return Outcome("no process", "")

    monkeypatch.setattr(trial_module, "run_fresh", run_fresh)
    workload = dataclasses.replace(WORKLOADS["three-ops"], model=model)
    runner = TrialRunner(tmp_path, Settings(1, 1, 1, 1, "cpu", CachePolicy.FRESH, 10, None))

    assert runner.run(Trial(0, workload, VARIANTS["eager"])).error == "no process"

    assert (OFFLINE.items() <= seen[0].items()) is bool(model)


def caches(
    policy: CachePolicy, repetition: int, variant: str, workload: str = "three-ops", kept: Path | None = None
) -> Path:
    settings = Settings(1, 1, 1, 1, "cpu", policy, 10, None)
    trial = Trial(repetition, WORKLOADS[workload], VARIANTS[variant])
    return TrialRunner(Path("/folder"), settings, kept).caches(trial)


def test_fresh_caches_are_never_shared() -> None:
    assert caches(CachePolicy.FRESH, 0, "default") != caches(CachePolicy.FRESH, 1, "default")
    assert caches(CachePolicy.FRESH, 0, "default") != caches(CachePolicy.FRESH, 0, "pygraph-default")


def test_shared_caches_are_of_one_workload_and_one_mode() -> None:
    shared = caches(CachePolicy.SHARED, 0, "reduce-overhead")
    assert shared == caches(CachePolicy.SHARED, 2, "pygraph-warm")
    assert shared != caches(CachePolicy.SHARED, 0, "pygraph-default")
    assert shared != caches(CachePolicy.SHARED, 0, "reduce-overhead", "mlp-training")


def test_caches_that_are_kept_lie_where_a_run_to_come_looks() -> None:
    kept = caches(CachePolicy.SHARED, 0, "default", kept=Path("/kept"))
    assert kept.parent == Path("/kept")
    assert kept.name == caches(CachePolicy.SHARED, 0, "default").name


def test_a_warm_process_takes_the_folder_that_its_own_repetition_has_filled(tmp_path: Path) -> None:
    runner = TrialRunner(tmp_path, Settings(1, 1, 1, 1, "cpu", CachePolicy.SHARED, 10, None))

    def home(repetition: int, variant: str) -> Path:
        return runner.home(Trial(repetition, WORKLOADS["three-ops"], VARIANTS[variant]))

    with pytest.raises(BenchmarkError, match="no process of pygraph-cold has filled the cache"):
        home(0, "pygraph-warm")
    cold = [home(repetition, "pygraph-cold") for repetition in range(3)]
    assert len(set(cold)) == 3
    for each in cold[:2]:
        each.mkdir()
        (each / FILLED).touch()
    assert [home(repetition, "pygraph-warm") for repetition in range(3)] == [*cold[:2], cold[0]]


def test_tasks_and_answers_survive_the_way_between_processes() -> None:
    task = Task(
        WORKLOADS["three-ops"], Compile.REDUCE_OVERHEAD, None, 1, 2, 3, 4, 5, check=True, profile=True
    )
    assert Task.from_json(task.to_json()) == task
    for coverage in (None, Coverage(5, 8, 2)):
        answer = Answer([1.0], [0.5], [], None, 2.0, None, "note", {"gpu": None}, coverage, "said")
        assert Answer.from_json(answer.to_json()) == answer


def order(repetition: int) -> list[tuple[str, str]]:
    workloads = [WORKLOADS[name] for name in ("three-ops", "mlp-training")]
    variants = [VARIANTS[name] for name in ("eager", "default")]
    return [(each.workload.name, each.variant.name) for each in trials_of(repetition, workloads, variants)]


def test_every_other_repetition_reverses_the_variants_alone() -> None:
    assert order(0) == [
        ("three-ops", "eager"), ("three-ops", "default"), ("mlp-training", "eager"), ("mlp-training", "default"),
    ]  # fmt: skip
    assert [name for name, _ in order(1)] == [name for name, _ in order(0)]
    assert [variant for _, variant in order(1)] == ["default", "eager"] * 2
    assert order(2) == order(0)
