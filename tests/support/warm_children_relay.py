"""`python -IS warm_children_relay.py SOCKET MODULE_OR_SCRIPT ARGUMENT...`: stands for the process that runs it in a fork.

It has that process's log, variables, folder, cores and exit code, and that process does not outlive it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def connected(place: str, wanted: Callable[[], bool]) -> socket.socket | None:
    """Return a connection to the server once it listens; None if it is not `wanted` any more."""
    while wanted():
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(place)
        except (FileNotFoundError, ConnectionRefusedError):  # it imports PyTorch
            connection.close()
            time.sleep(0.05)
        else:
            return connection
    return None


def main(place: str, *arguments: str) -> int:
    """Have a fork run a module or a script, and return its exit code."""
    connection = connected(place, lambda: True)
    assert connection is not None
    cores = list(os.sched_getaffinity(0))
    request = json.dumps([arguments, dict(os.environ), str(Path.cwd()), cores]).encode()
    socket.send_fds(connection, [len(request).to_bytes(4, "big")], [0, 1, 2])
    connection.sendall(request)
    with connection, connection.makefile("r") as answers:
        code = int(answers.readline() or 70)  # no answer: whoever was to wait for it has been killed
    return code if code >= 0 else 128 - code  # as shells tell an end by a signal


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
