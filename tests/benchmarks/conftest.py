"""Makes `benchmarks` importable: it is not installed, and the repository's root must not be on sys.path for it.

(The folder `alembic` there would hide the library of that name.)
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(__file__).resolve().parents[2] / "benchmarks"


def _load_package() -> None:
    spec = importlib.util.spec_from_file_location(
        "benchmarks", PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)]
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = module
    spec.loader.exec_module(module)


if "benchmarks" not in sys.modules:
    _load_package()


@pytest.fixture(autouse=True)
def cores() -> Iterator[None]:
    """Have each test begin on all cores, whichever the one before has chosen."""
    mine = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, mine)
