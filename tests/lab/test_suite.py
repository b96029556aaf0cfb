"""Pieces of a suite of tiny models, on the CPU: stop, go on, and what fails on the way."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.run import Plan
from benchmarks.trial import CachePolicy, Settings, Trial, TrialRunner
from benchmarks.variants import VARIANTS, variants_to_run
from benchmarks.workloads import Mode
from tests.support.tiny_suite import tiny
from tools.lab import cli
from tools.lab.run import Sharing
from tools.lab.suites import command
from tools.lab.suites.run import Piece, SuiteRun, SuiteRunner

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.torch


def suite_run(out: Path, models: list[str], variants: str, end_s: float = 500.0, steps: int = 5) -> SuiteRun:
    settings = Settings(steps, 3, 1, 2, "cpu", CachePolicy.SHARED, 200, None, profile=False)
    plan = Plan(tuple(map(tiny, models)), variants_to_run(variants.split(",")), 1, settings, out)
    return SuiteRun(plan, sharing=Sharing(at_once=2), piece=Piece("tiny", Mode.INFERENCE, end_s))


def records(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    found = json.loads(out.read_text())["records"]
    return {(each["workload"].partition("-")[0], each["variant"]): each for each in found}


@pytest.mark.slow
@pytest.mark.usefixtures("in_forks")
def test_a_piece_goes_on_where_the_last_one_stopped(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    suite_run(out, ["right", "absent"], "eager").execute()
    first = records(out)
    assert first["right", "eager"]["step_ms"]
    assert "KeyError" in first["absent", "eager"]["note"]

    again = suite_run(out, ["right", "absent", "wrong"], "eager,default,cuda-graph")
    again.execute()

    assert set(again.results) == {
        (f"{model}-inference", variant)
        for model, variant in [
            *(("right", name) for name in ("default", "cuda-graph")),
            *(("wrong", name) for name in ("eager", "default", "cuda-graph")),
        ]
    }
    found = records(out)
    assert found["right", "eager"] == first["right", "eager"]
    assert [found[model, "default"]["correct"] for model in ("right", "wrong")] == [True, False]
    assert "only inference on a GPU" in found["right", "cuda-graph"]["note"]
    assert again.unmeasured == []


@pytest.mark.slow
@pytest.mark.usefixtures("in_forks")
def test_models_compile_while_those_before_are_checked_and_one_that_does_not_run_has_one_record(
    tmp_path: Path,
) -> None:
    out = tmp_path / "suite.json"
    run = suite_run(out, ["absent", "right", "wrong"], "eager,default")
    run.sharing = Sharing(at_once=1)

    run.execute()

    assert list(records(out)) == [
        ("absent", "eager"),
        *(("right", name) for name in ("eager", "default")),
        *(("wrong", name) for name in ("eager", "default")),
    ]
    assert run.unmeasured == []


@pytest.mark.parametrize("kind", [SuiteRunner, TrialRunner])
def test_a_process_that_is_ended_while_it_is_compared_keeps_its_figures_in_a_suite(
    tmp_path: Path, kind: type[TrialRunner]
) -> None:
    class Runner(kind):  # type: ignore[misc, valid-type]
        child = ("tests.support.timed_child",)

    settings = Settings(5, 3, 1, 2, "cpu", CachePolicy.SHARED, 200, None)
    more = {"full_speed": False} if kind is SuiteRunner else {}
    runner = Runner(tmp_path, settings, None, **more)

    def end_when_timed() -> None:
        while not list(tmp_path.glob("*.answer.json")):
            time.sleep(0.01)
        runner.stop.set()

    threading.Thread(target=end_when_timed, daemon=True).start()
    result = runner.run(Trial(0, tiny("right"), VARIANTS["default"]))

    if kind is SuiteRunner:
        assert result.answer
        assert result.answer.step_ms == [1.0]
    else:
        assert result.error == "killed: interrupted"


def test_a_piece_without_time_begins_nothing_and_says_so(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    run = suite_run(out, ["right"], "eager", end_s=1.0)

    assert run.execute() == []

    assert run.unmeasured == ["right-inference"]
    assert json.loads(out.read_text())["settings"]["stopped"] == "stopped: no time for more"


def test_a_file_of_other_settings_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    suite_run(out, ["right"], "eager", end_s=1.0).execute()

    with pytest.raises(BenchmarkError, match="another steps"):
        suite_run(out, ["right"], "eager", steps=6).execute()


@pytest.mark.parametrize(
    ("arguments", "file", "variants"),
    [
        ("timm", "timm-inference-cpu.json", command.VARIANTS.split(",")),
        ("huggingface --training", "huggingface-training-cpu.json", command.VARIANTS.split(",")[:-1]),
        ("timm --subset paper --variants eager", "timm-inference-cpu.json", ["eager"]),
    ],
)
def test_a_suite_has_a_file_for_each_mode_and_gpu(
    tmp_path: Path, arguments: str, file: str, variants: list[str]
) -> None:
    options = cli.parser().parse_args(
        ["suite", *arguments.split(), "--device", "cpu", "--out", str(tmp_path / "results")]
    )

    run = command.suite_run(options)

    assert run.plan.out == tmp_path / "results" / file
    assert [each.name for each in run.plan.variants] == variants
    assert run.plan.workloads


def test_models_that_cannot_be_built_are_left_out_with_their_reason(tmp_path: Path) -> None:
    file = tmp_path / "left-out.json"
    file.write_text('{"simple": "no data", "gone-training": "no such package", "other-inference": "no data"}')
    model = tmp_path / "torchbenchmark" / "models" / "simple" / "__init__.py"
    model.parent.mkdir(parents=True)
    model.touch()
    options = ["suite", "torchbench", "--torchbench", str(tmp_path), "--left-out", str(file)]
    options += ["--training", "--device", "cpu", "--out", str(tmp_path)]

    run = command.suite_run(cli.parser().parse_args(options))

    assert "simple" not in [each.model for each in run.plan.workloads]
    left_out = run.settings()["left_out"]
    assert (left_out["simple"], left_out["gone"]) == ("no data", "no such package")
    assert "other" not in left_out
