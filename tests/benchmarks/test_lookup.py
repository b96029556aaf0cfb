from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.lookup import measure_lookup

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.daemon, pytest.mark.usefixtures("patient")]


def test_lookups_in_a_real_daemon(tmp_path: Path) -> None:
    out = tmp_path / "lookup.json"
    measure_lookup(graphs=20, requests=30, out=out)
    (record,) = json.loads(out.read_text())["records"]
    assert (record["graphs"], record["entries"], record["requests"]) == (20, 10_000, 30)
    assert 0 < record["p50_us"] <= record["p99_us"] <= record["max_us"]
