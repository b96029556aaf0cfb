"""Forks for each request of `warm_children_relay.py`, side by side. A program of `WarmPython`, so that PyTorch has been imported."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any, Protocol


class Listening(Protocol):
    """What connections come from."""

    def accept(self) -> tuple[socket.socket, Any]: ...

    def close(self) -> None: ...


def serve(listening: Listening) -> tuple[list[str], socket.socket]:
    """Return, in a fork, the module or script, and its arguments, that a relay asks for; ends this process at an empty request."""
    while True:
        connection, _ = listening.accept()
        data, streams, _, _ = socket.recv_fds(connection, 4, 3)
        if not data:
            os._exit(0)
        if os.fork() == 0 and (request := _of_fork(connection, int.from_bytes(data, "big"), streams)):
            listening.close()
            return request, connection
        for stream in streams:
            os.close(stream)
        connection.close()


def _of_fork(connection: socket.socket, size: int, streams: list[int]) -> list[str]:
    """Return the request in the process that is to run it; the one between waits for that, and ends it with its relay."""
    with connection.makefile("rb") as asked:
        arguments, environ, folder, cores = json.loads(asked.read(size))
    process = os.fork()
    # On both sides, so that whichever comes first finds a group that can be ended.
    os.setpgid(process, process)
    if process:
        ended = os.pidfd_open(process)
        if ended not in select.select([ended, connection.fileno()], [], [])[0]:
            os.killpg(process, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with contextlib.suppress(OSError):  # the relay has been killed
            connection.sendall(b"%d\n" % code)
        os._exit(0)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    _be_told(environ)
    return list(arguments)


def _be_told(environ: dict[str, str]) -> None:
    """Have Inductor's settings be what it would read while it is imported."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config and (threads := environ.get("TORCHINDUCTOR_COMPILE_THREADS")):
        config.compile_threads = int(threads)


if __name__ == "__main__":
    with socket.create_server(sys.argv[1], family=socket.AF_UNIX) as _listening:
        (_named, *sys.argv[1:]), _connection = serve(_listening)
    _connection.close()
    if _named.endswith(".py"):
        sys.path[0], sys.argv[0] = str(Path(_named).parent), _named
        runpy.run_path(_named, run_name="__main__")
    else:
        sys.path[0] = ""
        runpy.run_module(_named, run_name="__main__", alter_sys=True)
