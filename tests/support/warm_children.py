"""Starts the processes that a benchmark measures in forks of a process that has imported PyTorch: imports are most of their time.

The benchmark sees a process as ever, with a log, an exit code and an end by a signal. Other processes, such as those of daemons, are
started as they are. Where Python and its imports are part of a test, that test runs the command line instead.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from benchmarks import processes
from tests.support.repository import ROOT
from tests.support.warm_children_relay import connected

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator, Mapping

    from tests.support.warm_python import WarmPython

_SERVER = Path(__file__).with_name("warm_children_server.py")
_RELAY = Path(__file__).with_name("warm_children_relay.py")
_MODULES = ("benchmarks.child", "tools.lab.shared_machine")
_LONGEST_S = 800.0
"""How long a test may use forks: it only ends one that hangs."""


@pytest.fixture
def in_forks(warm_python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have benchmarks of this process start in forks what they measure: known modules, and scripts.

    The process that forks is itself a program of `warm_python`, which runs one program at a time.
    """
    begin = processes.start
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        place = str(Path(folder) / "socket")

        def start(
            command: list[str], environ: Mapping[str, str], of: Path, log: IO[str]
        ) -> subprocess.Popen[bytes]:
            python, *arguments = command
            if arguments[:1] == ["-m"]:
                arguments = arguments[1:] if arguments[1] in _MODULES else []
            elif not arguments[0].endswith(".py"):
                arguments = []
            if not arguments:
                return begin(command, environ, of, log)
            return begin([python, "-IS", str(_RELAY), place, *arguments], environ, of, log)

        def serve() -> None:
            done = warm_python.run([_SERVER, place], os.environ, ROOT, _LONGEST_S)
            assert done.returncode == 0, done.stderr

        server = threading.Thread(target=serve)
        server.start()
        monkeypatch.setattr(processes, "start", start)
        try:
            yield
        finally:
            connection = connected(place, server.is_alive)
            if connection is not None:
                connection.shutdown(socket.SHUT_WR)  # an empty request: nothing more will come
                connection.close()
            server.join()
