"""`python -m benchmarks clients`: examples are plain user code, and results are compared."""

from __future__ import annotations

import ast
import dataclasses
from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import UnknownNameError
from benchmarks.processes import Outcome
from tools.lab.clients import catalogue, table
from tools.lab.clients.catalogue import GROUPS, Client, select_clients
from tools.lab.clients.process import raised_by, result_of
from tools.lab.clients.records import ClientRecord, compared, failed, largest_difference

if TYPE_CHECKING:
    from pathlib import Path

PROGRAMS = sorted(catalogue.FOLDER.glob("*.py"))
HELPERS = {"measuring"}
KNOWN = {each.name for each in GROUPS["all"]}
LIBRARIES = {
    *("accelerate", "diffusers", "lightning", "peft", "sentence_transformers", "timm", "torch_geometric"),
    *("torchvision", "transformers"),
}


def record(client: str, variant: str, **fields: object) -> ClientRecord:
    return dataclasses.replace(ClientRecord(client, variant, 0), **fields)  # type: ignore[arg-type]


# --- the examples ------------------------------------------------------------------------------------


def test_each_example_is_in_the_catalogue() -> None:
    assert {path.stem for path in PROGRAMS} - HELPERS == KNOWN


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_is_plain_code_of_a_user(path: Path) -> None:
    source = path.read_text()
    tree = ast.parse(source)

    assert "pygraph" not in source.lower()
    assert ast.get_docstring(tree)
    if path.stem not in HELPERS:
        mains = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "main"]
        assert [argument.arg for argument in mains[0].args.args] == ["mode", "steps", "tiny"]
        assert ast.unparse(tree.body[-1]) == "if __name__ == '__main__':\n    run(main, __doc__)"


@pytest.mark.parametrize("client", GROUPS["all"], ids=lambda each: each.name)
def test_the_catalogue_names_the_libraries_that_an_example_imports(client: Client) -> None:
    tree = ast.parse(client.program.read_text())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }

    assert imported & LIBRARIES <= set(client.libraries)


def test_unknown_clients_are_refused() -> None:
    assert select_clients("one-gpu", ["ppo", "ppo"]) == (Client("ppo"),)
    with pytest.raises(UnknownNameError, match="gpt_decode"):
        select_clients("one-gpu", ["gpt"])


# --- what a process says -----------------------------------------------------------------------------


def test_the_last_result_of_a_process_counts() -> None:
    output = 'RESULT {"step_ms": 1.0}\nwarning\nRESULT {"step_ms": 2.0}\nbye\n'

    assert result_of(output) == {"step_ms": 2.0}
    assert result_of("RESULT {") == {}


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(None, "RESULT {\"steps\": 1}\n"), ""),
        (Outcome(None, "nothing\n"), "it printed no result"),
        (Outcome("ValueError: no", "Traceback\nValueError: no\n"), "ValueError: no"),
        (Outcome("x", "[rank1]: RuntimeError: NCCL\nChildFailedError:\n"), "RuntimeError: NCCL"),
        (Outcome("y", "Fatal Python error: Segmentation fault\n\n  File a\n"), "Fatal Python error: Segmentation fault"),
        (Outcome("RESULT {}", "RESULT {}\n"), "it failed after its result"),
        (Outcome("killed: not done after 3 s", "ValueError: handled\n"), "killed: not done after 3 s"),
    ],
)  # fmt: skip
def test_the_line_that_says_why_a_process_failed(outcome: Outcome, expected: str) -> None:
    assert raised_by(outcome) == expected


# --- comparison --------------------------------------------------------------------------------------


def test_differences_are_relative_and_missing_values_differ() -> None:
    assert largest_difference({"a": [1.0, 2.0]}, {"a": [1.0, 2.2]}) == pytest.approx(0.2 / 2.2, abs=1e-6)
    assert largest_difference({"a": [0.01]}, {"a": [0.02]}) == pytest.approx(0.1)
    assert largest_difference({"a": [float("nan")]}, {"a": [float("nan")]}) == 0.0
    assert largest_difference({"a": [float("nan")]}, {"a": [1.0]}) > 1
    assert largest_difference({"a": [1.0]}, {"a": [1.0, 1.0]}) > 1
    assert largest_difference({"a": [1.0]}, {}) > 1


def test_runs_are_compared_with_default_and_eager_mode_more_leniently() -> None:
    def run(variant: str, value: float) -> ClientRecord:
        return record("a", variant, checks={"loss": [value]}, tolerance=0.01, eager_tolerance=0.1)

    eager, default, ours, wrong = compared(
        [run("eager", 1.05), run("default", 1.0), run("pygraph-default", 1.001), run("pygraph-cold", 1.05)]
    )

    assert (eager.agrees, default.agrees, ours.agrees, wrong.agrees) == (True, None, True, False)
    assert (eager.against, default.against) == ("default", "")
    assert failed([default, wrong])
    assert not failed([default, ours])


def test_a_failure_that_default_shares_is_not_ours() -> None:
    both = [
        record("a", "default", raised="ValueError: x"),
        record("a", "pygraph-default", raised="ValueError: x"),
    ]

    assert not failed(both)
    assert failed([record("a", "default"), both[1]])


def test_the_tables_say_what_raised_and_what_differs() -> None:
    shown = table.render(
        [
            record("a", "default", step_ms=20.0, reserved_mb=100),
            record("a", "reduce-overhead", raised="RuntimeError: overwritten"),
            record(
                "a", "pygraph-default", step_ms=10.0, reserved_mb=150, deployed={"GRAPH": 2, "KERNELS": 1}
            ),
            record("a", "pygraph-cold", step_ms=10.0, agrees=False, against="default", difference=0.25),
            record("b", "default", skipped="b is not installed"),
        ]
    )

    assert "| a | 20 | raises | 10 | 10 | 2.00 | - |" in shown
    assert "| a | 100 | raises | 150 | - |" in shown
    assert "| a | 2, 1 |" in shown
    assert "- a, reduce-overhead raised: RuntimeError: overwritten" in shown
    assert "- a, pygraph-cold DIFFERS from default by 0.25" in shown
    assert "- b was skipped: b is not installed" in shown
