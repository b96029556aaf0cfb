"""Programs in processes of their own, one for each rank: what they are started with, and what each sums up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def environ(folder: Path, **more: str) -> dict[str, str]:
    """Return this process's environment, with a home and compiled code in a folder, and more."""
    return {
        **os.environ,
        "PYGRAPHD_HOME": str(folder / "home"),
        "PYGRAPHD_AUTOSTART": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        **more,
    }


def ours(folder: Path, rank: int = 0) -> dict[str, str]:
    """Return what has a rank run with PyGraph, and sum that up in a folder."""
    return {"PYGRAPH": "1", "PYGRAPH_SUMMARY": str(folder / f"summary.{rank}")}


def summary(folder: Path, rank: int = 0) -> dict[str, Any]:
    """Return what a rank has summed up."""
    read: dict[str, Any] = json.loads((folder / f"summary.{rank}").read_text())
    print(json.dumps(read, indent=1))  # noqa: T201 - what was deployed, for whoever runs this
    return read


def started(program: Path, folder: Path, world: int, more: Callable[[int], dict[str, str]]) -> None:
    """Run a program on `world` GPUs, a process each, which must come to an end."""
    folder.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(world), str(folder)],
            env=environ(folder, **more(rank)),
        )
        for rank in range(world)
    ]
    try:
        assert [process.wait(110) for process in processes] == [0] * world
    finally:
        for process in processes:
            process.kill()  # what waits for a rank that has failed
