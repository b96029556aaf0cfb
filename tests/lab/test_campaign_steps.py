"""What steps are made of: commands that there are, with names that there are; and the whole of it on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks import cli
from benchmarks.errors import BenchmarkError
from benchmarks.workloads import WORKLOADS
from tools.lab import cli as lab_cli
from tools.lab.campaign_steps import SECONDS, USAGE, Step, steps_of

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
PARSERS = {"benchmarks": cli.parser, "tools.lab": lab_cli.parser}
EXAMPLES = (
    "tests",
    "demo",
    "memory:resnet50-training",
    "memory:resnet50-training:kernels",
    "regions:three-ops,bert-training",
    "regions:three-ops:reduce-overhead,kernels",
    "addresses:three-ops",
    "run:three-ops,mlp-training:default,reduce-overhead,pygraph-cold:2",
    "run:all:eager:1",
    "overhead",
    "overhead:three-ops,mlp-training",
)


def made(*names: str, gpus: int = 1, end_s: float = 580) -> list[Step]:
    return steps_of(names, Path("out"), Path("scratch"), gpus, end_s)


def option(arguments: Sequence[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_command_is_one_that_there_is(name: str) -> None:
    (step,) = made(name)

    for command in (*step.commands, *([step.report] if step.report else [])):
        arguments = ["7" if each == SECONDS else each for each in command.arguments]
        if arguments[0] == "-m" and arguments[1] in PARSERS:
            options = PARSERS[arguments[1]]().parse_args(arguments[2:])
            assert getattr(options, "workload", None) != ""
        elif arguments[0] != "-m":
            assert (ROOT / arguments[0]).exists()
        assert not step.result or str(step.result) in arguments or dict(command.environ)


def test_all_kinds_are_tried() -> None:
    assert {name.partition(":")[0] for name in EXAMPLES} == set(USAGE)


def test_each_step_has_a_file_of_its_own() -> None:
    results = [step.result for step in made("overhead", "overhead", "demo", "overhead")]

    assert results == [
        Path("out/1-overhead.json"),
        Path("out/2-overhead.json"),
        None,
        Path("out/4-overhead.json"),
    ]


def test_what_is_compiled_stays_where_that_is_wanted() -> None:
    names = ["run:three-ops:default:1", "regions:three-ops"]
    run, regions = steps_of(names, Path("out"), Path("scratch"), 1, 580, Path("kept"))

    assert option(run.commands[0].arguments, "--compiled") == str(Path("kept/run"))
    assert option(regions.commands[0].arguments, "--caches") == str(Path("kept/regions"))
    run, regions = made(*names)
    assert option(run.commands[0].arguments, "--compiled") == str(Path("scratch/compiled/run"))
    assert option(regions.commands[0].arguments, "--caches") == str(Path("scratch/compiled/regions"))


def test_decisions_are_kept_where_that_is_wanted() -> None:
    names = ["run:three-ops:pygraph-default:1", "overhead"]
    kept, _ = steps_of(names, Path("out"), Path("scratch"), 1, 580, None, Path("out/decisions.jsonl"))

    assert option(kept.commands[0].arguments, "--decisions") == str(Path("out/decisions.jsonl"))
    assert PARSERS["tools.lab"]().parse_args(["campaign", "--decisions", *names]).decisions
    assert "--decisions" not in made(*names)[0].commands[0].arguments


def test_the_overhead_is_of_the_workloads_that_are_named() -> None:
    usual, named = made("overhead", "overhead:three-ops,mlp-training")

    assert "--workloads" not in usual.commands[0].arguments
    assert option(named.commands[0].arguments, "--workloads") == "three-ops,mlp-training"


def test_a_run_is_of_what_is_named() -> None:
    (step,) = made("run:three-ops,mlp-training:eager,default:3")

    arguments = step.commands[0].arguments
    assert option(arguments, "--workloads") == "three-ops,mlp-training"
    assert option(arguments, "--variants") == "eager,default"
    assert option(arguments, "--repetitions") == "3"


def test_workers_and_demos_are_spread_over_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    tests, demo, run = made("tests", "demo", "run:three-ops:eager:1", gpus=2)

    (command,) = tests.commands
    assert option(command.arguments, "-n") == "26"
    assert dict(command.environ)["BENCHMARK_GPUS"] == "2"
    assert [dict(each.environ) for each in demo.commands] == [{"CUDA_VISIBLE_DEVICES": name} for name in "01"]
    assert len({each.arguments for each in demo.commands}) == 2
    assert option(run.commands[0].arguments, "--gpus") == "2"
    tests, demo = made("tests", "demo")
    assert option(tests.commands[0].arguments, "-n") == "13"
    assert [each.environ for each in demo.commands] == [(), ()]


def test_all_workloads_are_those_that_are_compared() -> None:
    (step,) = made("run:all:eager:1")

    by_name_alone = {"resnet50-training-large", "large-decode", "deep-inference"}
    assert option(step.commands[0].arguments, "--workloads").split(",") == [
        name for name in WORKLOADS if name not in by_name_alone
    ]


@pytest.mark.parametrize(
    ("variants", "report"),
    [
        ("default,reduce-overhead,pygraph-cold", ["compare"]),
        ("eager,pygraph-cold", ["table"]),
        ("default,reduce-overhead", ["table"]),
    ],
)
def test_what_a_run_comes_to_is_compared_if_there_is_something_to_compare(
    variants: str, report: list[str]
) -> None:
    (step,) = made(f"run:three-ops:{variants}:1")

    assert step.report is not None
    assert [each for each in step.report.arguments[2:] if each != "out/1-run.json"] == report


def test_a_longer_campaign_has_longer_steps_and_a_shorter_one_the_usual_limits() -> None:
    (usual,), (shorter,), (longer,) = made("tests"), made("tests", end_s=100), made("tests", end_s=1160)

    assert usual.limit_s == shorter.limit_s == longer.limit_s / 2


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nonsense", "unknown step nonsense; choose among: tests, demo, memory:WORKLOAD"),
        ("tests:three-ops", "tests:three-ops should be tests"),
        ("memory", "memory should be memory:WORKLOAD"),
        ("memory:three-ops:graph:more", "should be memory:WORKLOAD"),
        ("memory:nonsense", "unknown workload nonsense"),
        ("memory:three-ops:nonsense", "unknown way nonsense"),
        ("regions:three-ops,nonsense", "unknown workload nonsense"),
        ("run:three-ops:eager", "run:three-ops:eager should be run:WORKLOADS:VARIANTS:REPETITIONS"),
        ("run:three-ops:nonsense:1", "unknown variant nonsense"),
        ("run:three-ops:eager:many", "many is no number of repetitions"),
        ("overhead:nonsense", "unknown workload nonsense"),
        ("run:three-ops:eager:0", "0 is no number of repetitions"),
    ],
)
def test_what_cannot_be_is_refused(name: str, said: str) -> None:
    with pytest.raises(BenchmarkError, match=said):
        made("demo", name)


def campaign(out: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.lab", "campaign", "--out", str(out), *arguments]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables}
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False
    )


def test_without_git_the_commit_has_to_be_named(tmp_path: Path) -> None:
    done = campaign(tmp_path / "out", "overhead", PATH="/nonexistent", BENCHMARK_COMMIT="")

    assert done.returncode == 2
    assert "name it with --commit or $BENCHMARK_COMMIT" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
@pytest.mark.slow
def test_a_run_and_what_needs_a_gpu_on_a_cpu(tmp_path: Path) -> None:
    done = campaign(
        tmp_path,
        "--commit",
        "abc",
        "run:three-ops:eager:1",
        "memory:three-ops",
        "regions:three-ops:kernels",
    )

    assert done.returncode == 1
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "1-run.json",
        "3-regions.json",
        "campaign.log",
    ]
    result = json.loads((tmp_path / "1-run.json").read_text())
    assert result["environment"]["commit"] == "abc"
    assert [each["variant"] for each in result["records"] if each["step_ms"]] == ["eager"]
    rows = done.stdout.splitlines()[1:4]
    assert rows[0].split()[2:] == ["1-run.json", "done"]
    assert "torch sees no CUDA device here" in rows[1]
    assert "torch sees no CUDA device here" in done.stdout.partition("-- regions")[2]
    assert "step ms" in done.stdout  # the table of the run
    assert (tmp_path / "campaign.log").read_text().count("=== -m ") == 5


def test_no_process_of_a_run_is_killed_before_the_step_is() -> None:
    (step,) = made("run:three-ops:eager:1")

    (command,) = step.commands
    assert option(command.arguments, "--timeout-s") == option(command.arguments, "--budget-s") == SECONDS
