from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tools.load.soak import Plan, Sample, bounds_of, measure_soak

if TYPE_CHECKING:
    from pathlib import Path

PLAN = Plan(clients=64, rate=100, seconds=3600.0)
SAMPLE = Sample(
    resident_bytes=10**8,
    descriptors=20,
    wal_bytes=2**22,
    log_bytes=2**20,
    database_bytes=2**25,
    spool_files=0,
    cpu_s=1.0,
    p50_us=1000.0,
    p99_us=None,
)


def _broken(samples: list[Sample], unanswered: dict[str, int] | None = None, faults: int = 0) -> list[str]:
    bounds = bounds_of(PLAN, samples, Counter(unanswered or {}), faults)
    return [each.name for each in bounds if not each.is_kept]


def test_a_steady_daemon_keeps_all_bounds() -> None:
    assert _broken([SAMPLE] * 8, {"lookup: no answer in time": 100}) == []


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("resident_bytes", 2**28, "resident memory, MiB"),
        ("descriptors", 129, "descriptors"),
        ("wal_bytes", 2**25, "write-ahead log, MiB"),
        ("log_bytes", 2**22, "log files, MiB"),
        ("database_bytes", 2**27, "database, MiB"),
    ],
)
def test_one_sample_beyond_a_bound_is_enough(name: str, value: int, bound: str) -> None:
    samples = [SAMPLE] * 8
    samples[3] = dataclasses.replace(SAMPLE, **{name: value})
    assert bound in _broken(samples)


def test_a_leak_within_the_largest_value_is_seen() -> None:
    samples = [dataclasses.replace(SAMPLE, resident_bytes=10**8 + n * 10**6) for n in range(40)]
    assert _broken(samples) == ["growth of its median from the second quarter to the last, MiB"]


def test_errors_are_no_delays() -> None:
    assert _broken([SAMPLE], {"lookup: status 500": 1}) == ["requests not answered for another reason"]
    assert _broken([SAMPLE], faults=1) == ["errors in the daemon"]


@pytest.mark.slow
@pytest.mark.daemon
def test_a_real_daemon_under_clients_that_come_and_go(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    plan = Plan(clients=4, rate=40, seconds=4.0, entries=500, sample_s=1.0, prune_s=1.0, longest_life_s=2.0)
    lines, is_kept = measure_soak(plan, out)
    (record,) = json.loads(out.read_text())["records"]
    assert is_kept, lines
    assert set(record["answered"]) == {"lookup", "lease", "record", "prune"}
    assert record["clients_started"] > 4
    assert record["clients_killed"] > 0
    assert record["samples"] >= 4
    for figure in record["figures"].values():
        assert figure["median"] <= figure["max"]
