"""Starts the daemon from a process that needs it, without waiting for it or keeping it as a child.

The command is `pygraphd start --foreground`. If several processes start one at once, the daemon's lock leaves one.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.schema.locations import environ_elsewhere
from pygraphd.schema.ownership import open_regular

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

AUTOSTART = "PYGRAPHD_AUTOSTART"
# Where jobs run in a shared or passing machine, a process that outlives the job is a nuisance, or is killed with it.
_MANAGED = ("CI", "SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST")
_OFF = frozenset({"", "0", "off", "false", "no"})
_PR_GET_CHILD_SUBREAPER = 37
STARTING_S = 10.0
"""Seconds that a daemon may take to answer after its start; later it counts as missing."""


class Starting:
    """Tells whether a daemon that does not answer is starting: this process has started it, or a process holds its lock."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._held_since: float | None = None

    def begun(self) -> None:
        """Note that this process has started a daemon."""
        self._began = time.monotonic()

    def is_under_way(self, lock: Path) -> bool:
        """Return whether a daemon is about to answer; called when none does. Raises nothing."""
        now = time.monotonic()
        if self._began is not None and now - self._began < STARTING_S:
            return True
        if not _is_held(lock):
            self._held_since = None
            return False
        self._held_since = now if self._held_since is None else self._held_since
        return now - self._held_since < STARTING_S


starting = Starting()


def _is_held(lock: Path) -> bool:
    try:
        descriptor = open_regular(lock)
    except OSError:
        return False
    try:
        # A shared lock, given back at once, keeps no other process from checking; a daemon that wants the lock tries again.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def why_not(environ: Mapping[str, str]) -> str | None:
    """Return why the client does not start a daemon by itself, or None if it does."""
    if AUTOSTART in environ:
        return f"{AUTOSTART}={environ[AUTOSTART]}" if environ[AUTOSTART].lower() in _OFF else None
    if _adopts():
        return "it would become a child of this process"
    if getattr(sys, "frozen", False):
        return "this program has a Python of its own, which runs no modules"
    return next((f"{name} is set" for name in _MANAGED if environ.get(name)), None)


def _adopts() -> bool:
    """Return whether this process becomes the parent of processes whose parent has ended, as the first process of a container does."""
    adopts = ctypes.c_int(0)
    try:
        ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts), 0, 0, 0)
    except (OSError, AttributeError):
        adopts.value = 0
    return os.getpid() == 1 or bool(adopts.value)


def ensure(
    transport: Transport, environ: Mapping[str, str] | None = None, *, forbidden: str | None = None
) -> str | None:
    """Start the daemon if none listens and nothing forbids it; return why it was not started, or None. Raises nothing.

    `forbidden`: a reason not to start it, whatever the environment says.
    """
    environ = os.environ if environ is None else environ
    try:
        transport.request("GET", "/v1/ping")
    except TransportError as error:
        # Somebody listens and gives no usable answer: a second daemon would not get the lock.
        if not error.absent:
            return f"not started: {error}"
    else:
        return None
    if reason := forbidden or why_not(environ):
        return f"not started: {reason}"
    if not sys.executable:
        return "not started: this Python does not know its own path"
    try:
        _spawn({name: value for name, value in environ_elsewhere(environ).items() if name != "PYGRAPH"})
    except Exception as error:  # noqa: BLE001 - no processes left, no descriptors, no shell
        return f"not started: {type(error).__name__}: {error}"
    starting.begun()
    return None


def _spawn(environ: dict[str, str]) -> None:
    # Through a shell that ends at once: the daemon is then no child of this process, and a user's os.wait() never meets it.
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
