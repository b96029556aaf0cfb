from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.lookup import Plan, measure_lookup
from benchmarks.lookup_load import Load

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.daemon, pytest.mark.usefixtures("patient")]


def test_lookups_in_a_real_daemon(tmp_path: Path) -> None:
    out = tmp_path / "lookup.json"
    load = Load(clients=4, rate=20, seconds=1.0, graphs=20)
    measure_lookup(Plan(graphs=20, requests=30, entries=1000, load=load, prune=True), out)
    alone, loaded = json.loads(out.read_text())["records"]
    assert (alone["graphs"], alone["entries"], alone["requests"]) == (20, 1000, 30)
    assert (loaded["clients"], loaded["requests"], loaded["unanswered"]) == (4, 20, 0)
    assert 0 <= loaded["cores"]["daemon"] < 2
    for record in (alone, loaded):
        assert 0 < record["p50_us"] <= record["p99_us"] <= record["max_us"]
