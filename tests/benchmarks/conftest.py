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

ROOT = Path(__file__).resolve().parents[2]


def load_package(name: str) -> None:
    if name in sys.modules:
        return
    folder = ROOT / name
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


load_package("benchmarks")


@pytest.fixture(autouse=True)
def cores() -> Iterator[None]:
    """Have each test begin on all cores, whichever the one before has chosen."""
    mine = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, mine)
