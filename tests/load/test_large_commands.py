"""Listings and a prune of a cache are timed with all that they have read, written and deleted."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import BenchmarkError
from tools.load.large_commands import _Running, measure_commands

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.daemon, pytest.mark.slow]

ENTRIES = 3_000


def test_each_command_reads_what_it_should(tmp_path: Path) -> None:
    out = tmp_path / "large.json"

    measure_commands(ENTRIES, out)

    *listings, prune = json.loads(out.read_text())["records"]
    exported = {each["command"]: each["exported_entries"] for each in listings}
    assert exported == {
        "cache inspect --most 50": None,
        "cache inspect": None,
        "cache inspect --json": None,
        "cache inspect --graph GRAPH": None,
        "cache show GRAPH": None,
        "cache export --graph GRAPH FILE": 1,
        "cache export FILE": ENTRIES,
    }
    printed = {each["command"]: each["printed_bytes"] for each in listings}
    assert min(printed["cache inspect"], printed["cache inspect --json"]) > 100 * ENTRIES
    assert 0 < printed["cache inspect --most 50"] < 100 * ENTRIES
    assert all(each["seconds"] > 0 and each["resident_mib"] > 10 for each in listings)
    assert prune["seconds"] > 0
    assert all(each["requests"] > 0 and each["p50_ms"] <= each["max_ms"] for each in prune["beside"].values())


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="no-such-command"):
        _Running(["no-such-command"], tmp_path).wait()
