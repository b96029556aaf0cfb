"""Selects the newest entries from before the daemon had a team, to be queued for the team once."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import sqlalchemy as sa

from pygraphd.daemon import portable_rows
from pygraphd.daemon.queries import chunks
from pygraphd.daemon.tables import Decision
from pygraphd.daemon.team.queue import Publication, publications
from pygraphd.schema import offline
from pygraphd.schema.checks import check_int
from pygraphd.schema.messages import MAX_UID, RecordRequest
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import HOST_PREFIXES

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator
    from pathlib import Path

MAX_OLDER = 10_000
"""Entries that are published of those before there was a team: the newest ones."""

_log = logging.getLogger(__name__)


def measured_here(database: Path, until: float, most: int = MAX_OLDER) -> Iterator[list[Publication]]:
    """Yield the publications of a cache's entries, oldest first, some at a time.

    These are the `most` newest final decisions of this policy that rest on measurements, up to `until` (seconds since the epoch), of this host.
    Raises `sqlalchemy.exc.DBAPIError` or sqlite3.Error.
    """
    engine = sa.create_engine("sqlite://", creator=lambda: _connected(database), poolclass=sa.NullPool)
    with engine.connect() as connection:
        ids = list(connection.scalars(_NEWEST.where(Decision.measured_at <= until).limit(most)))
    _log.info("team: %d entries from before are published, too", len(ids))
    for some in chunks(ids[::-1]):
        with engine.connect() as connection:
            connection.exec_driver_sql("BEGIN")  # sqlite3 begins nothing before a SELECT
            rows, measured = portable_rows.entries(connection, Decision.id.in_(some))
        found: dict[str, list[Publication]] = {}
        for row in rows:
            with contextlib.suppress(ValueError):  # not valid, as what another program has written there
                entry = portable_rows.portable(row, measured.get((row["environment"], row["graph"]), []))
                request = RecordRequest(entry.environment, entry.origin, (entry.record,))
                uid = check_int("uid", row["uid"], maximum=MAX_UID)
                found[row["id"]] = publications(request, uid, row["measured_at"])
        yield [each for id_ in some for each in found.get(id_, [])]


def _connected(database: Path) -> sqlite3.Connection:
    connection = offline.connect(database)
    connection.text_factory = lambda data: data.decode(
        errors="replace"
    )  # one bad row must not hide the others
    return connection


_NEWEST = (
    sa.select(Decision.id)
    .where(
        Decision.final == 1,
        Decision.policy == POLICY_VERSION,
        *(Decision.host.not_like(f"{prefix}%") for prefix in HOST_PREFIXES),
    )
    .order_by(Decision.measured_at.desc(), Decision.id)
)
