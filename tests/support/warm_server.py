"""`python warm_server.py DESCRIPTOR FILE`: runs FILE, which imports, and then programs in forks; `WarmPython` starts it and talks to it.

A fork that runs a program looks to it like a new process.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import runpy
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

_LONGEST = 1 << 20
"""Bytes of a request: more than a socket takes at once."""


def _serve(connection: socket.socket) -> tuple[Any, list[int]]:
    """Fork for each program that is asked for, and wait for each that has ended; returns in the fork, with the request and its streams."""
    running: set[int] = set()
    while True:
        data, streams, _, _ = socket.recv_fds(connection, _LONGEST, 2)
        if not data:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
            os._exit(0)
        request = json.loads(data)
        if isinstance(request, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(request, 0)[1])
            running.remove(request)
        else:
            answer = os.fork()
            os.setpgid(answer, answer)  # on both sides: whichever comes first finds a group that can be ended
            if answer == 0:
                return request, streams
            running.add(answer)
        for stream in streams:
            os.close(stream)
        connection.send(b"%d" % answer)


def _become(streams: list[int], environ: dict[str, str], folder: str, cores: list[int]) -> None:
    """Be the new process, before its program."""
    for number, stream in enumerate(streams, start=1):
        os.dup2(stream, number)
        os.close(stream)
    before = os.environ.get("PYTHONPATH", "")
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    os.sched_setaffinity(0, cores)
    _search(before, environ.get("PYTHONPATH", ""))


def _search(before: str, now: str) -> None:
    """Have the folders of one PYTHONPATH stand where those of another do, and run the `sitecustomize` that is found then."""
    mine, theirs = ([each for each in path.split(os.pathsep) if each] for path in (before, now))
    if mine != theirs:
        sys.path[:] = theirs + [each for each in sys.path if each not in mine]
        sys.modules.pop("sitecustomize", None)
        if importlib.util.find_spec("sitecustomize"):
            importlib.import_module("sitecustomize")


def _run(first: str, *rest: str) -> None:
    """Run a program as `python FIRST REST...` does."""
    if first == "-m":
        sys.argv, sys.path[:0] = list(rest), [str(Path.cwd())]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if first == "-c":
        name, folder, (text, *rest_of_it) = "<string>", "", rest
    else:
        name, folder, text, rest_of_it = first, str(Path(first).parent), Path(first).read_text(), list(rest)
        main.__file__ = first
    sys.argv, sys.path[:0] = [first, *rest_of_it], [folder]
    exec(compile(text, name, "exec", dont_inherit=True), main.__dict__)


if __name__ == "__main__":
    del sys.path[0]  # this file's folder is none of a program's
    runpy.run_path(sys.argv[2], run_name="__main__")
    gc.collect()
    gc.freeze()  # or the first collection in a fork copies all that it shares
    with socket.socket(fileno=int(sys.argv[1])) as _connection:
        (_arguments, *_rest), _streams = _serve(_connection)
    _become(_streams, *_rest)
    _run(*_arguments)
