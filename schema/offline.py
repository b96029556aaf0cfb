"""Reading the daemon's SQLite file without the daemon, with nothing but the standard library.

The client does this when no daemon answers; the daemon's own lookups run the same statement. It names tables of
`pygraphd.daemon.tables`, which the client may not import (it needs SQLAlchemy); a test holds the two together.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import (
    Decision,
    Deployment,
    Entry,
    Graph,
    LookupRequest,
    Measurement,
    Origin,
    Record,
    SizedEntry,
    SizesRequest,
    check_sized,
)
from pygraphd.schema.ownership import is_irregular
from pygraphd.schema.portable import Portable
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Mapping

DATABASE_VERSION = 9
"""`PRAGMA user_version` of the tables that `SELECT_DECISIONS` and `SELECT_SIZES` read."""
OLDEST_MIGRATED = 8
"""The first version that a daemon migrates. 1 to 7 were of versions that were never released, and are set aside."""
BUSY_TIMEOUT_S = 0.1

_ANSWER = "deployment, reason, detail, against, against_detail, policy, final, calls, uid, host, cost_us, measured_at, host_us, span_us"
SELECT_DECISIONS = f"""
SELECT graph, {_ANSWER}
FROM decision
WHERE environment = ? AND graph IN (SELECT value FROM json_each(?))
"""
"""The columns of the answer."""

# CROSS JOIN: the sizes of a graph are few, and the entries of an environment may be a million.
SELECT_SIZES = f"""
SELECT sizes, graph, {_ANSWER}
FROM graph CROSS JOIN decision ON decision.graph = graph.digest
WHERE whole = ? AND environment = ? AND final = 1
ORDER BY hits DESC, measured_at IS NULL, measured_at, created_at, decision.rowid
LIMIT ?
"""
"""The sizes of a graph in the order of their use; of those used as often, the one that was measured first, which had come back first."""

SELECT_MEASUREMENTS = """
SELECT version, deployment, samples, median_us, mad_us, host_us, span_us, busy, host_mad_us, span_mad_us
FROM measurement
WHERE environment = ? AND graph = ? AND measured_at = ?
ORDER BY id
"""


def connect(database: Path, timeout_s: float = BUSY_TIMEOUT_S) -> sqlite3.Connection:
    """Return a read-only connection, usable from any one thread at a time; raises sqlite3.Error."""
    if (irregular := irregular_file(database)) is not None:
        raise sqlite3.OperationalError(f"{irregular} is not a regular file; move it away")
    uri = f"{database.absolute().as_uri()}?mode=ro"
    wal = database.with_name(f"{database.name}-wal")
    if not os.access(database.parent, os.W_OK) and not wal.exists():
        # WAL's shared-memory file cannot be made in such a folder, and without it only `immutable` reads. Nobody writes
        # here as long as there is no log.
        uri += "&immutable=1"
    return sqlite3.connect(uri, uri=True, timeout=timeout_s, check_same_thread=False)


def irregular_file(database: Path) -> Path | None:
    """Return which of a database's files is a pipe or something else that SQLite would wait for; None if none is."""
    real = os.path.realpath(database)  # where SQLite has the other files, too
    files = (Path(f"{real}{suffix}") for suffix in ("", "-wal", "-shm", "-journal"))
    return next((file for file in files if is_irregular(file)), None)


def read_entries(database: Path, request: LookupRequest) -> tuple[Entry, ...]:
    """Return the entries for a request straight from the file; raises OSError or sqlite3.Error if it cannot be read."""
    with contextlib.closing(connect(database)) as connection:
        return select_entries(connection, request) if _has_tables(connection) else ()


def read_sizes(database: Path, request: SizesRequest) -> tuple[SizedEntry, ...]:
    """Return the sizes of a graph straight from the file, the most used first; raises OSError or sqlite3.Error if it cannot be read."""
    with contextlib.closing(connect(database)) as connection:
        return select_sizes(connection, request) if _has_tables(connection) else ()


def _has_tables(connection: sqlite3.Connection) -> bool:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in {0, DATABASE_VERSION}:
        raise sqlite3.DatabaseError(f"database version {version}, this program reads {DATABASE_VERSION}")
    return bool(version)  # else it is being made: a daemon fills it and says so in one transaction


Row = tuple[Any, ...]
"""A row of `SELECT_DECISIONS`, or of `SELECT_SIZES`."""


def select_entries(connection: sqlite3.Connection, request: LookupRequest) -> tuple[Entry, ...]:
    """Return the entries for a request from an open database; one that is not valid is left out. Raises sqlite3.Error."""
    found = (_entry(*row) for row in select_rows(connection, request))
    return tuple(entry for entry in found if entry is not None)


def select_rows(connection: sqlite3.Connection, request: LookupRequest) -> list[Row]:
    """Return the rows for a request from an open database; they may hold anything. Raises sqlite3.Error."""
    return _rows(connection, SELECT_DECISIONS, (request.environment, json.dumps(request.graphs)))


def _rows(connection: sqlite3.Connection, statement: str, asked: tuple[str | int, ...]) -> list[Row]:
    try:
        return connection.execute(statement, asked).fetchall()
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
        connection.text_factory = _replacing  # text of one row is not UTF-8, which must not hide the others
        return connection.execute(statement, asked).fetchall()


def select_sizes(connection: sqlite3.Connection, request: SizesRequest) -> tuple[SizedEntry, ...]:
    """Return the sizes of a graph from an open database, the most used first; a row that is not valid is left out. Raises sqlite3.Error."""
    asked = (request.graph, request.environment, request.most)
    found = (_sized_entry(request.graph, *row) for row in _rows(connection, SELECT_SIZES, asked))
    return tuple(each for each in found if each is not None)


def _sized_entry(whole: str, text: Any, *row: Any) -> SizedEntry | None:
    if (entry := _entry(*row)) is None:
        return None
    try:
        sizes = tuple(map(int, str(text).split(",")))
        check_sized(entry.graph, whole, sizes)
        return SizedEntry(sizes, entry)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Hit:
    """The answer to a lookup for one graph in an environment."""

    environment: Environment
    graph: Graph
    entry: Entry


def read_portable(database: Path, hits: Mapping[str, Hit]) -> dict[str, Portable]:
    """Return hits with the measurements that they rest on, by the same keys; raises OSError or sqlite3.Error.

    A hit is left out if its measurements are gone, or not valid.
    """
    found: dict[str, Portable] = {}
    with contextlib.closing(connect(database)) as connection:
        for key, hit in hits.items():
            rests_on = (hit.environment.digest(), hit.graph.digest, hit.entry.measured_at)
            rows = connection.execute(SELECT_MEASUREMENTS, rests_on).fetchall()
            with contextlib.suppress(ValueError):
                newest = {row[1]: Measurement(Deployment(row[1]), *row[2:]) for row in rows}
                record = Record(hit.graph, hit.entry.decision, tuple(newest.values()))
                origin = Origin(hit.entry.host, rows[0][0] if rows else "")
                found[key] = Portable(hit.environment, origin, record, hit.entry.measured_at)
    return found


def _replacing(text: bytes) -> str:
    return text.decode(errors="replace")


def _entry(
    graph: str,
    deployment: str,
    reason: str,
    detail: str,
    against: str,
    against_detail: str,
    policy: int,
    final: int,
    calls: int,
    uid: int,
    host: str,
    cost_us: float | None,
    measured_at: float | None,
    host_us: float | None,
    span_us: float | None,
) -> Entry | None:
    try:
        decision = decision_of(deployment, reason, detail, against, against_detail, policy, final, calls)
        return Entry(graph, decision, uid, host, cost_us, measured_at, host_us, span_us)
    except ValueError:
        return None


@functools.lru_cache(maxsize=1024)
def decision_of(
    deployment: str,
    reason: str,
    detail: str,
    against: str,
    against_detail: str,
    policy: int,
    final: int,
    calls: int,
) -> Decision:
    """Return the decision that the columns of a row describe; raises ValueError."""
    # Few differ among the entries of a program, and making one takes longer than reading it.
    why, why_not_other = Reason(ReasonCode(reason), detail), Reason(ReasonCode(against), against_detail)
    return Decision(Deployment(deployment), why, policy, bool(final), calls, why_not_other)
