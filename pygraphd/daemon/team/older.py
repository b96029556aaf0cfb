"""Selects what is in the local cache and was not published: from before there was a team, or for want of room in the queue."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import sqlalchemy as sa

from pygraphd.daemon import portable_rows
from pygraphd.daemon.queries import CHUNK, SCANNED
from pygraphd.daemon.tables import Decision
from pygraphd.daemon.team.queue import Publication, publications
from pygraphd.schema import offline
from pygraphd.schema.checks import check_int
from pygraphd.schema.messages import MAX_UID, RecordRequest
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import HOST_PREFIXES

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pygraphd.daemon.queries import Key
    from pygraphd.daemon.rederiving import Row
    from pygraphd.daemon.team.queue import Unpublished


class LocalCache:
    """The cache's file, read in pieces, each on a connection of its own: nothing that the daemon does waits for it.

    Methods raise `sqlalchemy.exc.DBAPIError` or sqlite3.Error.
    """

    def __init__(self, database: Path) -> None:
        self._engine = sa.create_engine(
            "sqlite://", creator=lambda: _connected(database), poolclass=sa.NullPool
        )

    def count(self, part: Unpublished) -> int:
        """Return the number of entries that `page` has yet to come by: one pass over all entries."""
        query = sa.select(sa.func.count()).select_from(Decision)
        with self._engine.connect() as connection:
            return connection.scalar(query.where(*_chosen(part))) or 0

    def page(self, part: Unpublished) -> tuple[list[Publication], str | None]:
        """Return the publications of the next few entries, and the place behind these; None: there are no more.

        These are final decisions of this policy that rest on measurements of this host. Entries are read in the order of their ids: an entry
        keeps its id whatever becomes of its row, and one that is added behind the place has been queued itself.
        """
        with self._engine.connect() as connection:
            connection.exec_driver_sql("BEGIN")  # sqlite3 begins nothing before a SELECT
            scanned = sa.select(Decision.id).where(*_behind(part)).order_by(Decision.id).limit(SCANNED)
            last = connection.scalar(sa.select(sa.func.max(scanned.subquery().c.id)))
            if last is None:
                return [], None
            chosen = sa.select(Decision.id).where(Decision.id <= last, *_chosen(part))
            ids = list(connection.scalars(chosen.order_by(Decision.id).limit(CHUNK)))
            rows, measured = portable_rows.entries(connection, Decision.id.in_(ids))
        found = [each for row in rows for each in _publications(row, measured)]
        return found, ids[-1] if len(ids) == CHUNK else last


def _publications(row: Row, measured: Mapping[Key, Sequence[Row]]) -> list[Publication]:
    with contextlib.suppress(ValueError):  # not valid, as what another program has written there
        entry = portable_rows.portable(row, measured.get((row["environment"], row["graph"]), []))
        request = RecordRequest(entry.environment, entry.origin, (entry.record,))
        return publications(request, check_int("uid", row["uid"], maximum=MAX_UID), row["measured_at"])
    return []


def _connected(database: Path) -> sqlite3.Connection:
    connection = offline.connect(database)
    connection.text_factory = lambda data: data.decode(
        errors="replace"
    )  # one bad row must not hide the others
    return connection


def _behind(part: Unpublished) -> tuple[sa.ColumnElement[bool], ...]:
    # An id that is no digest, as what another program has written there, might come back as another one, and the place never move.
    is_digest = sa.func.typeof(Decision.id) == "text", Decision.id.op("NOT GLOB")("*[^0-9a-f]*")
    return Decision.id > part.place, *is_digest


def _chosen(part: Unpublished) -> tuple[sa.ColumnElement[bool], ...]:
    return (
        *_behind(part),
        Decision.final == 1,
        Decision.policy == POLICY_VERSION,
        *(Decision.host.not_like(f"{prefix}%") for prefix in HOST_PREFIXES),
        Decision.measured_at.between(part.since, part.until),
    )
