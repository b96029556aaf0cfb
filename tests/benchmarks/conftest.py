"""Makes `benchmarks` importable, which is not installed, and has each test begin on all cores."""

from __future__ import annotations

from tests.support.cores import cores
from tests.support.repository import load_package
from tests.support.warm_benchmarks import in_forks

__all__ = ["cores", "in_forks"]  # fixtures

load_package("benchmarks")
