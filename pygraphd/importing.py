"""What the store does with entries that were exported elsewhere: they never take the place of what was found out here."""

from __future__ import annotations

import enum
from collections import Counter
from typing import TYPE_CHECKING

import sqlalchemy as sa

from pygraphd import queries
from pygraphd.exchange import IMPORTED, ImportAnswer, imported_host
from pygraphd.schema import tables
from pygraphd.schema.keys import entry_id
from pygraphd.schema.messages import Origin, RecordRequest
from pygraphd.schema.policy import POLICY_VERSION

if TYPE_CHECKING:
    from pygraphd.exchange import ImportRequest, Portable


class _Fate(enum.Enum):
    """What becomes of an entry."""

    ADDED = enum.auto()
    REPLACED = enum.auto()
    KEPT = enum.auto()


def add(connection: sa.Connection, request: ImportRequest, uid: int, now: float) -> ImportAnswer:
    """Store a request's entries as `uid`'s; `now` is when they came, and the latest that they can have been measured."""
    fates: Counter[_Fate] = Counter()
    outdated: list[str] = []
    for entry in request.entries:
        key = (entry.environment.digest(), entry.record.graph.digest)
        fate = _fate(connection, key, entry)
        fates[fate] += 1
        if fate is _Fate.KEPT or request.dry_run:
            continue
        _store(connection, entry, uid, now)
        if entry.record.measurements and entry.record.decision.policy != POLICY_VERSION:
            outdated.append(entry_id(*key))
    outcomes = queries.rederive_entries(connection, outdated, now, dry_run=False)
    derived = sum(outcome.is_new for outcome in outcomes)
    return ImportAnswer(
        fates[_Fate.ADDED], fates[_Fate.REPLACED], fates[_Fate.KEPT], derived, request.dry_run
    )


def _fate(connection: sa.Connection, key: queries.Key, entry: Portable) -> _Fate:
    decision = tables.Decision
    query = sa.select(decision.final, decision.host, decision.measured_at)
    known = connection.execute(query.where(decision.environment == key[0], decision.graph == key[1])).first()
    if known is None:
        return _Fate.ADDED
    if not known.final:
        return _Fate.REPLACED
    is_newer = (entry.measured_at or 0.0) > (known.measured_at or 0.0)
    return _Fate.REPLACED if known.host.startswith(IMPORTED) and is_newer else _Fate.KEPT


def _store(connection: sa.Connection, entry: Portable, uid: int, now: float) -> None:
    origin = Origin(imported_host(entry.origin.host), entry.origin.version)
    request = RecordRequest(entry.environment, origin, (entry.record,))
    # A clock that runs ahead elsewhere must not make theirs the newest for ever.
    queries.record(connection, request, uid, now, measured_at=min(entry.measured_at or now, now))
