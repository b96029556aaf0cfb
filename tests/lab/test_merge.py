"""Result files as one: what stays side by side, what is refused, and that whoever reads one file can read all of them."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.records import read_records, write_result
from benchmarks.region_table import read_regions
from tests.support.benchmark_commands import benchmarks, lab
from tests.support.benchmark_records import answered, record

if TYPE_CHECKING:
    from pathlib import Path

ENVIRONMENT: dict[str, str | None] = {"gpu": "H200", "commit": "abc"}


def of_run(
    file: Path, *variants: str, environment: dict[str, str | None] | None = None, **settings: Any
) -> Path:
    """Write a result of `run` with a record for each variant, whose lookup times are its own."""
    made = [record(answered(0, [1.0]), variant=variant) for variant in variants]
    told = [dataclasses.replace(each, lookup_s=float(number)) for number, each in enumerate(made)]
    write_result(file, environment or ENVIRONMENT, settings, told)
    return file


def of_regions(file: Path, way: str, commit: str = "abc") -> Path:
    records = [{"workload": "three-ops", "way": way, "reserved_mb": 2.0, "regions": []}]
    content = {"schema": 2, "environment": {"gpu": "H200", "commit": commit}, "records": records}
    file.write_text(json.dumps(content))
    return file


def merged(out: Path, *files: Path, note: str | None = None) -> dict[str, Any]:
    arguments = ["--note", note] if note else []
    done = lab("merge", "--out", str(out), *arguments, *map(str, files))
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def test_records_stay_as_they_are_and_in_their_order(tmp_path: Path) -> None:
    files = [of_run(tmp_path / "a.json", "default", "eager"), of_run(tmp_path / "b.json", "pygraph-cold")]

    merged(tmp_path / "all.json", *files)

    read = read_records(tmp_path / "all.json")
    assert read == [each for file in files for each in read_records(file)]
    assert [(each.variant, each.lookup_s) for each in read] == [
        ("default", 0.0), ("eager", 1.0), ("pygraph-cold", 0.0),
    ]  # fmt: skip


def test_what_differs_is_named_of_each(tmp_path: Path) -> None:
    files = [
        of_run(tmp_path / "a.json", "default", environment={**ENVIRONMENT, "cpu": "x"}, warm_up=80, steps=60),
        of_run(tmp_path / "b.json", "eager", environment={**ENVIRONMENT, "cpu": "y"}, warm_up=80, steps=30),
        of_run(
            tmp_path / "c.json", "eager", environment={"gpu": None, "commit": "abc"}, warm_up=80, steps=60
        ),
    ]

    content = merged(tmp_path / "all.json", *files)

    assert content["environment"] == {"gpu": "H200", "commit": "abc", "cpu": "x; y"}
    assert content["settings"] == {"warm_up": 80, "steps": [60, 30]}
    again = merged(tmp_path / "again.json", tmp_path / "all.json", *files)
    assert (again["environment"], again["settings"]) == (content["environment"], content["settings"])


def test_files_of_regions(tmp_path: Path) -> None:
    files = [of_regions(tmp_path / f"{way}.json", way) for way in ("reduce-overhead", "graph")]

    merged(tmp_path / "all.json", *files)

    assert [each["way"] for each in read_regions(tmp_path / "all.json") or ()] == ["reduce-overhead", "graph"]
    assert benchmarks("table", str(tmp_path / "all.json")).returncode == 0


def test_files_of_other_commits_are_refused_without_a_reason(tmp_path: Path) -> None:
    first, second = of_run(tmp_path / "a.json", "default"), of_run(tmp_path / "b.json", "eager")
    content = json.loads(second.read_text())
    second.write_text(json.dumps(content | {"environment": {"gpu": "H200", "commit": "def"}}))
    out = tmp_path / "all.json"

    done = lab("merge", "--out", str(out), str(first), str(second))

    assert done.returncode == 2
    assert "files of different commits" in done.stderr
    assert "say with --note why" in done.stderr
    assert not out.exists()
    said = merged(out, first, second, note="nothing between them touches this")
    assert said["notes"] == ["nothing between them touches this"]
    assert said["environment"]["commit"] == "abc; def"


def test_files_of_run_and_of_regions_are_never_merged(tmp_path: Path) -> None:
    files = [of_run(tmp_path / "a.json", "default"), of_regions(tmp_path / "b.json", "reduce-overhead")]

    done = lab("merge", "--out", str(tmp_path / "all.json"), "--note", "why not", *map(str, files))

    assert done.returncode == 2
    assert "results of `run` cannot be merged with results of `regions`" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "2", "environment": {"commit": "abc"}, "records": []}',
        '{"schema": 2, "environment": {"commit": "abc"}, "workload": "w", "ways": []}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    good, other = of_run(tmp_path / "a.json", "default"), tmp_path / "other.json"
    other.write_text(text)

    done = lab("merge", "--out", str(tmp_path / "all.json"), str(good), str(other))

    assert done.returncode == 2
    assert "other.json" in done.stderr
    assert "Traceback" not in done.stderr
