"""The queue of records that are to be published: a SQLite file beside the cache, which survives restarts.

A record is queued before it is stored, and deleted once the team has it. So a daemon that is killed publishes it twice rather than
never, and the second time changes nothing: a record's id is the digest of what was measured.

Records for which there is no room stay in the cache. The file says which part of the cache that is, so that they are published from there later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import sqlite3
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pygraphd.daemon import database_files
from pygraphd.schema import keys, offline
from pygraphd.schema.messages import Origin, RecordRequest, read
from pygraphd.schema.portable import Portable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

MAX_QUEUED = 20_000
"""Records kept while the team cannot be reached: some 40 MB. Beyond, the oldest are left to the cache."""
_VERSION = 2
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Publication:
    """A record to be published. `id` is a digest, the same whenever the same is measured; `uid` is the user who measured."""

    id: str
    uid: int
    entry: Portable


@dataclass(frozen=True, slots=True)
class Unpublished:
    """The part of the cache that is to be published: what was measured from `since` to `until`, in the entries whose ids are behind `place`."""

    since: float
    until: float
    place: str = ""


def publications(request: RecordRequest, uid: int, now: float) -> list[Publication]:
    """Return the publications of a request: final decisions that rest on a measurement of the chosen deployment.

    Others would keep a team from trying what failed on one host, for want of memory or of a compiler.
    """
    found = []
    for record in request.records:
        decision = record.decision
        if decision.final and any(each.deployment is decision.deployment for each in record.measurements):
            entry = Portable(request.environment, request.origin, record, now)
            found.append(Publication(_id(entry, uid), uid, entry))
    return found


def _id(entry: Portable, uid: int) -> str:
    # Without the job, and without the time: a record that comes once more by the spool is the same one.
    origin = Origin(entry.origin.host, entry.origin.version)
    parts = {"origin": dataclasses.asdict(origin), "record": dataclasses.asdict(entry.record)}
    del parts["record"]["graph"]["whole"]  # the digest is made of it, and older clients do not say it
    fields = [(name, json.dumps(part, sort_keys=True)) for name, part in parts.items()]
    return keys.digest("publication", [("environment", entry.key[0]), ("uid", str(uid)), *fields])


class Queue:
    """The open file. Any thread may use it; a fault of disk or file is kept in `problem`, and raises nothing."""

    def __init__(self, path: Path, most: int = MAX_QUEUED) -> None:
        self._path = path
        self._most = most
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._is_closed = False
        self._count = 0
        self.dropped = 0
        """Records that were dropped since the queue was opened: they could not be written or read, or the team refused them."""
        self.unpublished: Unpublished | None = None
        self.problem: str | None = None
        self.note: str | None = None
        """What became of the file before, as long as the daemon lives."""
        self._identity: database_files.FileIdentity | None = None
        # Opens the file, so that what waits in it counts from the start.
        self._run(lambda connection: None)

    def close(self) -> None:
        """Close the file for good."""
        with self._lock:
            self._is_closed = True
            self._disconnect()

    def __len__(self) -> int:
        """Return the number of records that wait."""
        return self._count

    def put(self, found: Sequence[Publication]) -> None:
        """Add records; those that wait already stay as they are. What cannot be written is dropped and counted."""
        if not found:
            return
        if self._run(lambda connection: self._put(connection, found)) is None:
            self.dropped += len(found)

    def note_team(self, now: float) -> None:
        """Note that there is a team; if it is the first one, all that was measured until `now` is to be published."""
        self._run(lambda connection: self._note_team(connection, now))

    def put_older(self, found: Sequence[Publication], part: Unpublished, place: str | None) -> None:
        """Add what was found in a part of the cache, and note in the same transaction how far that is; None: all of it."""
        self._run(lambda connection: self._put_older(connection, found, part, place))

    def first(self, most: int) -> list[Publication]:
        """Return the records that have waited longest; they stay until they are removed."""
        return self._run(lambda connection: self._first(connection, most)) or []

    def remove(self, ids: Sequence[str]) -> None:
        """Delete records that were published."""
        self._run(lambda connection: self._delete(connection, ids))

    def drop(self, ids: Sequence[str]) -> None:
        """Delete records that the team refuses, and count them."""
        self.dropped += len(ids)
        self.remove(ids)

    def _note_team(self, connection: sqlite3.Connection, now: float) -> None:
        # Once for all teams: what is measured while none is set later on stays here.
        is_first = "WHERE NOT EXISTS (SELECT 1 FROM before_team)"
        connection.execute(f"INSERT INTO before_team SELECT ?, 0 {is_first}", (now,))
        begun = connection.execute("SELECT ended_at FROM before_team WHERE NOT is_queued").fetchone()
        if begun is not None:
            self._leave_to_cache(connection, Unpublished(0.0, begun[0]))
            connection.execute("UPDATE before_team SET is_queued = 1")

    def _put_older(
        self,
        connection: sqlite3.Connection,
        found: Sequence[Publication],
        part: Unpublished,
        place: str | None,
    ) -> None:
        self._put(connection, found)
        if self.unpublished == part:  # else more was left to the cache meanwhile, and all is read once more
            self._set_unpublished(
                connection, None if place is None else dataclasses.replace(part, place=place)
            )

    def _leave_to_cache(self, connection: sqlite3.Connection, more: Unpublished) -> None:
        if (known := self.unpublished) is not None:
            more = Unpublished(min(known.since, more.since), max(known.until, more.until))
        self._set_unpublished(connection, more)

    def _set_unpublished(self, connection: sqlite3.Connection, part: Unpublished | None) -> None:
        connection.execute("DELETE FROM unpublished")
        if part is not None:
            connection.execute("INSERT INTO unpublished VALUES (?, ?, ?)", dataclasses.astuple(part))
        self.unpublished = part

    def _put(self, connection: sqlite3.Connection, found: Sequence[Publication]) -> bool:
        before = connection.total_changes
        # A record that comes once more, as by the spool, waits already: SQLite counts what was really added.
        rows = [(each.id, each.uid, _encoded(each.entry)) for each in found]
        connection.executemany("INSERT OR IGNORE INTO waiting (id, uid, entry) VALUES (?, ?, ?)", rows)
        self._count += connection.total_changes - before
        if (surplus := self._count - self._most) > 0:
            self._leave_oldest_to_cache(connection, surplus)
        return True

    def _first(self, connection: sqlite3.Connection, most: int) -> list[Publication]:
        rows = connection.execute("SELECT id, uid, entry FROM waiting ORDER BY place LIMIT ?", (most,))
        found = {id_: _decoded(id_, uid, entry) for id_, uid, entry in rows.fetchall()}
        # Else they would be the first for ever, and nothing behind them would be published.
        if unreadable := [id_ for id_, each in found.items() if each is None]:
            _log.warning("%s: %d records cannot be read, and are dropped", self._path, len(unreadable))
            self._delete(connection, unreadable)
            self.dropped += len(unreadable)
        return [each for each in found.values() if each is not None]

    def _delete(self, connection: sqlite3.Connection, ids: Sequence[str]) -> None:
        before = connection.total_changes
        connection.executemany("DELETE FROM waiting WHERE id = ?", [(id_,) for id_ in ids])
        self._count -= connection.total_changes - before

    def _leave_oldest_to_cache(self, connection: sqlite3.Connection, count: int) -> None:
        if self.unpublished is None:
            why = "the oldest are published from the cache later"
            _log.warning("%s: over %d records wait; %s", self._path, self._most, why)
        oldest = self._first(connection, count)
        # In one transaction with the note of where they are found later: a daemon that is killed loses none.
        self._delete(connection, [each.id for each in oldest])
        times = [each.entry.measured_at or 0.0 for each in oldest]
        if times:
            self._leave_to_cache(connection, Unpublished(min(times), max(times)))

    def _run(self, action: Callable[[sqlite3.Connection], _T]) -> _T | None:
        """Run an action in one transaction; return None after a fault, which is kept."""
        with self._lock:
            if self._is_closed:
                return None
            try:
                self._follow_file()
                if self._connection is None:
                    self._connection = self._connected()
                    self._identity = database_files.identity(self._path)
                with self._connection:
                    result = action(self._connection)
            except (sqlite3.Error, OSError) as error:
                self._note(error)
                return None
            self.problem = None
            return result

    def _follow_file(self) -> None:
        """Let go of a file that was removed or replaced: what is queued in it would be lost."""
        if self._connection is None or database_files.identity(self._path) == self._identity:
            return
        lost = f"{self._count} records that waited in it are not published"
        self.note = f"{self._path}: was removed or replaced while in use; {lost}"
        _log.warning("%s; the daemon goes on with what is there now, or a new queue", self.note)
        self._disconnect()

    def _connected(self) -> sqlite3.Connection:
        if (irregular := offline.irregular_file(self._path)) is not None:
            raise OSError(f"{irregular} is not a regular file; move it away")
        # Used on the writer's thread and the team's, never by two at a time: see `_run`.
        connection = sqlite3.connect(self._path, check_same_thread=False)
        try:
            for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=1000"):
                connection.execute(f"PRAGMA {pragma}")
            connection.executescript(_TABLE)
            (self._count,) = connection.execute("SELECT count(*) FROM waiting").fetchone()
            part = connection.execute("SELECT since, until, place FROM unpublished").fetchone()
            self.unpublished = None if part is None else Unpublished(*part)
        except BaseException:
            connection.close()
            raise
        return connection

    def _note(self, error: Exception) -> None:
        if self.problem is None:
            _log.error("%s: %s", self._path, error)
        why = database_files.with_remedy(self._path, error)
        self.problem = f"{self._path}: what is recorded now is not published: {why}"
        # What was rolled back may be in the count: it is read anew when the file is opened again.
        self._disconnect()
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in database_files.DAMAGE:
            with contextlib.suppress(OSError):
                self.problem = f"{database_files.set_aside(self._path, database_files.CORRUPT)}: {error}; a new queue is begun"
                self._count = 0

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def count_waiting(path: Path) -> tuple[int, bool]:
    """Return the number of records that wait in the file of a daemon that does not run, and whether entries of the cache do, too.

    Changes nothing; raises OSError, sqlite3.Error.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return 0, False
    with contextlib.closing(offline.connect(path)) as connection:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        counts = [
            int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]) if version >= since else 0
            for table, since in (("waiting", 1), ("unpublished", 2))
        ]
    return counts[0], counts[1] > 0


_TABLE = f"""
CREATE TABLE IF NOT EXISTS waiting (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, uid INTEGER NOT NULL, entry TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS before_team (ended_at REAL NOT NULL, is_queued INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS unpublished (since REAL NOT NULL, until REAL NOT NULL, place TEXT NOT NULL) STRICT;
PRAGMA user_version={_VERSION};
"""


def _encoded(entry: Portable) -> str:
    return json.dumps(dataclasses.asdict(entry), separators=(",", ":"), allow_nan=False)


def _decoded(id_: str, uid: int, entry: str) -> Publication | None:
    try:
        return Publication(id_, uid, read(Portable, json.loads(entry)))
    except (ValueError, RecursionError):
        return None
