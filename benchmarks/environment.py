"""Where a result was measured: the part of it that the parent process can read without torch."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable

TORCH_FIELDS = ("gpu", "torch", "triton", "cuda")
"""Fields that only a process with torch knows; null if no process answered."""


def describe_host() -> dict[str, str | None]:
    """Return the rest of a result's `environment`."""
    return {
        "driver": _driver(),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "commit": commit(ROOT),
    }


def commit(folder: Path) -> str:
    """Return BENCHMARK_COMMIT if set, or else the checked-out commit, with "-dirty" if files differ; "unknown" without git."""
    # A copy on another machine may have no git history, or an older one.
    if stated := os.environ.get("BENCHMARK_COMMIT"):
        return stated
    revision = _output(["git", "-C", str(folder), "rev-parse", "HEAD"])
    if not revision:
        return "unknown"
    changed = _output(["git", "-C", str(folder), "status", "--porcelain"])
    return f"{revision}-dirty" if changed else revision


def installed(distributions: Iterable[str]) -> dict[str, str]:
    """Return the versions of those distributions that are installed here."""
    found = {}
    for name in distributions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def gpu_name() -> str | None:
    """Return the first GPU's name; None without one."""
    names = _output(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"])
    return names.splitlines()[0] if names else None


def _driver() -> str | None:
    versions = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return versions.splitlines()[0] if versions else None


def _cpu() -> str:
    # On a shared host a process may be confined to some of the cores.
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count()
    return (
        f"{_cpu_model()}, {usable} cores" if usable == there else f"{_cpu_model()}, {usable} of {there} cores"
    )


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    # On 64-bit ARM, Linux gives no such line.
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
