"""Has benchmarks start in forks the processes that they measure, but where a test is about Python's start or its imports."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

import pytest

from benchmarks import processes

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping
    from pathlib import Path

    from tests.support.warm_python import Fork, WarmPython

_MODULES = ("benchmarks.child", "tools.lab.shared_machine")


@pytest.fixture
def in_forks(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have benchmarks of this process start in forks known modules, and scripts; others, such as daemons, start as they are."""
    begin = processes.start

    def start(
        command: list[str], environ: Mapping[str, str], folder: Path, log: IO[str]
    ) -> subprocess.Popen[bytes] | Fork:
        arguments = command[1:]
        is_known = arguments[1] in _MODULES if arguments[0] == "-m" else arguments[0].endswith(".py")
        if not is_known or not warm_python.can_fork:
            return begin(command, environ, folder, log)
        return warm_python.start(arguments, environ, folder, log.fileno(), log.fileno())

    monkeypatch.setattr(processes, "start", start)
