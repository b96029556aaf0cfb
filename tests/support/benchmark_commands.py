"""The commands of `benchmarks` and `tools.lab`, run in processes of their own as a user starts them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from benchmarks import cli
from tests.support.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SMALL = ("--device", "cpu", "--warm-up", "3", "--steps", "7", "--windows", "2", "--window-steps", "3")
"""What has `run` measure a few steps on the CPU."""


def benchmarks(*arguments: str, package: str = "benchmarks") -> subprocess.CompletedProcess[str]:
    """Run a command that answers at once."""
    command = [sys.executable, "-m", package, *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=60, check=False
    )


def lab(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the lab that answers at once."""
    return benchmarks(*arguments, package="tools.lab")


def run(
    out: Path, *arguments: str, package: str = "benchmarks"
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Measure a few steps on the CPU; return how the command ended, and the result that it wrote."""
    command = [sys.executable, "-m", package, "run", *SMALL, "--out", str(out), *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=280, check=False
    )
    assert out.exists(), done.stderr
    return done, json.loads(out.read_text())


def run_here(
    out: Path, *arguments: str, main: Callable[[list[str]], int] = cli.main
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Measure as `run` does, with the command in this process; with `in_forks`, PyTorch is not imported for each process."""
    command = ["run", *SMALL, "--out", str(out), *arguments]
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = main(command)
    done = subprocess.CompletedProcess(command, code, said.getvalue(), errors.getvalue())
    assert out.exists(), done.stderr
    return done, json.loads(out.read_text())
