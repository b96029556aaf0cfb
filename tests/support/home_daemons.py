"""The daemons and other processes of a test's home, found by the environment that they were started with, and their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

HANGS_S = 60.0
"""How long a killed process may take to be gone: it only ends a test that hangs."""


def daemons_of(home: Path) -> list[int]:
    """Return the pids of all daemons of a home, also of those that do not listen, and of those that a program has started by itself."""
    return processes_of(home, b"\0start\0")


def processes_of(home: Path, word: bytes = b"") -> list[int]:
    """Return the pids of all processes that were started with a home in their environment, and with a word in their command line."""
    own = f"={home}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if word in (folder / "cmdline").read_bytes() and own in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def end_daemons_of(home: Path) -> None:
    """Kill all daemons of a home, in whatever state they are, and return when they are gone."""
    while found := daemons_of(home):  # one that is being started may be seen only now
        for pid in found:
            kill(pid)


def kill(pid: int) -> None:
    """Kill a process and return when it has ended, though nobody may have waited for it."""
    wait_for_end(pid, signal.SIGKILL)


def wait_for_end(pid: int, sent: signal.Signals | None = None) -> None:
    """Return when a process has ended, which may have been sent a signal for that."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if sent is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, sent)
        ended, _, _ = select.select([process], [], [], HANGS_S)
        assert ended, f"process {pid} should have ended and is still there"
    finally:
        os.close(process)
