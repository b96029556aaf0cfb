from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from benchmarks.errors import BenchmarkError
from tools.lab.imports import VARIANTS, Variant, measure_imports

if TYPE_CHECKING:
    from pathlib import Path

QUICK = (
    Variant("base", "pass"),
    Variant("slow", "import time; time.sleep(0.2)", baseline="base"),
    Variant("variable", "import os; assert os.environ['X'] == 'y'", (("X", "y"),), baseline="base"),
)


@pytest.mark.torch  # it takes seconds
def test_differences_are_paired_with_the_baseline(tmp_path: Path) -> None:
    out = tmp_path / "imports.json"
    lines = measure_imports(QUICK, repetitions=3, out=out)
    base, slow, variable = json.loads(out.read_text())["records"]
    assert base["difference_ms"] is None
    assert base["wall_ms"]["n"] == slow["difference_ms"]["n"] == variable["difference_ms"]["n"] == 3
    assert slow["wall_ms"]["median"] > 200  # which it sleeps, and a busy machine only makes more of
    assert len(lines) == 3
    assert "beside: base" in lines[1]


def test_a_failing_import_is_said(tmp_path: Path) -> None:
    with pytest.raises(BenchmarkError, match="absent: ModuleNotFoundError: No module named 'no_such_module'"):
        measure_imports([Variant("absent", "import no_such_module")], 1, tmp_path / "imports.json")


def test_every_baseline_exists() -> None:
    names = {variant.name for variant in VARIANTS}
    assert {variant.baseline for variant in VARIANTS if variant.baseline} <= names
