"""The daemons of a test's home, found by the environment that they were started with, and their end."""

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
    own = f"={home}\0".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_daemon = b"\0start\0" in (folder / "cmdline").read_bytes()
            if is_daemon and own in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def end_daemons_of(home: Path) -> None:
    """Kill all daemons of a home, in whatever state they are, and return when they are gone."""
    while found := daemons_of(home):  # one that is being started may be seen only now
        for pid in found:
            kill(pid)


def kill(pid: int) -> None:
    """Kill a process and return when it has ended, though nobody may have waited for it."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        ended, _, _ = select.select([process], [], [], HANGS_S)
        assert ended, f"process {pid} was killed and is still there"
    finally:
        os.close(process)
