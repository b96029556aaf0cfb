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
)
from pygraphd.schema.ownership import is_irregular
from pygraphd.schema.portable import Portable
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Mapping

DATABASE_VERSION = 8
"""`PRAGMA user_version` of the tables that `SELECT_DECISIONS` reads."""
OLDEST_MIGRATED = 8
"""The first version that a daemon migrates. 1 to 7 were of versions that were never released, and are set aside."""
BUSY_TIMEOUT_S = 0.1

SELECT_DECISIONS = """
SELECT graph, deployment, reason, detail, against, against_detail, policy, final, calls, uid, host, cost_us, measured_at, host_us, span_us
FROM decision
WHERE environment = ? AND graph IN (SELECT value FROM json_each(?))
"""
"""The columns of the answer."""

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
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if not version:
            return ()  # it is being made: a daemon fills it and says so in one transaction
        if version != DATABASE_VERSION:
            raise sqlite3.DatabaseError(f"database version {version}, this program reads {DATABASE_VERSION}")
        return select_entries(connection, request)


Row = tuple[Any, ...]
"""A row of `SELECT_DECISIONS`."""


def select_entries(connection: sqlite3.Connection, request: LookupRequest) -> tuple[Entry, ...]:
    """Return the entries for a request from an open database; one that is not valid is left out. Raises sqlite3.Error."""
    found = (_entry(*row) for row in select_rows(connection, request))
    return tuple(entry for entry in found if entry is not None)


def select_rows(connection: sqlite3.Connection, request: LookupRequest) -> list[Row]:
    """Return the rows for a request from an open database; they may hold anything. Raises sqlite3.Error."""
    asked = (request.environment, json.dumps(request.graphs))
    try:
        return connection.execute(SELECT_DECISIONS, asked).fetchall()
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
        connection.text_factory = _replacing  # text of one row is not UTF-8, which must not hide the others
        return connection.execute(SELECT_DECISIONS, asked).fetchall()


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
