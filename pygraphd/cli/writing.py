"""Write access for a command: through the daemon, or, if there is none, in this process under the daemon's lock."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import TYPE_CHECKING, Protocol

from pygraphd import folders
from pygraphd.cli.output import complain
from pygraphd.daemon import control, database, spool
from pygraphd.daemon.lock import Activity, acquire, hung_text, not_locked_text
from pygraphd.daemon.store import Store, StoreError
from pygraphd.errors import CommandError, DatabaseError
from pygraphd.schema.messages import API_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pygraphd.daemon.exchange import ImportAnswer
    from pygraphd.daemon.lock import DaemonLock
    from pygraphd.daemon.pruning import PruneAnswer, PruneRequest
    from pygraphd.daemon.rederiving import RederiveAnswer, RederiveRequest
    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import Ping
    from pygraphd.schema.portable import ImportRequest

LOCK_WAIT_S = 10.0
"""Seconds to wait for the lock: its holder may be a daemon that is about to answer, or a command that is about to end."""
_POLL_S = 0.05


class Writer(Protocol):
    """Changes the cache; each method raises CommandError or StoreError."""

    def prune(self, request: PruneRequest) -> PruneAnswer:
        """Delete entries."""

    def rederive(self, request: RederiveRequest) -> RederiveAnswer:
        """Derive decisions anew."""

    def add_imported(self, request: ImportRequest) -> ImportAnswer:
        """Store imported entries."""

    def zero_statistics(self) -> None:
        """Begin the statistics anew."""


@contextlib.contextmanager
def writing(locations: Locations) -> Iterator[Writer]:
    """Yield a writer; raises CommandError. Says on standard error if a database is set aside for it."""
    with contextlib.ExitStack() as stack:
        found = _daemon_or_lock(locations)
        try:
            if isinstance(found, _Daemon):
                yield found
            else:
                # Before the store: whoever holds the lock is the one writer.
                stack.enter_context(found)
                stack.enter_context(_saying_what_is_set_aside())
                yield _Here(stack.enter_context(Store(locations.database)), locations.spool)
        except StoreError as error:
            raise DatabaseError(str(error)) from error


@contextlib.contextmanager
def _saying_what_is_set_aside() -> Iterator[None]:
    """Have the block say on standard error which database it sets aside, and why, as a daemon has it in its log."""
    log, handler = logging.getLogger(database.__name__), _Said(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Said(logging.Handler):
    """Prints each line of a log to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"pygraphd: {record.getMessage()}")


class _Daemon:
    def __init__(self, locations: Locations, running: Ping) -> None:
        self._socket = locations.socket
        self._running = running

    def prune(self, request: PruneRequest) -> PruneAnswer:
        return control.prune(self._socket, request)

    def rederive(self, request: RederiveRequest) -> RederiveAnswer:
        self._check("derive decisions anew")
        return control.rederive(self._socket, request)

    def add_imported(self, request: ImportRequest) -> ImportAnswer:
        self._check("import")
        return control.add_imported(self._socket, request)

    def zero_statistics(self) -> None:
        control.zero_statistics(self._socket)

    def _check(self, what: str) -> None:
        # Only of what is not under /v1, which daemons of all versions answer alike.
        if self._running.api != API_VERSION:
            raise CommandError(
                f"the daemon is version {self._running.version}, which cannot {what} for this one; run: pygraphd restart"
            )


class _Here:
    def __init__(self, store: Store, spool_folder: Path) -> None:
        self._store = store
        self._spool = spool_folder
        self.rederive = store.rederive
        self.zero_statistics = store.zero_statistics

    def prune(self, request: PruneRequest) -> PruneAnswer:
        if request.everything:
            # Else the next daemon would take them in, and bring the entries back.
            for name in spool.records(self._spool):
                spool.ingest_file(self._spool / name, self._store.record)
        return self._store.prune(request)

    def add_imported(self, request: ImportRequest) -> ImportAnswer:
        # A daemon takes the uid from its socket. Here the importing user is that of this process.
        return self._store.add_imported(request, os.geteuid())


def running_daemon(locations: Locations) -> Writer | None:
    """Return a writer through the daemon, None if none answers."""
    running = control.ping(locations.socket)
    return None if running is None else _Daemon(locations, running)


def _daemon_or_lock(locations: Locations) -> _Daemon | DaemonLock:
    """Return the daemon once it answers, or the lock if nobody holds it; raises CommandError if neither happens in `LOCK_WAIT_S`."""
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        if (running := control.ping(locations.socket)) is not None:
            return _Daemon(locations, running)
        if (held := _acquire(locations)) is not None:
            return held
        if time.monotonic() >= deadline:
            raise CommandError(hung_text(locations))
        time.sleep(_POLL_S)


def _acquire(locations: Locations) -> DaemonLock | None:
    # SQLite makes its files by the umask, and nobody else is to read them.
    os.umask(0o077)
    # The store's log is the daemon's; a command says by itself what it could not do.
    logging.getLogger("pygraphd").addHandler(logging.NullHandler())
    folders.check_readable(locations)
    folders.prepare_runtime(locations)
    try:
        return acquire(locations, activity=Activity.COMMAND)
    except OSError as error:
        raise CommandError(not_locked_text(locations, error)) from error
