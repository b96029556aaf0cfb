"""Makes `benchmarks` and `tools` importable, neither of which is installed, and has what the lab's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.cores import cores
from tests.support.emulator import allocator, emulator, emulator_library, recorder
from tests.support.native import compiled_helper, helper_of_all, loaded_helper
from tests.support.repository import load_package
from tests.support.warm_benchmarks import in_forks

__all__ = [
    "allocator",
    "compiled_helper",
    "cores",
    "emulator",
    "emulator_library",
    "helper_of_all",
    "in_forks",
    "loaded_helper",
    "recorder",
]  # fixtures

load_package("benchmarks")
load_package("tools")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests of the lab to `make test-all`: nobody who uses PyGraph needs it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
