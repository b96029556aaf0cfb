from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.variants import VARIANTS
from benchmarks.workloads import STANDARD
from tests.support.benchmark_commands import benchmarks

if TYPE_CHECKING:
    from pathlib import Path


def test_list_shows_every_name() -> None:
    done = benchmarks("run", "--list")
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in [*(each.name for each in STANDARD), *VARIANTS])


def test_a_cache_that_nothing_fills_is_refused(tmp_path: Path) -> None:
    done = benchmarks(
        "run", "--variants", "pygraph-warm,pygraph-cold", "--out", str(tmp_path / "result.json")
    )
    assert done.returncode == 2
    assert "pygraph-warm needs a cache that pygraph-cold fills: name that before it" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "kind", "known"),
    [("--workloads", "workload", "three-ops"), ("--variants", "variant", "eager")],
)
def test_unknown_names_are_refused_with_the_known_ones(
    tmp_path: Path, option: str, kind: str, known: str
) -> None:
    done = benchmarks("run", option, f"nonsense,{known}", "--out", str(tmp_path / "result.json"))
    assert done.returncode == 2
    assert f"unknown {kind} nonsense; choose among: " in done.stderr
    assert known in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "--workloads", "three-ops"),
        ("run", "--out", "/nonexistent/result.json"),
        ("run", "--steps", "0", "--out", "result.json"),
        ("table", "/nonexistent.json"),
        ("lookup", "--graphs", "5000", "--out", "result.json"),
        (),
    ],
)
def test_bad_requests_end_with_2_and_no_traceback(arguments: tuple[str, ...]) -> None:
    done = benchmarks(*arguments)
    assert done.returncode == 2
    assert done.stderr
    assert "Traceback" not in done.stderr
