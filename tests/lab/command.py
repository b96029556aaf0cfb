from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks.test_cli import benchmarks

if TYPE_CHECKING:
    import subprocess


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    return benchmarks(*arguments, package="tools.lab")
