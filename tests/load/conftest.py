"""Makes `benchmarks` and `tools` importable, neither of which is installed."""

from __future__ import annotations

from tests.support.repository import load_package

load_package("benchmarks")
load_package("tools")
