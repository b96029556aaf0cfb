"""Runs a test's programs in forks of a process that has imported what they import, which takes most of the time of a new one.

Each is a process of its own, with its variables, folder, cores, streams, exit code and end. Where starting Python is part of
a test, or what Python reads then, the test starts Python itself.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_SERVER = Path(__file__).with_name("warm_server.py")
_TORCH = Path(__file__).with_name("warm_torch.py")
_COMMANDS = Path(__file__).with_name("warm_commands.py")
# Read while Python starts, and while PyTorch and the libraries below it are imported.
_READ_BEFORE = ("PYTHON", "TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "OPENBLAS_", "LD_", "TRITON")
_READ_LATER = frozenset(
    {"PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_VEC_ISA_OK", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
)
_BEGIN_S = 300.0
"""How long the server may import until it takes a program: it only ends a test that hangs."""


def _read_before(environ: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name.startswith(_READ_BEFORE) and name not in _READ_LATER
    }


class Fork:
    """A program that runs in a fork, the first of its process group; its members do what those of `subprocess.Popen` do."""

    def __init__(self, pid: int, reap: Callable[[int], int]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reap = reap
        self._process = os.pidfd_open(pid)
        self._end = select.poll()  # a test may have opened more files than `select.select` knows
        self._end.register(self._process, select.POLLIN)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit code once it has ended; raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not self._end.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            os.close(self._process)
            self.returncode = self._reap(self.pid)
        return self.returncode


class WarmPython:
    """One process that has imported what a file beside this one imports, and its forks."""

    def __init__(self, imports: Path = _TORCH) -> None:
        self._imports = imports
        self._lock = threading.Lock()
        self._server = contextlib.ExitStack()

    @property
    def can_fork(self) -> bool:
        """Whether a fork is as good as a new process: CUDA may have been asked for devices while PyTorch was imported, and is of no use then."""
        return self._imports != _TORCH or not Path("/dev/nvidiactl").exists()

    def run(
        self,
        arguments: Sequence[str | Path],
        environ: Mapping[str, str],
        folder: Path,
        timeout_s: float,
        stderr: int = subprocess.PIPE,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENT...`, which starts with `-c`, `-m` or a script's path, to its end, as `subprocess.run` does.

        In a new process on a machine with GPUs, and with other variables that are read before a program begins.
        """
        words = [str(argument) for argument in arguments]
        if not self.can_fork or _read_before(environ) != _read_before(os.environ):
            return subprocess.run(
                [sys.executable, *words],
                env=dict(environ),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            errors = err.fileno() if stderr == subprocess.PIPE else stderr
            process = self.start(words, environ, folder, out.fileno(), errors)
            try:
                code = process.wait(timeout_s)
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess([sys.executable, *words], code, out.read(), err.read())

    def start(
        self, arguments: Sequence[str], environ: Mapping[str, str], folder: Path, stdout: int, stderr: int
    ) -> Fork:
        """Start `python ARGUMENT...` in a fork, without standard input; variables that are read before a program begins go unheard."""
        request = [list(arguments), dict(environ), str(folder), list(os.sched_getaffinity(0))]
        return Fork(self._ask(request, [stdout, stderr]), self._ask)

    def _ask(self, request: Sequence[object] | int, streams: Sequence[int] = ()) -> int:
        """Return the pid of the program to be run, or the exit code of the one that has this pid."""
        with self._lock:
            socket.send_fds(self._connection, [json.dumps(request).encode()], streams)
            answer = self._connection.recv(32)
        assert answer, "the process that forks has ended"
        return int(answer)

    @functools.cached_property
    def _connection(self) -> socket.socket:
        """Start the server; it ends when this connection does, whatever has ended us."""
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        ours.settimeout(_BEGIN_S)
        with theirs:
            server = subprocess.Popen(
                [sys.executable, _SERVER, str(theirs.fileno()), self._imports],
                env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt of the tests is none of a program's
            )
        self._server.enter_context(server)
        return self._server.enter_context(ours)

    def close(self) -> None:
        """End the server, and the programs that still run."""
        self._server.close()


@functools.cache
def commands() -> WarmPython:
    """Return what runs commands of `pygraphd`, without PyTorch, until this process ends."""
    started = WarmPython(_COMMANDS)
    atexit.register(started.close)
    return started
