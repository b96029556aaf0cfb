"""Imports what commands of `pygraphd` import, and PyTorch is not among that; `warm_server.py` runs this, and forks."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys

_PATIENCE_S = 200.0


def _import_all(name: str) -> None:
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(package.__path__, f"{name}."):
        importlib.import_module(module.name)


if __name__ == "__main__":
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
