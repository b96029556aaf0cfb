"""Become the daemon: prepare the folders, start the log, take the lock. Then `serving` serves."""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import TYPE_CHECKING

from pygraphd import folders
from pygraphd.daemon import control
from pygraphd.daemon.activation import inherited_socket
from pygraphd.daemon.lock import (
    Activity,
    DaemonLock,
    acquire,
    activity_of_holder,
    hung_text,
    not_locked_text,
)
from pygraphd.daemon.log_file import Log
from pygraphd.errors import CommandError, Exit
from pygraphd.schema import ownership

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.config import Config
    from pygraphd.schema.locations import Locations

_log = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""How long a second daemon waits for the first to answer, and how long an ending one may take."""
_POLL_S = 0.05


def run(locations: Locations, load: Callable[[], Config]) -> Exit:
    """Run as the daemon until told to stop; return at once if there is one already. Raises CommandError.

    `load` reads the settings: now, and at each SIGHUP.
    """
    config = load()
    # Until it is ready to read them: by default the signal would end it.
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    inherited = inherited_socket(os.environ, locations.socket)
    os.umask(0o077)
    folders.prepare_runtime(locations)
    cache_problem = folders.prepare_cache(locations)
    os.chdir("/")
    log = Log(locations.log, config.log.value)
    # In a terminal a person waits for a word, whatever is logged.
    held = _lock_or_find_daemon(locations, logging.WARNING if log.is_terminal else logging.INFO)
    if held is None:
        return Exit.OK
    with held:
        if inherited is None and _is_live(locations):
            return _leave_to_the_other(locations)
        if cache_problem:
            _log.error("%s", cache_problem)
        # Imported by the one that needs it: of many started at once, all others end without having read a megabyte
        # of Python each.
        from pygraphd.daemon.serving import Settings, serve

        serve(held, locations, Settings(config, load, log), inherited)
    return Exit.OK


def _lock_or_find_daemon(locations: Locations, level: int) -> DaemonLock | None:
    """Return the lock, or None once another daemon answers, which is logged at `level`; raises CommandError if its holder neither answers nor ends."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            held = acquire(locations, activity=Activity.STARTING)
        except OSError as error:
            raise CommandError(not_locked_text(locations, error)) from error
        if held is not None:
            return held
        if running := control.ping(locations.socket):
            _log.log(level, "already running (pid %d)", running.pid)
            return None
        if activity_of_holder(locations) in {Activity.STARTING, Activity.ENDING}:
            deadline = time.monotonic() + PATIENCE_S
        time.sleep(_POLL_S)
    raise CommandError(hung_text(locations))


def _is_live(locations: Locations) -> bool:
    """Return whether a process listens on our socket although we hold the lock: the lock file was deleted."""
    try:
        ownership.connect(locations.socket, timeout_s=1.0).close()
    except BlockingIOError:
        # The queue of a listener that does not accept is full.
        return True
    except OSError:
        return False
    return True


def _leave_to_the_other(locations: Locations) -> Exit:
    """Leave a live socket to its owner, which is the daemon with or without the lock. Raises CommandError if it does not answer."""
    if running := control.ping(locations.socket):
        _log.warning("pid %d serves %s without holding %s", running.pid, locations.socket, locations.lock)
        return Exit.OK
    raise CommandError(
        f"{locations.socket}: another process listens there, but does not answer; end that one first"
    )
