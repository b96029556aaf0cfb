"""Makes `benchmarks` and `tools` importable: neither is installed, and the repository's root must not be on sys.path for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.conftest import cores, load_package

__all__ = ["cores"]

load_package("tools")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests of the lab to `make test-all`: nobody who uses PyGraph needs it."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
