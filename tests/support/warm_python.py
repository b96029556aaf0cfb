"""Runs a test's programs as `subprocess.run` does, without importing PyTorch anew for each where that is no part of the test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.patience import patient as with_patience

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SERVER = Path(__file__).with_name("warm_server.py")
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


class WarmPython:
    """One process that has imported PyTorch, and its forks. Programs run one after the other."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None

    def run(
        self,
        arguments: Sequence[str | Path],
        environ: Mapping[str, str],
        folder: Path,
        timeout_s: float,
        stderr: int = subprocess.PIPE,
        *,
        patient: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGUMENT...`, which starts with `-c` or a script's path, to its end.

        `patient`: its client waits long for a daemon; see `patience.py`.

        On a machine with GPUs, and with variables that are read before a program begins, in a new process: CUDA may
        have been asked for devices while PyTorch was imported, and is then of no use in a fork.
        """
        words = [str(argument) for argument in arguments]
        if Path("/dev/nvidiactl").exists() or _read_before(environ) != _read_before(os.environ):
            return subprocess.run(
                [sys.executable, *words],
                env=with_patience(environ) if patient else dict(environ),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        request = json.dumps(
            {"arguments": words, "environ": dict(environ), "folder": str(folder), "patient": patient}
        )
        with (
            Path(os.devnull).open("rb") as nothing,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            streams = [nothing.fileno(), out.fileno(), err.fileno() if stderr == subprocess.PIPE else stderr]
            if stderr == subprocess.DEVNULL:
                streams[2] = nothing.fileno()
            code = self._run_fork(request.encode(), streams, timeout_s)
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess([sys.executable, *words], code, out.read(), err.read())

    def _run_fork(self, request: bytes, streams: list[int], timeout_s: float) -> int:
        connection = self._connected()
        connection.settimeout(_BEGIN_S)
        socket.send_fds(connection, [len(request).to_bytes(4, "big")], streams)
        connection.sendall(request)
        with connection.makefile("r") as answers:
            process = int(answers.readline())
            connection.settimeout(timeout_s)
            try:
                return int(answers.readline())
            except TimeoutError:
                os.kill(process, signal.SIGKILL)
                self.close()
                raise subprocess.TimeoutExpired(request.decode(), timeout_s) from None

    def _connected(self) -> socket.socket:
        if self._connection is None:
            self._connection, theirs = socket.socketpair()
            with theirs:
                self._server = subprocess.Popen(
                    [sys.executable, _SERVER, str(theirs.fileno())],
                    env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
        return self._connection

    def close(self) -> None:
        """End the server."""
        if self._connection is not None and self._server is not None:
            self._connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._server.wait(10)
            self._server.kill()
            self._server.wait()
        self._connection = self._server = None
