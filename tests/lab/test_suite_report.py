"""Pages on the public suites and on programs of popular libraries, of stored results."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Figure
from benchmarks.records import Record, write_result
from tests.support.result_pages import cells, checkout
from tools.lab.merge import merge
from tools.lab.report import pages, performance
from tools.lab.suites.report import readme_suites

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENT = {"gpu": "NVIDIA H100", "torch": "2.11.0", "commit": "abc"}
STEPS = {"eager": 8.0, "default": 4.0, "reduce-overhead": 2.0, "pygraph-default": 1.0}


def of_model(model: str, mode: str, batch: int = 8, **failing: str) -> list[Record]:
    made = []
    for variant, ms in STEPS.items():
        note = failing.get(variant.replace("-", "_"), "")
        figure = None if note else Figure(ms, 0.0, 5)
        made.append(
            Record(f"{model}-{mode}", mode, batch, variant, step_ms=figure, pipelined_ms=figure, note=note)
        )
    return made


def stored(root: Path) -> Path:
    """Store a suite's results of both modes as one file."""
    results = root / "benchmarks/results"
    broken = "RuntimeError: overwritten | by a later run"
    inference = [
        *of_model("Good", "inference"),
        *of_model("Bad", "inference", reduce_overhead=broken),
        *of_model("MT5ForConditionalGeneration", "inference", batch=16),
    ]
    for mode, records, left_out in (
        ("inference", inference, {}),
        ("training", of_model("Good", "training"), {"M2M100": "the dashboard does not train it"}),
    ):
        write_result(
            root / f"{mode}.json", ENVIRONMENT, {"suite": "timm", "mode": mode, "left_out": left_out}, records
        )
    merge([root / "inference.json", root / "training.json"], results / "suite-huggingface-h100.json", None)
    return results


def test_a_suite_s_page_says_what_its_means_are_over_and_why_a_model_is_not_in_them(tmp_path: Path) -> None:
    page = performance(stored(checkout(tmp_path)))

    below = "### HuggingFace, inference"
    assert "3 models run in eager mode, 2 count in the means." in page
    assert cells(page, below, "`reduce-overhead`")[1:4] == ["2/3", "2", "4.000"]
    assert cells(page, below, "Bad")[-1] == "no"
    assert cells(page, below, "Good")[2:5] == ["4.00", "2.00", "1.00 (2.00)"]
    failing = cells(page, "models that fail", "fails")
    assert failing[1:] == [
        "Bad",
        "inference",
        "`reduce-overhead`",
        "`RuntimeError: overwritten / by a later run`",
    ]
    assert cells(page, "models that fail", "left out")[1] == "M2M100"
    assert cells(page, "of a published table", "MT5ForConditionalGeneration")[2] == "4.00, H100"


def test_models_that_miss_a_line_have_a_profile(tmp_path: Path) -> None:
    results = checkout(tmp_path) / "benchmarks/results"
    note = "graphs 3; deployed 2 KERNELS; 2 x the memory does not suffice"
    slow: dict[str, Any] = {
        "step_ms": Figure(3.0, 0.0, 5),
        "coverage": 0.25,
        "deployed": {"GRAPH": 1, "KERNELS": 2},
        "note": note,
    }
    records = [
        dataclasses.replace(each, **slow) if each.variant == "pygraph-default" else each
        for each in of_model("Slow", "inference")
    ]
    write_result(
        results / "suite-timm-h100.json", ENVIRONMENT, {"suite": "timm", "mode": "inference"}, records
    )

    page = performance(results)

    assert cells(page, "Where a line is missed", "Slow") == [
        *("Slow", "`pygraph-default`", "", "", "25.0%", "", ""),
        "`1 GRAPH, 2 KERNELS; 2 x the memory does not suffice`",
    ]


def test_readme_has_a_line_for_each_suite_and_mode(tmp_path: Path) -> None:
    table = readme_suites(stored(checkout(tmp_path)))

    assert "| HuggingFace, inference, H100 | 4.00 (3) | 4.00 (3) | 2.00 (2) | 2.00 (2) |" in table
    assert "| HuggingFace, training, H100 | 4.00 (1) |" in table
    assert "earlier version" not in table
    assert readme_suites(tmp_path) == ""


def test_a_suite_of_an_earlier_version_is_marked_in_readme(tmp_path: Path) -> None:
    results = stored(checkout(tmp_path))
    file = results / "suite-huggingface-h100.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "old": "measured before"}))

    table = readme_suites(results)

    assert r"| HuggingFace, training, H100\* | 4.00 (1) |" in table
    assert table.endswith("\n\n" + r"\* Measured with an earlier version of PyGraph.")


def process(
    client: str, variant: str, step_ms: float | None, raised: str = "", **more: Any
) -> dict[str, Any]:
    return {
        "client": client,
        "variant": variant,
        "repetition": 0,
        "step_ms": step_ms,
        "raised": raised,
        **more,
    }


def test_the_case_of_clients_is_of_programs_that_run_by_default(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    records = [
        *(process("trainer", variant, ms) for variant, ms in (("default", 8.0), ("pygraph-default", 2.0))),
        process("trainer", "reduce-overhead", None, "RuntimeError: overwritten"),
        *(process("decoder", variant, ms) for variant, ms in (("default", 4.0), ("reduce-overhead", 2.0))),
        process("decoder", "pygraph-default", 4.0, agrees=False),
        *(
            process("absent", variant, None, skipped="no such library")
            for variant in ("default", "pygraph-default")
        ),
        *(process("broken", variant, None, "ValueError") for variant in ("default", "pygraph-default")),
        *(process("ddp_train", variant, ms) for variant, ms in (("default", 3.0), ("pygraph-default", 1.0))),
    ]
    content = {"schema": 2, "environment": ENVIRONMENT, "records": records}
    (root / "benchmarks/results/clients-h100.json").write_text(json.dumps(content))

    made = pages(root)

    told = 'Of 2 programs on popular libraries, plain `mode="reduce-overhead"` raised in 1, PyGraph in default mode raised in none.'
    assert told in made["README.md"]
    assert "The results with PyGraph in default mode differ in 1: decoder." in made["README.md"]
    assert "took 2.00 times as long" in made["README.md"]
    assert "None of the 1 programs on two GPUs raised an error, plainly or with PyGraph." in made["README.md"]
    page = made["docs/performance.md"]
    assert cells(page, "## Programs on two GPUs", "ddp_train")[1:] == ["3.00", "1.00 (3.00)"]
    assert cells(page, "## Programs on popular", "trainer")[1:] == ["8.00", "**raises**", "2.00 (4.00)"]
    assert cells(page, "| program | variant |", "broken")[1:] == ["`default`", "`ValueError`"]
