"""Result files as one: what stays side by side, what is refused, and that whoever reads one file can read all of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.records import read_records, write_result
from benchmarks.region_table import read_regions
from tests.benchmarks.test_cli import benchmarks
from tests.benchmarks.test_records import answered, record
from tests.lab.command import lab

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
ENVIRONMENT: dict[str, str | None] = {"gpu": "H200", "commit": "abc"}


def of_run(
    file: Path, *peers: str, environment: dict[str, str | None] | None = None, **settings: Any
) -> Path:
    """Write a result of `run` with a record for each peer, whose details are its own."""
    made = [record(answered(0, [1.0]), peer=peer) for peer in peers]
    told = [
        dataclasses.replace(each, details=dataclasses.replace(each.details, lookup_s=float(number)))
        for number, each in enumerate(made)
    ]
    write_result(file, environment or ENVIRONMENT, settings, told)
    return file


def of_regions(file: Path, way: str, commit: str = "abc") -> Path:
    records = [{"workload": "three-ops", "way": way, "reserved_mb": 2.0, "regions": []}]
    content = {"schema": 1, "environment": {"gpu": "H200", "commit": commit}, "records": records}
    file.write_text(json.dumps(content))
    return file


def merged(out: Path, *files: Path, note: str | None = None) -> dict[str, Any]:
    arguments = ["--note", note] if note else []
    done = lab("merge", "--out", str(out), *arguments, *map(str, files))
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads(out.read_text())
    return content


def test_records_and_details_stay_side_by_side(tmp_path: Path) -> None:
    files = [of_run(tmp_path / "a.json", "default", "eager"), of_run(tmp_path / "b.json", "pygraph-cold")]

    content = merged(tmp_path / "all.json", *files)

    read = read_records(tmp_path / "all.json")
    assert read == [each for file in files for each in read_records(file)]
    assert [(each.peer, each.details.lookup_s) for each in read] == [
        ("default", 0.0), ("eager", 1.0), ("pygraph-cold", 0.0),
    ]  # fmt: skip
    assert len(content["details"]) == 3
    assert content["notes"][-1] == "merged of a.json (2 records), b.json (1 records)"
    assert len(content["notes"]) == 2  # the one that both have is there once


def test_of_files_without_details_each_file_s_own_settings_say_what_is_known(tmp_path: Path) -> None:
    files = [
        of_run(tmp_path / "a.json", "default", compiled_together=True),
        of_run(tmp_path / "b.json", "eager", compiled_together=False),
    ]
    for file in files:
        content = json.loads(file.read_text())
        del content["details"]
        file.write_text(json.dumps(content))

    content = merged(tmp_path / "all.json", *files)

    assert [each["compiled_together"] for each in content["details"]] == [True, False]
    assert [each.details.compiled_together for each in read_records(tmp_path / "all.json")] == [True, False]


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
    assert content["settings"] == {"warm_up": 80, "steps": [60, 30, 60]}


def test_files_of_regions(tmp_path: Path) -> None:
    files = [of_regions(tmp_path / f"{way}.json", way) for way in ("reduce-overhead", "graph")]

    content = merged(tmp_path / "all.json", *files)

    assert [each["way"] for each in read_regions(tmp_path / "all.json") or ()] == ["reduce-overhead", "graph"]
    assert "details" not in content
    assert benchmarks("table", str(tmp_path / "all.json")).returncode == 0


@pytest.mark.parametrize("what", ["commits", "schemas"])
def test_others_are_refused_without_a_reason(tmp_path: Path, what: str) -> None:
    first, second = of_run(tmp_path / "a.json", "default"), of_run(tmp_path / "b.json", "eager")
    content = json.loads(second.read_text())
    content |= {"schema": 2} if what == "schemas" else {"environment": {"gpu": "H200", "commit": "def"}}
    second.write_text(json.dumps(content))
    out = tmp_path / "all.json"

    done = lab("merge", "--out", str(out), str(first), str(second))

    assert done.returncode == 2
    values = {"commits": "a.json abc, b.json def", "schemas": "a.json 1, b.json 2"}[what]
    assert f"files of different {what}: {values}; say with --note why" in done.stderr
    assert not out.exists()
    said = merged(out, first, second, note="nothing between them touches this")
    assert said["notes"][-1] == "nothing between them touches this"
    expected = {"commits": (1, "abc; def"), "schemas": (2, "abc")}[what]
    assert (said["schema"], said["environment"]["commit"]) == expected


def test_files_of_run_and_of_regions_are_never_merged(tmp_path: Path) -> None:
    files = [of_run(tmp_path / "a.json", "default"), of_regions(tmp_path / "b.json", "reduce-overhead")]

    done = lab("merge", "--out", str(tmp_path / "all.json"), "--note", "why not", *map(str, files))

    assert done.returncode == 2
    assert "a.json of `run` cannot be merged with others, of `regions`" in done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": "1", "environment": {"commit": "abc"}, "records": []}',
        '{"schema": 1, "environment": {"commit": "abc"}, "workload": "w", "ways": []}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    good, other = of_run(tmp_path / "a.json", "default"), tmp_path / "other.json"
    other.write_text(text)

    done = lab("merge", "--out", str(tmp_path / "all.json"), str(good), str(other))

    assert done.returncode == 2
    assert "other.json is no result of `run` or `regions`" in done.stderr
    assert "Traceback" not in done.stderr


def test_stored_files_of_one_commit_are_merged_as_compare_takes_them(tmp_path: Path) -> None:
    files = [RESULTS / f"{name}-h200-ebe41bd.json" for name in ("all", "again")]

    content = merged(tmp_path / "all.json", *files)

    assert len(content["records"]) == len(content["details"]) == 97
    together, apart = (benchmarks("compare", *map(str, each)) for each in ([tmp_path / "all.json"], files))
    assert together.stdout == apart.stdout
    assert together.returncode == apart.returncode
