"""`python -m tests.support.warm_commands_server DESCRIPTOR`: runs commands in forks; `warm_commands.py` starts it and talks to it.

A fork that runs a command finds imported what commands import. PyTorch is not among that.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import runpy
import socket
import sys

from tests.support import warm_children_server

_PATIENCE_S = 200.0


class _Handed:
    """Stands for a listening socket: gives the connections that come over one other."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control

    def accept(self) -> tuple[socket.socket, None]:
        """Wait for the next; ends this process where none can come any more."""
        data, connections, _, _ = socket.recv_fds(self._control, 1, 1)
        if not data:
            os._exit(0)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        return socket.socket(fileno=connections[0]), None

    def close(self) -> None:
        """Close the one that they come over."""
        self._control.close()


def _import_all(name: str) -> None:
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__, f"{name}."):
        importlib.import_module(module.name)


if __name__ == "__main__":
    del sys.path[0]  # the root, whose folder `alembic` is not the library
    for _name in ("pygraphd.cli", "pygraphd.daemon", "pygraphd.daemon.team"):
        with contextlib.suppress(ImportError):  # without psycopg: it is for a team
            _import_all(_name)
    # Of some versions: typer imports it at the first option of a command.
    with contextlib.suppress(ImportError):
        importlib.import_module("typer._adapters")
    # A daemon is waited for as long as its start takes on a busy machine; `Home.pygraphd_soon` is for tests of the limit.
    vars(importlib.import_module("pygraphd.cli.lifecycle"))["START_S"] = _PATIENCE_S
    if "torch" in sys.modules:
        sys.exit("PyTorch has been imported: commands would do with it what they do without")
    gc.collect()
    gc.freeze()  # or the first collection in a fork copies all that it shares
    (_named, *sys.argv[1:]), _connection = warm_children_server.serve(
        _Handed(socket.socket(fileno=int(sys.argv[1])))
    )
    _connection.close()
    sys.path.insert(0, "")
    runpy.run_module(_named, run_name="__main__", alter_sys=True)
