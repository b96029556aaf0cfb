"""Runs commands of `pygraphd` to their end in forks of a process that has imported it: imports are most of a command's time.

Each is a process of its own, with its variables, streams, exit code and end. Where starting Python is part of a test, or
what Python reads then, the test runs the command line instead.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.repository import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@functools.cache
def _server() -> socket.socket:
    """Return the connection to the server of this process, which ends when the connection does, whatever has ended us."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_commands_server", str(theirs.fileno())],
            cwd=ROOT,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # an interrupt of the tests is none of a command's
        )
    atexit.register(ours.close)
    process.returncode = 0  # nobody here will ever wait for it
    return ours


def run(
    words: Sequence[str], environ: Mapping[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Run `pygraphd WORD...` to its end, and return its exit code and what it wrote."""
    request = json.dumps(
        [["pygraphd", *words], dict(environ), str(Path.cwd()), list(os.sched_getaffinity(0))]
    ).encode()
    with (
        Path(os.devnull).open("rb") as nothing,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                socket.send_fds(_server(), [b"x"], [theirs.fileno()])
            ours.settimeout(timeout_s)
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            socket.send_fds(ours, [len(request).to_bytes(4, "big")], streams)
            ours.sendall(request)
            with ours.makefile("r") as answers:  # whoever hangs is killed when this connection is closed
                said = answers.readline()
        assert said, "the process that forks has ended"
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(["pygraphd", *words], int(said), out.read(), err.read())
