"""The one writer of the database. Synchronous, for one thread; the caller holds the daemon's lock.

A fault of disk or file ends a call with a StoreError, and stays in `problems()` until a write succeeds; it never ends the
store.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from typing import TYPE_CHECKING, TypeVar

import sqlalchemy as sa

from pygraphd.daemon import database, database_files, importing, queries, statistics
from pygraphd.daemon.pruning import PruneProgress
from pygraphd.daemon.rederiving import summary
from pygraphd.daemon.statistics import Counters
from pygraphd.schema.policy import POLICY_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from pygraphd.daemon.exchange import ImportAnswer
    from pygraphd.daemon.pruning import PruneAnswer, PruneRequest
    from pygraphd.daemon.rederiving import Outcome, RederiveAnswer, RederiveRequest
    from pygraphd.daemon.statistics import Stored
    from pygraphd.schema.messages import RecordRequest
    from pygraphd.schema.portable import ImportRequest

_log = logging.getLogger(__name__)

_SHRUNK_PAGES = 256
"""Pages given back in one transaction: 1 MiB."""
_READERS_MS = 100
_PACKING_KIB = 1024

_T = TypeVar("_T")


class StoreError(Exception):
    """The store cannot write now; the text has the cause and the remedy."""


class DiskFullError(StoreError):
    """No room for another page."""


class EndingError(StoreError):
    """The daemon ends; nothing is the matter with the database."""


class Store:
    """The open database. Without one that can be written, records are refused and the reason is kept."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sa.Connection | None = None
        self._identity: database_files.FileIdentity | None = None
        self._fault: str | None = None
        self._notes: list[str] = []
        self._open()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Write the log back into the database and close it."""
        if self._connection is None:
            return
        _checkpoint(self._connection)
        self._disconnect()

    @property
    def can_store(self) -> bool:
        """Whether the latest write went well; may be asked by any thread."""
        return self._fault is None

    def problems(self) -> list[str]:
        """Return the current problems as text for `pygraphd status`."""
        return ([self._fault] if self._fault else []) + self._notes

    def record(self, request: RecordRequest, uid: int, at: float | None = None) -> int:
        """Store a request's records, all or none, as measured at `at` (now, if None); return their number. Raises StoreError."""
        now = time.time() if at is None else at
        self._write(lambda connection: queries.record(connection, request, uid, now))
        self._note_fault(None)
        return len(request.records)

    def add_imported(self, request: ImportRequest, uid: int) -> ImportAnswer:
        """Store imported entries that are not known here, all or none. Raises StoreError."""
        now = time.time()
        answer = self._write(lambda connection: importing.add(connection, request.entries, uid, now))
        self._note_fault(None)
        return answer

    def add_hits(self, hits: Mapping[queries.Key, tuple[int, float]], since: float | None = None) -> Counters:
        """Add to entries' counts: (hits, time of the last) for each key. Return the seconds saved, which are in the statistics.

        `since` as for `add_statistics`. Raises StoreError.
        """
        if not hits:
            return Counters()
        began = time.time() if since is None else since

        def action(connection: sa.Connection) -> Counters:
            queries.add_hits(connection, hits)
            saved = statistics.saved(connection, {key: count for key, (count, _last) in hits.items()})
            statistics.add(connection, saved, began)
            return saved

        return self._write(action)

    def add_statistics(self, counted: Counters, since: float | None = None) -> None:
        """Add to the stored statistics; if there are none, they began at `since` (now, if None). Raises StoreError."""
        began = time.time() if since is None else since
        self._write(lambda connection: statistics.add(connection, counted, began))

    def statistics(self) -> Stored | None:
        """Return the stored statistics, None if there are none. Raises StoreError."""
        return self._write(statistics.read)

    def zero_statistics(self) -> None:
        """Begin the statistics anew. Raises StoreError."""
        now = time.time()
        self._write(lambda connection: statistics.zero(connection, now))

    def prune(self, request: PruneRequest) -> PruneAnswer:
        """Delete entries with their measurements, also on a full disk. Raises StoreError."""
        before, done = self.size(), PruneProgress()
        while not done.is_complete:
            done = self.prune_some(request, done)
        while not request.dry_run and self.shrink_some():
            pass
        return done.answer(request, before - self.size())

    def prune_some(self, request: PruneRequest, done: PruneProgress) -> PruneProgress:
        """Go on with a prune for one transaction; return its progress. Raises StoreError."""
        assert done.after is not None
        # A forecast writes nothing, so that its transactions may be larger.
        after, most = done.after, queries.SCANNED if request.dry_run else queries.CHUNK
        found = self._write(lambda connection: queries.prunable(connection, request, done.began, after, most))
        measurements = self._write(lambda connection: queries.count_measurements(connection, found.ids))
        if not request.dry_run:
            self._delete(found.ids, is_last=found.after is None)
            self._note_fault(None)
        return PruneProgress(
            done.entries + len(found.ids), done.measurements + measurements, found.after, done.began
        )

    def shrink_some(self) -> bool:
        """Give some free pages back to the file system, as far as there is room to do so; return whether there are more.

        Raises StoreError. The last call reserves the ballast again.
        """
        free = self._write(queries.free_pages)
        assert self._connection is not None
        if free:
            _vacuum(self._connection, _SHRUNK_PAGES)
            # Fewer than before: where nothing can be freed, as on a full disk, this must end.
            if 0 < self._write(queries.free_pages) < free:
                return True
        _checkpoint(self._connection)
        database_files.make_ballast(self._path)
        return False

    def pack(self) -> bool:
        """Rewrite the file without the holes that deleted rows left in its pages: seconds for 256 MB. Raises StoreError.

        Return whether that was possible; it needs as much room once more, beside the file and for temporary files.
        """
        before = self._write(queries.size)
        assert self._connection is not None
        # VACUUM gives the copy that it writes a cache as large as ours, and reads and writes each page once.
        _outside_transaction(self._connection, f"PRAGMA cache_size=-{_PACKING_KIB}")
        _outside_transaction(self._connection, "VACUUM")
        _outside_transaction(self._connection, f"PRAGMA cache_size=-{database.CACHE_KIB}")
        _checkpoint(self._connection)
        return self._write(queries.size) < before

    def size(self) -> int:
        """Return the database's size in bytes. Raises StoreError."""
        return self._write(queries.size)

    def rederive(self, request: RederiveRequest) -> RederiveAnswer:
        """Derive anew all decisions that rest on measurements. Raises StoreError; transactions before the fault stay."""
        outcomes: list[Outcome] = []
        for some in self.measured():
            outcomes += self.rederive_some(some, dry_run=request.dry_run)
        return summary(outcomes, self.count_unmeasured(), dry_run=request.dry_run)

    def measured(self) -> list[Sequence[str]]:
        """Return the ids of the entries that rest on measurements, in portions for `rederive_some`. Raises StoreError."""
        return queries.chunks(self._write(queries.measured))

    def count_unmeasured(self) -> int:
        """Return the number of entries that rest on no measurement. Raises StoreError."""
        return self._write(queries.count_unmeasured)

    def rederive_outdated(self, within_s: float) -> tuple[int, int]:
        """Derive anew the decisions of older policies, for `within_s` seconds; return how many were derived, and how many are left.

        Raises StoreError.
        """
        deadline = time.monotonic() + within_s
        ids = self._write(lambda connection: queries.measured(connection, policy_below=POLICY_VERSION))
        done = 0
        for some in queries.chunks(ids):
            if time.monotonic() >= deadline:
                break
            done += len(self.rederive_some(some, dry_run=False))
        return done, len(ids) - done

    def rederive_some(self, ids: Sequence[str], *, dry_run: bool) -> list[Outcome]:
        """Derive the decisions of some entries anew, in one transaction. Raises StoreError."""
        now = time.time()
        outcomes = self._write(
            lambda connection: queries.rederive_entries(connection, ids, now, dry_run=dry_run)
        )
        if not dry_run:
            self._note_fault(None)
        return outcomes

    def count_entries(self) -> int:
        """Return the number of entries. Raises StoreError."""
        return self._write(queries.count_entries)

    def check(self) -> None:
        """Open the database anew, with all that an opening checks. Raises nothing: see `problems`."""
        self._disconnect()
        self._open()

    def retry(self) -> None:
        """Open the database if that was not possible so far. Raises nothing: see `problems`."""
        if self._connection is None:
            self._open()

    def _open(self) -> None:
        self._identity = None
        if fault := database_files.why_read_only(self._path):
            self._note_fault(fault)
            return
        try:
            self._connection = self._connected()
        except (sa.exc.DBAPIError, database.DamagedError, OSError) as error:
            cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
            remedy = database_files.remedy(self._path, cause)
            self._note_fault(f"{self._path}: cannot be written: {cause}; nothing is stored: {remedy}")
            return
        self._note_fault(None)
        self._identity = database_files.identity(self._path)
        database_files.make_ballast(self._path)

    def _connected(self) -> sa.Connection:
        try:
            return database.open_writer(self._path).connect()
        except sa.exc.DBAPIError:
            # A full disk has no room for WAL's files, without which not even rows can be deleted.
            if not database_files.lower_ballast(self._path):
                raise
            return database.open_writer(self._path).connect()

    def _note_fault(self, fault: str | None) -> None:
        """Set the fault that keeps the store from writing, None if there is none; log it when it changes."""
        if fault == self._fault:
            return
        self._fault = fault
        if fault is None:
            _log.info("%s: can be written again", self._path)
        else:
            _log.error("%s", fault)

    def _disconnect(self) -> None:
        if self._connection is not None:
            engine = self._connection.engine
            with contextlib.suppress(sa.exc.DBAPIError):
                self._connection.close()
            # StaticPool keeps the connection beyond its `close`.
            engine.dispose()
            self._connection = None

    def _write(self, action: Callable[[sa.Connection], _T]) -> _T:
        """Run `action` in one transaction; if the file proves damaged, once more in a new one."""
        self._follow_file()
        try:
            return self._transact(action)
        except database.DamagedError as error:
            _log.error("%s", error)
            self.check()
            return self._transact(action)

    def _follow_file(self) -> None:
        """Open the database anew if another file lies at its path: writes to the old one would be lost."""
        if self._connection is None or database_files.identity(self._path) == self._identity:
            return
        note = f"{self._path}: was removed or replaced while in use; the daemon opened what is there now"
        _log.warning("%s", note)
        self._notes = [note]
        self.check()

    def _transact(self, action: Callable[[sa.Connection], _T]) -> _T:
        if self._connection is None:
            raise StoreError(self._fault or f"{self._path}: is not open")
        try:
            with self._connection.begin():
                return action(self._connection)
        except sa.exc.DBAPIError as error:
            raise self._translated(error) from error

    def _translated(self, error: sa.exc.DBAPIError) -> Exception:
        # No fault yet: `_write` tries once more, in a new file.
        if database.is_damage(error):
            return database.DamagedError(f"{self._path}: {error.orig}")
        if database.primary_code(error) == sqlite3.SQLITE_FULL:
            full = f"{self._path}: the disk is full, nothing is stored; free some room or run: pygraphd cache prune"
            self._note_fault(full)
            return DiskFullError(full)
        fault = (
            f"{self._path}: {error.orig}; nothing is stored: {database_files.remedy(self._path, error.orig)}"
        )
        self._note_fault(fault)
        return StoreError(fault)

    def _delete(self, ids: Sequence[str], *, is_last: bool) -> None:
        def action(connection: sa.Connection) -> None:
            if ids:
                queries.delete_entries(connection, ids)
            if is_last:
                queries.delete_unnamed_environments(connection)

        try:
            self._write(action)
        except DiskFullError:
            database_files.ballast_file(self._path).unlink(missing_ok=True)
            assert self._connection is not None
            _checkpoint(self._connection)  # the log of the deletions before takes room, too
            self._write(action)
            _checkpoint(self._connection)


def _vacuum(connection: sa.Connection, pages: int) -> None:
    _outside_transaction(connection, f"PRAGMA incremental_vacuum({pages})")


def _checkpoint(connection: sa.Connection) -> None:
    # Waits for readers with the write lock held, so not for those that take long, as an export does.
    _outside_transaction(connection, f"PRAGMA busy_timeout={_READERS_MS}")
    _outside_transaction(connection, "PRAGMA wal_checkpoint(TRUNCATE)")
    _outside_transaction(connection, f"PRAGMA busy_timeout={database.BUSY_TIMEOUT_MS}")


def _outside_transaction(connection: sa.Connection, statement: str) -> None:
    """Run a statement that frees room if it can; a full disk or a busy file is no error here."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    # On the driver, as SQLAlchemy begins a transaction, within which VACUUM and checkpoints fail.
    with contextlib.suppress(sqlite3.Error):
        # Not `execute`: a vacuum moves one page a step, and that would make one step only.
        driver.executescript(statement)
