"""Makes `benchmarks` and `tools` importable: neither is installed, and the repository's root must not be on sys.path for them."""

from __future__ import annotations

from tests.benchmarks.conftest import cores, load_package

__all__ = ["cores"]

load_package("tools")
