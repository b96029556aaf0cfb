"""The entries of a cache for people, read from the database file, with or without a daemon."""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from pygraphd.daemon import tables
from pygraphd.daemon.queries import rows_of
from pygraphd.errors import CommandError, UsageError
from pygraphd.schema import offline
from pygraphd.schema.keys import DIGITS
from pygraphd.schema.policy import is_noisy, reason_text
from pygraphd.schema.reasons import Reason, ReasonCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_T = TypeVar("_T")

NOT_FOUND = "no entry has an id or graph that begins so; see: pygraphd cache inspect"

_ENTRY = (
    tables.Decision.id,
    tables.Decision.graph,
    tables.Graph.kind,
    tables.Graph.partition,
    tables.Graph.partitions,
    tables.Graph.operators,
    tables.Graph.sizes,
    tables.Decision.deployment,
    tables.Decision.reason,
    tables.Decision.detail,
    tables.Decision.against,
    tables.Decision.against_detail,
    tables.Decision.policy,
    tables.Decision.final,
    tables.Decision.calls,
    tables.Decision.uid,
    tables.Decision.created_at,
    tables.Decision.measured_at,
    tables.Decision.hits,
    tables.Decision.last_hit,
    tables.Decision.environment,
    tables.Environment.gpu,
)


@dataclass(frozen=True, slots=True)
class CachedEntry:
    """One entry as a row of the listing. `medians_us` has the newest measurement of each deployment measured.

    `spooled`: it is in no cache yet, but in a file that waits for the daemon.
    """

    facts: dict[str, Any]
    medians_us: dict[str, float]
    spooled: bool = False

    @property
    def reason(self) -> Reason:
        """The reason for the deployment."""
        return Reason(ReasonCode(self.facts["reason"]), self.facts["detail"])

    @property
    def against(self) -> Reason:
        """The reason against the other deployment."""
        return Reason(ReasonCode(self.facts["against"]), self.facts["against_detail"])

    @property
    def text(self) -> str:
        """The reason for the deployment, as text."""
        return reason_text(self.reason, final=self.facts["final"])

    @property
    def provisional(self) -> str:
        """Why the next program measures the graph anew; empty for a final decision."""
        if self.facts["final"]:
            return ""
        if is_noisy(self.reason, final=False):
            return "its figures are too noisy"
        if self.reason.code is ReasonCode.TOO_FEW_CALLS:
            return f"seen for {self.facts['calls']} calls only"
        return str(self.reason)

    def as_json(self) -> dict[str, Any]:
        """Return the entry for `cache inspect --json`: codes with their details, and the text."""
        said = {"text": self.text, "medians_us": self.medians_us, "provisional": self.provisional}
        return {**self.facts, **said}


@dataclass(frozen=True, slots=True)
class EntryDetails:
    """One entry with its environment and all its measurements, newest first."""

    entry: CachedEntry
    environment: dict[str, Any]
    measurements: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return the details as `cache show --json` has them."""
        details = {"environment": self.environment, "measurements": self.measurements}
        return {"schema": 1, **self.entry.as_json(), **details}


class Catalogue:
    """An open, read-only view of one database file; raises CommandError where that cannot be read."""

    is_spool = False

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise CommandError(f"{path}: there is no cache yet; it is made when the daemon first starts")
        self._path = path
        self._engine = sa.create_engine("sqlite://", creator=lambda: offline.connect(path))

    def __enter__(self) -> Catalogue:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._engine.dispose()

    def entries(self, gpu: str = "", graph: str = "") -> list[CachedEntry]:
        """Return the entries whose GPU name contains `gpu` and whose graph digest begins with `graph`, newest first."""
        query = _select_entries().order_by(tables.Decision.created_at.desc(), tables.Decision.id)
        if gpu:
            query = query.where(tables.Environment.gpu.icontains(gpu, autoescape=True))
        if graph:
            query = query.where(tables.Decision.graph.startswith(graph.lower(), autoescape=True))
        medians = self._medians()
        return [self._entry(row, medians) for row in self.rows(query)]

    def show(self, prefix: str) -> EntryDetails:
        """Return the one entry with an id or graph digest that begins with `prefix`; raises UsageError if there is none or several."""
        return self._details(self._one(prefix))

    def of_graph(self, graph: str) -> list[EntryDetails]:
        """Return the entries of one graph (its whole digest), one for each environment, newest first."""
        return self._all_details(tables.Decision.graph == graph, graph)

    def of_prefix(self, prefix: str) -> list[EntryDetails]:
        """Return the entries with an id or graph digest that begins with `prefix`, newest first; raises UsageError for several graphs."""
        found = self.rows(_select_entries().where(_begins_with(prefix)))
        graph = only_graph(prefix, {row["graph"] for row in found})
        return self._all_details(_begins_with(prefix), graph) if graph is not None else []

    def _all_details(self, where: sa.ColumnElement[bool], graph: str) -> list[EntryDetails]:
        query = _select_entries().where(where)
        rows = self.rows(query.order_by(tables.Decision.created_at.desc(), tables.Decision.id))
        medians = self._medians(graph)
        return [self._details(self._entry(row, medians)) for row in rows]

    def _details(self, entry: CachedEntry) -> EntryDetails:
        environment, graph = entry.facts["environment"], entry.facts["graph"]
        factors = self.rows(
            sa.select(*_columns(tables.Environment)).where(tables.Environment.id == environment)
        )
        measured = sa.select(*_columns(tables.Measurement)).where(
            tables.Measurement.environment == environment, tables.Measurement.graph == graph
        )
        return EntryDetails(entry, factors[0], self.rows(measured.order_by(tables.Measurement.id.desc())))

    def id_of(self, prefix: str) -> str:
        """Return the id of the one entry with an id or graph digest that begins with `prefix`; raises UsageError if there is none or several."""
        return str(self._row(prefix)["id"])

    def _one(self, prefix: str) -> CachedEntry:
        return self._entry(self._row(prefix), self._medians())

    def _row(self, prefix: str) -> dict[str, Any]:
        rows = self.rows(_select_entries().where(_begins_with(prefix)).limit(100))
        if not rows:
            raise UsageError(f"{prefix}: {NOT_FOUND}")
        if len(rows) > 1:
            raise UsageError(f"{prefix}: {_ambiguous([row['id'] for row in rows], 'entries')}")
        return rows[0]

    def _medians(self, graph: str = "") -> dict[tuple[str, str], dict[str, float]]:
        """Return the newest medians by entry and deployment, of one graph or of all."""
        measurement = tables.Measurement
        key = (measurement.environment, measurement.graph, measurement.deployment)
        newest = sa.select(sa.func.max(measurement.id)).group_by(*key)
        if graph:
            newest = newest.where(measurement.graph == graph)
        medians: dict[tuple[str, str], dict[str, float]] = {}
        for row in self.rows(sa.select(*key, measurement.median_us).where(measurement.id.in_(newest))):
            medians.setdefault((row["environment"], row["graph"]), {})[row["deployment"]] = row["median_us"]
        return medians

    def _entry(self, facts: dict[str, Any], medians: dict[tuple[str, str], dict[str, float]]) -> CachedEntry:
        facts["final"] = bool(facts["final"])
        facts["sizes"] = [int(size) for size in facts["sizes"].split(",") if size]
        return CachedEntry(facts, medians.get((facts["environment"], facts["graph"]), {}), self.is_spool)

    def rows(self, query: sa.Select[*tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Return the rows of a query; raises CommandError if the file cannot be read."""
        return self.read(lambda connection: rows_of(connection, query))

    def read(self, action: Callable[[sa.Connection], _T]) -> _T:
        """Return the result of `action` in one read transaction; raises CommandError if the file cannot be read."""
        try:
            with self._engine.connect() as connection:
                connection.exec_driver_sql("BEGIN")  # sqlite3 begins nothing before a SELECT
                return action(connection)
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
            raise CommandError(f"{self._path}: cannot be read: {cause}; {self._remedy()}") from error

    def _remedy(self) -> str:
        with contextlib.suppress(sa.exc.DBAPIError, sqlite3.Error), self._engine.connect() as connection:
            version = connection.exec_driver_sql("PRAGMA user_version").scalar_one()
            if 0 < version < offline.DATABASE_VERSION:
                return f"it is of version {version}, and `pygraphd start` sets it aside"
        return "`pygraphd start` sets a damaged file aside"


def check_prefix(prefix: str) -> None:
    """Raise UsageError if `prefix` cannot begin an id or a digest, since it is not hexadecimal."""
    if not DIGITS.fullmatch(prefix):
        raise UsageError(f"{prefix}: {NOT_FOUND}")


def only_graph(prefix: str, digests: set[str]) -> str | None:
    """Return the only one of some graph digests, None if there are none; raises UsageError if there are several."""
    if len(digests) > 1:
        raise UsageError(f"{prefix}: {_ambiguous(sorted(digests), 'graphs')} or of a GRAPH")
    return next(iter(digests), None)


def _columns(table: type[tables.Base]) -> Sequence[sa.ColumnElement[Any]]:
    return list(sa.inspect(table).columns)


def _select_entries() -> sa.Select[*tuple[Any, ...]]:
    return (
        sa.select(*_ENTRY)
        .join(tables.Environment, tables.Decision.environment == tables.Environment.id)
        .join(tables.Graph, tables.Decision.graph == tables.Graph.digest)
    )


def _begins_with(prefix: str) -> sa.ColumnElement[bool]:
    text = prefix.lower()
    return sa.or_(
        tables.Decision.id.startswith(text, autoescape=True),
        tables.Decision.graph.startswith(text, autoescape=True),
    )


def _ambiguous(digests: list[str], what: str) -> str:
    shown = ", ".join(digest[:12] for digest in digests[:5])
    more = ", ..." if len(digests) > 5 else ""
    return f"begins the id or graph of {len(digests)} {what} ({shown}{more}): give more digits of an ID"
