"""The generated pages: that the stored ones are up to date, and what they say of results."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.errors import BenchmarkError
from benchmarks.records import SCHEMA, write_json, write_result
from tests.support.result_pages import ENVIRONMENT, RECORDS, cells, checkout, record
from tools.lab.report import BEGIN, END, pages, performance, write_report
from tools.lab.stored import read_results

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md", "docs/team.md"])
def test_pages_are_as_the_stored_results_make_them(name: str) -> None:
    assert (ROOT / name).read_text() == pages(ROOT)[name], "run: python -m tools.lab report"


def test_there_are_a_dozen_kinds_of_results_at_most() -> None:
    # One file a GPU of each kind, and of the suites one each.
    files = [file.name for file in (ROOT / "benchmarks/results").iterdir()]
    kinds = {re.sub(r"^(suite|clients).*|(-[hab]\d+)?\.\w+$", r"\1", name) for name in files}
    assert len(kinds) <= 12


def test_a_line_says_times_ratio_and_noise_and_who_is_slower_or_fails(tmp_path: Path) -> None:
    page = pages(checkout(tmp_path))["docs/performance.md"]

    assert cells(page, "### Waited for", "bert-training") == [
        "bert-training", "20.0", "8.00", "9.00 (**1.12 ±0%**)", "4.20 (0.53 ±10%)",
    ]  # fmt: skip
    assert cells(page, "### Waited for", "dlrm-inference") == [
        "dlrm-inference", "1.00", "fails", "**fails**", "0.250 (0.25 ±?)",
    ]  # fmt: skip
    assert cells(page, "### Back to back", "bert-training")[3:] == ["6.00 (0.86 ±?)", "3.00 (0.43 ±?)"]
    assert "NVIDIA H100, a CPU, torch 2.11.0. Processes for each figure: 1 to 2." in page


def test_a_baseline_that_was_not_run_leaves_a_gap(tmp_path: Path) -> None:
    records = [record("bert-inference", "default", 2.0), record("bert-inference", "pygraph-cold", 0.25)]
    page = pages(checkout(tmp_path, records))["docs/performance.md"]

    assert cells(page, "### Waited for", "bert-inference") == [
        "bert-inference", "2.00", "", "0.250 (0.12 ±?)",
    ]  # fmt: skip


def test_of_two_processes_of_a_program_the_page_shows_the_shorter_step(tmp_path: Path) -> None:
    """One of them may have been disturbed, which a mean of two would not tell."""
    folder = checkout(tmp_path)
    steps = (("default", 40.0), ("default", 50.0), ("pygraph-default", 20.0), ("pygraph-default", 90.0))
    write_json(
        folder / "benchmarks/results/clients-h100.json",
        {
            "schema": SCHEMA,
            "environment": ENVIRONMENT,
            "settings": {"kind": "clients"},
            "records": [
                {"client": "ddp_train", "variant": variant, "step_ms": step_ms, "raised": "", "skipped": ""}
                for variant, step_ms in steps
            ],
        },
    )

    page = pages(folder)["docs/performance.md"]

    assert cells(page, "## Programs on two GPUs", "ddp_train") == ["ddp_train", "40.0", "20.0 (2.00)"]


def test_means_are_over_the_workloads_that_all_run(tmp_path: Path) -> None:
    page = pages(checkout(tmp_path))["docs/performance.md"]

    means = [
        line for line in page.splitlines() if line.startswith("| `pygraph-cold` | ") and "PYGRAPH" not in line
    ]

    assert [[cell.strip() for cell in line.split("|")[2:7]] for line in means] == [
        ["inference", "1", "0.125", "0.500", "0.500"],
        ["training", "1", "0.450", "1.125", "1.125"],
        ["both", "2", "0.237", "0.750", "0.750"],
    ]


def test_workloads_are_in_the_order_in_which_they_are_listed(tmp_path: Path) -> None:
    page = pages(checkout(tmp_path))["docs/performance.md"].partition("### Waited for")[2]

    names = [line.split()[1] for line in page.splitlines() if line.startswith("| ")][1:]
    assert names[1:4] == ["bert-inference", "bert-training", "dlrm-inference"]


def test_an_old_result_is_said_to_be_old_and_comes_last(tmp_path: Path) -> None:
    root = checkout(tmp_path, old="made with an earlier version")
    write_result(root / "benchmarks/results/steps-h200.json", {**ENVIRONMENT, "gpu": "H200"}, {}, RECORDS)

    page = performance(root / "benchmarks/results")

    assert page.index("## Steps on H200") < page.index("## Steps on H100")
    assert page.count("**Old:** made with an earlier version.") == 1
    assert "H200" in pages(root)["README.md"]


def test_other_names_are_not_taken_for_results(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    write_result(root / "benchmarks/results/steps-h100-again.json", ENVIRONMENT, {}, RECORDS)

    assert [each.name for each in read_results(root / "benchmarks/results", "steps")] == ["steps-h100"]


def test_readme_s_table_stands_between_its_marks(tmp_path: Path) -> None:
    root = checkout(tmp_path)

    assert write_report(root) == ["docs/performance.md", "README.md"]
    assert write_report(root) == []
    readme = (root / "README.md").read_text()
    assert readme.startswith(f"before\n{BEGIN}\n| ms a step | `default` |")
    assert readme.endswith(f"\n{END}\nafter\n")
    assert "| bert-training | 20.0 | 8.00 | 4.20 | 9.00 |" in readme


def test_readme_s_means_are_over_the_workloads_that_both_baselines_run(tmp_path: Path) -> None:
    readme = pages(checkout(tmp_path))["README.md"]

    # `reduce-overhead` fails in dlrm-inference, where this variant takes a quarter of the time of `default`.
    assert "waited for and back to back. PyGraph, default mode: 0.53 and 0.43 over 1 workloads." in readme
    assert '`mode="reduce-overhead"`: 0.75 and 0.65 over 2 workloads.' in readme


def test_without_marks_it_is_refused(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    (root / "README.md").write_text("nothing")

    with pytest.raises(BenchmarkError, match=r"README\.md has no lines"):
        pages(root)


def test_figures_of_a_team_are_of_the_server_s_time(tmp_path: Path) -> None:
    root = checkout(tmp_path)
    figures = {"per_s": 500.0, "server_us": 200.0, "connections": 64}
    measured = {f"{key}_{name}": value for key in ("publish", "ask") for name, value in figures.items()}
    environment = {**ENVIRONMENT, "postgres_server_version": "15.18 (Debian)"}
    team = {"daemons": 64, "graphs": 200, "bytes_of_a_record": 2000, **measured}
    content = {"schema": 2, "environment": environment, "records": [team]}
    (root / "benchmarks/results/team.json").write_text(json.dumps(content))

    page = pages(root)["docs/team.md"]

    assert "| records published | 500 | 200 | 64 |" in page
    # 1,250 hosts of 8 GPUs, 200 graphs each, in transactions of 64.
    assert "1,250 daemons" in page
    assert "5,000 transactions" in page
    assert "| all hosts have measured it, each by itself | 250,000 | 50.00 s | 500.0 MB |" in page
