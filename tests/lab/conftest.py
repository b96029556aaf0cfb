"""Makes `benchmarks` and `tools` importable: neither is installed, and the repository's root must not be on sys.path for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.conftest import cores, load_package
from tests.support.emulator import allocator, emulator, emulator_library, recorder
from tests.support.native import compiled_helper, helper_of_all, loaded_helper

__all__ = [
    "allocator",
    "compiled_helper",
    "cores",
    "emulator",
    "emulator_library",
    "helper_of_all",
    "loaded_helper",
    "recorder",
]  # fixtures

load_package("tools")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests of the lab to `make test-all`: nobody who uses PyGraph needs it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
