"""Store imported entries. They never replace a final decision of this cache that the present policy has taken."""

from __future__ import annotations

import dataclasses
import enum
from collections import Counter
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pygraphd.daemon import queries, tables
from pygraphd.daemon.exchange import ImportAnswer
from pygraphd.schema.keys import entry_id
from pygraphd.schema.messages import Measurement, Origin, RecordRequest
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.portable import HOST_PREFIXES, imported_host

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pygraphd.schema.portable import Portable


class _Fate(enum.Enum):
    """The outcome for one entry."""

    ADDED = enum.auto()
    REPLACED = enum.auto()
    KEPT = enum.auto()


def add(connection: sa.Connection, entries: Sequence[Portable], uid: int, now: float) -> ImportAnswer:
    """Store entries as `uid`'s; `now` is when they came, and the latest that they can have been measured."""
    fates: Counter[_Fate] = Counter()
    outdated: list[str] = []
    for entry in entries:
        known = _known(connection, entry)
        fate = _fate(connection, known, entry, now)
        fates[fate] += 1
        # The statement that stores compares with the row, and values of any type might win.
        if known is not None and not _is_valid(known):
            connection.execute(sa.delete(tables.Decision).where(*_has_key(entry)))
        if fate is not _Fate.KEPT:
            _store(connection, entry, uid, now)
            if not _is_current(entry.record.decision.policy):
                outdated.append(entry_id(*entry.key))
    outcomes = queries.rederive_entries(connection, outdated, now, dry_run=False)
    derived = sum(outcome.is_new for outcome in outcomes)
    return ImportAnswer(fates[_Fate.ADDED], fates[_Fate.REPLACED], fates[_Fate.KEPT], derived)


def foresee(connection: sa.Connection, entries: Iterable[Portable], now: float) -> ImportAnswer:
    """Return the outcome of `add` without entries derived anew, each key once. Reads only."""
    fates: Counter[_Fate] = Counter()
    seen: set[str] = set()
    for entry in entries:
        if (key := entry_id(*entry.key)) not in seen:
            seen.add(key)
            fates[_fate(connection, _known(connection, entry), entry, now)] += 1
    return ImportAnswer(fates[_Fate.ADDED], fates[_Fate.REPLACED], fates[_Fate.KEPT], dry_run=True)


def _has_key(entry: Portable) -> tuple[sa.ColumnElement[bool], ...]:
    environment, graph = entry.key
    return tables.Decision.environment == environment, tables.Decision.graph == graph


def _known(connection: sa.Connection, entry: Portable) -> sa.Row[*tuple[Any, ...]] | None:
    """Return what is stored of the decision with an entry's key: if the tables were made without types, anything."""
    decision = tables.Decision
    query = sa.select(decision.final, decision.host, decision.measured_at, decision.policy)
    return connection.execute(query.where(*_has_key(entry))).first()


def _is_valid(known: sa.Row[*tuple[Any, ...]]) -> bool:
    """Return whether a stored decision has the types that the daemon stores; one that has not is used by nobody."""
    return (
        known.final in {0, 1}
        and isinstance(known.host, str)
        and isinstance(known.policy, int)
        and isinstance(known.measured_at, int | float | None)
    )


def _fate(
    connection: sa.Connection, known: sa.Row[*tuple[Any, ...]] | None, entry: Portable, now: float
) -> _Fate:
    if known is None:
        return _Fate.ADDED
    if not _is_valid(known):
        return _Fate.REPLACED
    if not known.final:
        return _Fate.REPLACED
    is_current = _is_current(entry.record.decision.policy)
    if is_current is not _is_current(known.policy):
        return _Fate.REPLACED if is_current else _Fate.KEPT  # nobody uses what another policy has decided
    is_newer = (_measured_at(entry, now) or 0.0) > (known.measured_at or 0.0)
    if not is_newer or not known.host.startswith(HOST_PREFIXES):
        return _Fate.KEPT
    # Dated in the future, an entry would be newer than itself: it was stored with the time when it came first.
    is_ahead = entry.measured_at is not None and entry.measured_at > now
    return _Fate.KEPT if is_ahead and _is_stored(connection, known, entry) else _Fate.REPLACED


def _is_stored(connection: sa.Connection, known: sa.Row[*tuple[Any, ...]], entry: Portable) -> bool:
    """Return whether the stored decision rests on the entry's measurements, to the last digit."""
    table, (environment, graph) = tables.Measurement, entry.key
    names = [field.name for field in dataclasses.fields(Measurement)]
    query = sa.select(*(getattr(table, name) for name in names)).where(
        table.environment == environment, table.graph == graph, table.measured_at == known.measured_at
    )
    stored = Counter(map(tuple, connection.execute(query)))
    measured = (dataclasses.asdict(each) for each in entry.record.measurements)
    return stored == Counter(tuple(each[name] for name in names) for each in measured)


def _is_current(policy: int) -> bool:
    return policy == POLICY_VERSION


def _measured_at(entry: Portable, now: float) -> float | None:
    # A clock that runs ahead elsewhere must not make theirs the newest for ever.
    return None if entry.measured_at is None else min(entry.measured_at, now)


def _store(connection: sa.Connection, entry: Portable, uid: int, now: float) -> None:
    origin = Origin(imported_host(entry.origin.host), entry.origin.version)
    request = RecordRequest(entry.environment, origin, (entry.record,))
    queries.record(connection, request, uid, now, measured_at=_measured_at(entry, now))
