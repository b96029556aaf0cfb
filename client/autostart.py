"""Starting the daemon from a process that needs it: without waiting for it, and without it hanging on to anything.

The child is `pygraphd start --foreground`; if several processes do this at once, the daemon's lock leaves one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from pygraphd.client import options
from pygraphd.client.transport import Transport, TransportError
from pygraphd.schema.locations import environ_elsewhere

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "PYGRAPHD_AUTOSTART"
# Where jobs run in a shared or passing machine, a process that outlives the job is a nuisance, or is killed with it.
_MANAGED = ("CI", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")
_OFF = frozenset({"", "0", "off", "false", "no"})


def why_not(environ: Mapping[str, str]) -> str | None:
    """Return why the hook does not start a daemon by itself, or None if it does."""
    if options.read(environ).readonly:  # a daemon makes a database, and takes in the spool
        return f"{options.READONLY}={environ[options.READONLY]}"
    if VARIABLE in environ:
        return f"{VARIABLE}={environ[VARIABLE]}" if environ[VARIABLE].lower() in _OFF else None
    return next((f"{name} is set" for name in _MANAGED if environ.get(name)), None)


def ensure(transport: Transport, environ: Mapping[str, str] | None = None) -> str | None:
    """Start the daemon if none listens and nothing forbids it; return why not, or None. Raises OSError."""
    environ = os.environ if environ is None else environ
    try:
        transport.request("GET", "/v1/ping")
    except TransportError as error:
        if not error.absent:
            return f"not started: {error}"
    else:
        return None
    if reason := why_not(environ):
        return f"not started: {reason}"
    _spawn({name: value for name, value in environ_elsewhere(environ).items() if name != "PYGRAPH"})
    return None


def _spawn(environ: dict[str, str]) -> None:
    # Through a shell that ends at once: the daemon is then nobody's child, and a user's os.wait() never meets it.
    command = '"$0" -m pygraphd start --foreground </dev/null >/dev/null 2>&1 &'
    subprocess.run(
        ["/bin/sh", "-c", command, sys.executable],
        cwd="/",
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        check=False,
        timeout=5,
    )
