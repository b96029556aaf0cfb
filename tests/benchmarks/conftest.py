"""Makes `benchmarks` importable, which is not installed, and has each test begin on all cores."""

from __future__ import annotations

from tests.support.cores import cores
from tests.support.repository import load_package

__all__ = ["cores"]  # fixtures

load_package("benchmarks")
