from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks import lookup
from benchmarks.cli import main
from benchmarks.lookup import Load, Plan, bounds_of, measure_lookup, shortcomings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

ALONE = {"clients": 1, "graphs": 20, "p99_us": 9000.0}
LOADED = {
    "clients": 64,
    "graphs": 20,
    "asked_per_s": 1000,
    "sent_per_s": 990.0,
    "unanswered": 0,
    "pruned_all_the_time": True,
    "p99_us": 9900.0,
}


@pytest.mark.slow
@pytest.mark.daemon
@pytest.mark.usefixtures("patient")
def test_lookups_in_a_real_daemon(tmp_path: Path) -> None:
    out = tmp_path / "lookup.json"
    load = Load(clients=4, rate=40, seconds=0.5, graphs=20)
    lines, is_kept = measure_lookup(Plan(graphs=20, requests=30, entries=300, load=load, prune=True), out)
    written = json.loads(out.read_text())
    alone, loaded = written["records"]
    # Which of them are kept is for the machine to say.
    assert [each["most"] for each in written["bounds"]] == [10, 10, 0]
    assert is_kept == all(each["is_kept"] for each in written["bounds"])
    assert sum(line.startswith(("kept ", "BROKEN ")) for line in lines) == 3
    assert (alone["graphs"], alone["entries"], alone["requests"]) == (20, 300, 30)
    assert (loaded["clients"], loaded["requests"], loaded["unanswered"]) == (4, 20, 0)
    assert 0 <= loaded["cores"]["daemon"] < 2
    for record in (alone, loaded):
        assert 0 < record["p50_us"] <= record["p99_us"] <= record["max_us"]


def verdicts(*records: Mapping[str, Any]) -> list[bool]:
    return [each.is_kept for each in bounds_of(records)]


def test_latency_and_unanswered_requests_have_bounds() -> None:
    assert verdicts(ALONE, LOADED) == [True, True, True]
    assert verdicts(ALONE | {"p99_us": 10_001.0}, LOADED) == [False, True, True]
    assert verdicts(ALONE, LOADED | {"p99_us": 12_000.0}) == [True, False, True]
    assert verdicts(ALONE, LOADED | {"unanswered": 1}) == [True, True, False]
    assert verdicts(ALONE, LOADED | {"unanswered": 9, "p99_us": None}) == [True, False]


def test_larger_requests_have_no_bound_of_latency() -> None:
    assert verdicts(ALONE | {"graphs": 100, "p99_us": 50_000.0}) == []


def test_a_load_that_was_less_than_planned_is_said() -> None:
    plan = Plan(graphs=20, requests=30, entries=1000, load=None, prune=True)

    assert shortcomings(plan, [ALONE, LOADED]) == []
    assert shortcomings(plan, [ALONE, LOADED | {"sent_per_s": 800.0, "pruned_all_the_time": False}]) == [
        "note    only 800 requests a second were sent",
        "note    the prune ended before the requests: take more entries or fewer seconds",
    ]


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_broken_bound_is_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_kept: bool
) -> None:
    monkeypatch.setattr(lookup, "measure_lookup", lambda *_: (["a line"], is_kept))

    assert main(["lookup", "--out", str(tmp_path / "out.json")]) == (0 if is_kept else 1)
    assert capsys.readouterr().out == "a line\n"
