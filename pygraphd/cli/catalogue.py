"""The entries of a cache for people, read from the database file, with or without a daemon."""

from __future__ import annotations

import functools
import itertools
import json
import sqlite3
from array import array
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from pygraphd.cli import row_checks
from pygraphd.cli.entries import CachedEntry, EntryDetails, Page
from pygraphd.cli.output import complain
from pygraphd.daemon import database_files, tables
from pygraphd.daemon.queries import row_place, rows_of
from pygraphd.daemon.rederiving import NOT_VALID
from pygraphd.daemon.statements import Statement
from pygraphd.errors import CommandError, DatabaseError, UsageError
from pygraphd.schema import offline
from pygraphd.schema.checks import InvalidMessageError, check_digest
from pygraphd.schema.keys import DIGITS
from pygraphd.schema.messages import Deployment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_T = TypeVar("_T")

PAGE_ROWS = 500
"""Entries read in one transaction: neither memory nor the daemon's log grows with the length of a listing."""
_CACHE_KIB = 16_384
"""Enough for the inner pages of a million entries' indices: with SQLite's own 2 MB a listing takes three times as long."""
_DIGEST_DIGITS = 64
_MOST_AMBIGUOUS = 100
"""Entries or graphs that are looked for behind one prefix."""
NOT_FOUND = "no entry has an id or graph that begins so; see: pygraphd cache inspect"
NO_DIGITS = "no id or graph begins so: each has 64 digits of 0-9 and a-f; see: pygraphd cache inspect"

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
    tables.Decision.host,
    tables.Decision.created_at,
    tables.Decision.measured_at,
    tables.Decision.hits,
    tables.Decision.last_hit,
    tables.Decision.environment,
    tables.Environment.gpu,
)


def _newest_median(deployment: str) -> sa.Label[float | None]:
    measurement = tables.Measurement
    query = sa.select(measurement.median_us).where(
        measurement.environment == tables.Decision.environment,
        measurement.graph == tables.Decision.graph,
        measurement.deployment == deployment,
    )
    # By the index `measurement_by_deployment`, which ends in the id: no other row is read.
    newest = query.order_by(measurement.id.desc()).limit(1).correlate(tables.Decision)
    return newest.scalar_subquery().label(f"{_MEDIAN}{deployment}")


_MEDIAN = "median of "
_MEDIANS = tuple(_newest_median(deployment) for deployment in Deployment)
_MEDIAN_NAMES = {deployment.value: f"{_MEDIAN}{deployment}" for deployment in Deployment}


class Catalogue:
    """An open, read-only view of one database file; raises CommandError where that cannot be read."""

    is_spool = False
    is_shipped = False

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise CommandError(f"{path}: there is no cache yet; it is made when the daemon first starts")
        self._path = path
        self._invalid = 0
        self._engine = sa.create_engine("sqlite://", creator=lambda: _connected(path))

    def __enter__(self) -> Catalogue:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and say how many rows were not shown."""
        self._engine.dispose()
        # In the end, and so not between two lines of a listing.
        if self._invalid:
            rows = f"{self._invalid} row{'s' if self._invalid > 1 else ''}"
            complain(f"pygraphd: {self._path}: {rows} left out, since {NOT_VALID}")

    def pages(self, gpu: str = "", graph: str = "", most: int | None = None) -> Iterator[Page]:
        """Yield the entries whose GPU name contains `gpu` and whose graph digest begins with `graph`, newest first.

        They come `PAGE_ROWS` at a time, `most` at most.
        """
        first = self.places(gpu, graph, newest_first=True, most=min(PAGE_ROWS, most or PAGE_ROWS))
        if first:
            yield self._page(first)
        if len(first) < PAGE_ROWS or most == PAGE_ROWS:
            return
        # Only now, as to sort all of them takes longer than to find the newest.
        shown, places = set(first), self.places(gpu, graph, newest_first=True, most=most)
        others = (place for place in places if place not in shown)
        while some := list(itertools.islice(others, PAGE_ROWS)):
            yield self._page(some)

    def _page(self, places: Sequence[int]) -> Page:
        """Return the entries in some rows, in this order, without those that were deleted meanwhile."""
        found = {row[0]: row for row in self.read_repeatable(functools.partial(_rows_at, places=places))}
        rows = [found[place] for place in places if place in found]
        # Without a row there are no columns either, and names would be left over.
        columns = dict(zip(_PAGE_NAMES, zip(*rows, strict=True), strict=bool(rows)))
        medians = {name: columns.pop(column, ()) for name, column in _MEDIAN_NAMES.items()}
        columns.pop(_PLACE, None)
        if rows and (facts := row_checks.entries(columns, medians)) is not None:
            return Page(facts, medians, self.is_shipped)
        # One by one, to find out which of them are not valid.
        entries = self._valid(self._entry, [dict(zip(_PAGE_NAMES, row, strict=True)) for row in rows])
        return Page.of(entries, shipped=self.is_shipped)

    def places(
        self, gpu: str, graph: str, *, newest_first: bool = False, most: int | None = None
    ) -> Sequence[int]:
        """Return the row numbers of the entries that are selected, by time: 8 bytes each, whatever their number."""
        decision = tables.Decision
        query = sa.select(row_place).select_from(decision)
        if gpu:
            # With `autoescape`, a percent sign or an underscore in a name stands for itself.
            name = tables.Environment.gpu.icontains(gpu, autoescape=True)
            query = query.where(decision.environment.in_(sa.select(tables.Environment.id).where(name)))
        if graph:
            query = query.where(_begins(decision.graph, graph))
        # Then by row, so that entries of one moment come in the same order each time.
        order = (
            (decision.created_at.desc(), row_place.desc())
            if newest_first
            else (decision.created_at, row_place)
        )
        # By the driver itself, since SQLAlchemy takes three times as long for the rows.
        statement = Statement(query.order_by(*order).limit(most))
        return self.read(
            lambda connection: array("q", itertools.chain.from_iterable(statement.run(connection, {})))
        )

    def gpus(self) -> set[str]:
        """Return the names of the GPUs that have entries."""
        has_entries = sa.exists().where(tables.Decision.environment == tables.Environment.id)
        query = sa.select(tables.Environment.gpu).where(has_entries).distinct()
        return {str(row["gpu"]) for row in self.rows(query)}  # tables without types hold anything

    def has(self, prefix: str) -> bool:
        """Return whether the id or graph digest of any entry begins with `prefix`."""
        return bool(self.rows(sa.select(tables.Decision.id).where(_begins_with(prefix)).limit(1)))

    def show(self, prefix: str) -> EntryDetails:
        """Return the one entry with an id or graph digest that begins with `prefix`; raises UsageError if there is none or several."""
        row = self._row(prefix)
        try:
            return self._details(self._entry(row))
        except InvalidMessageError as error:
            raise CommandError(f"{prefix}: {NOT_VALID}: {error}") from error

    def of_graph(self, graph: str) -> list[EntryDetails]:
        """Return the entries of one graph (its whole digest), one for each environment, newest first."""
        return self._all_details(tables.Decision.graph == graph)

    def of_prefix(self, prefix: str) -> list[EntryDetails]:
        """Return the entries with an id or graph digest that begins with `prefix`, newest first; raises UsageError for several graphs."""
        graphs = (
            sa.select(tables.Decision.graph).where(_begins_with(prefix)).distinct().limit(_MOST_AMBIGUOUS)
        )
        found = only_graph(prefix, {row["graph"] for row in self.rows(graphs)})
        return [] if found is None else self._all_details(_begins_with(prefix))

    def _all_details(self, where: sa.ColumnElement[bool]) -> list[EntryDetails]:
        query = _select_entries().where(where)
        rows = self.rows(query.order_by(tables.Decision.created_at.desc(), tables.Decision.id))
        return self._valid(lambda row: self._details(self._entry(row)), rows)

    def _valid(self, made: Callable[[dict[str, Any]], _T], rows: Sequence[dict[str, Any]]) -> list[_T]:
        """Return the entries of rows, without rows that the daemon could not have stored."""
        valid = []
        for row in rows:
            try:
                valid.append(made(row))
            except InvalidMessageError:
                self._invalid += 1
        return valid

    def _details(self, entry: CachedEntry) -> EntryDetails:
        environment, graph = entry.facts["environment"], entry.facts["graph"]
        factors = self.rows(
            sa.select(*_columns(tables.Environment)).where(tables.Environment.id == environment)
        )
        measured = sa.select(*_columns(tables.Measurement)).where(
            tables.Measurement.environment == environment, tables.Measurement.graph == graph
        )
        rows = self._valid(row_checks.measurement, self.rows(measured.order_by(tables.Measurement.id.desc())))
        return EntryDetails(entry, row_checks.environment(factors[0]), rows)

    def id_of(self, prefix: str) -> str:
        """Return the id of the one entry with an id or graph digest that begins with `prefix`; raises UsageError if there is none or several.

        Raises CommandError if what is stored for an id is none.
        """
        id_ = self._row(prefix)["id"]
        try:
            return check_digest("id", id_)
        except InvalidMessageError as error:
            remedy = "`cache clear` and `cache prune` can delete it"
            raise CommandError(f"{prefix}: {NOT_VALID}: {error}, got {id_!r:.80}; {remedy}") from error

    def _row(self, prefix: str) -> dict[str, Any]:
        rows = self.rows(_select_entries().where(_begins_with(prefix)).limit(_MOST_AMBIGUOUS))
        if not rows:
            raise UsageError(f"{prefix}: {NOT_FOUND}")
        if len(rows) > 1:
            raise UsageError(f"{prefix}: {_ambiguous([row['id'] for row in rows], 'entries')}")
        return rows[0]

    def _entry(self, facts: dict[str, Any]) -> CachedEntry:
        medians = [(name, facts.pop(column)) for name, column in _MEDIAN_NAMES.items()]
        facts.pop(_PLACE, None)
        known = {name: median for name, median in medians if median is not None}
        return CachedEntry(row_checks.entry(facts, known), known, self.is_spool, self.is_shipped)

    def rows(self, query: sa.Select[*tuple[Any, ...]]) -> list[dict[str, Any]]:
        """Return the rows of a query; raises CommandError if the file cannot be read."""
        return self.read(lambda connection: rows_of(connection, query))

    def read(self, action: Callable[[sa.Connection], _T]) -> _T:
        """Return the result of `action`, which is called once, in one read transaction; raises CommandError if the file cannot be read."""
        try:
            with self._engine.connect() as connection:
                connection.exec_driver_sql("BEGIN")  # sqlite3 begins nothing before a SELECT
                return action(connection)
        # SQLAlchemy wraps the driver's errors, but not those of statements that are run by the driver itself.
        except (sa.exc.DBAPIError, sqlite3.Error) as error:
            cause = error.orig if isinstance(error, sa.exc.DBAPIError) else error
            raise DatabaseError(database_files.why_unreadable(self._path, cause)) from error

    def read_repeatable(self, action: Callable[[sa.Connection], _T]) -> _T:
        """Return the result of `action` as `read` does, but faster. `action` is called twice where a text is not UTF-8."""
        return self.read(lambda connection: _decoded_in_c(connection, action))


def _connected(path: Path) -> sqlite3.Connection:
    connection = offline.connect(path)
    # One row whose text is not UTF-8 would raise in sqlite3, and hide all others.
    connection.text_factory = lambda data: data.decode(errors="replace")
    connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
    return connection


def _decoded_in_c(connection: sa.Connection, action: Callable[[sa.Connection], _T]) -> _T:
    """Return the result of `action`, with no call of Python's for each text; once more with these if one is not UTF-8."""
    driver = connection.connection.driver_connection
    assert isinstance(driver, sqlite3.Connection)
    replacing, driver.text_factory = driver.text_factory, str
    try:
        return action(connection)
    except (sa.exc.DBAPIError, sqlite3.OperationalError) as error:
        # sqlite3 has no class or code of its own for text that is not UTF-8.
        if "decode" not in str(error):
            raise
    finally:
        driver.text_factory = replacing
    return action(connection)


def _rows_at(connection: sa.Connection, places: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return the rows of `_PAGE` in some places, in any order."""
    return _PAGE.run(connection, {"places": json.dumps(list(places))}).fetchall()


def is_prefix(text: str) -> bool:
    """Return whether an id or a digest can begin with `text`."""
    return DIGITS.fullmatch(text) is not None and len(text) <= _DIGEST_DIGITS


def check_prefix(prefix: str) -> None:
    """Raise UsageError if `prefix` cannot begin an id or a digest, or is empty, which each of them begins with."""
    if not prefix:
        raise UsageError("an ID is empty, which would name any entry; give the first digits of one")
    if not is_prefix(prefix):
        raise UsageError(f"{prefix}: {NO_DIGITS}")


def only_graph(prefix: str, digests: set[str]) -> str | None:
    """Return the only one of some graph digests, None if there are none; raises UsageError if there are several."""
    if len(digests) > 1:
        # By their text: tables without types may hold values that cannot be compared.
        raise UsageError(f"{prefix}: {_ambiguous(sorted(digests, key=str), 'graphs')} or of a GRAPH")
    return next(iter(digests), None)


def _columns(table: type[tables.Base]) -> Sequence[sa.ColumnElement[Any]]:
    return list(sa.inspect(table).columns)


def _select_entries(*more: sa.ColumnElement[Any]) -> sa.Select[*tuple[Any, ...]]:
    return (
        sa.select(*more, *_ENTRY, *_MEDIANS)
        .join_from(tables.Decision, tables.Environment, tables.Decision.environment == tables.Environment.id)
        .join(tables.Graph, tables.Decision.graph == tables.Graph.digest)
    )


_PAGE = Statement(
    _select_entries(row_place).where(
        # One parameter for any number of rows, so that the statement is compiled once.
        sa.text("decision.rowid IN (SELECT value FROM json_each(:places))"),
    )
)
_PLACE = "place"
_PAGE_NAMES = (_PLACE, *(column.key for column in _ENTRY), *_MEDIAN_NAMES.values())


def _begins(column: sa.orm.InstrumentedAttribute[str], prefix: str) -> sa.ColumnElement[bool]:
    # Not LIKE, which reads every row: no index serves it where it has an escape character.
    text = prefix.lower()
    return (column >= text) & (column < f"{text}g")  # the first text behind all that goes on with hex digits


def _begins_with(prefix: str) -> sa.ColumnElement[bool]:
    by_id, by_graph = (
        sa.select(tables.Decision.id).where(_begins(column, prefix))
        for column in (tables.Decision.id, tables.Decision.graph)
    )
    # Not OR beside the joins, where SQLite may begin with the environments and read all their entries.
    return tables.Decision.id.in_(by_id.union(by_graph))


def _ambiguous(digests: list[str], what: str) -> str:
    shown = ", ".join(str(digest)[:12] for digest in digests[:5])  # tables without types hold anything
    more = ", ..." if len(digests) > 5 else ""
    count = f"{len(digests)} or more" if len(digests) >= _MOST_AMBIGUOUS else len(digests)
    return f"begins the id or graph of {count} {what} ({shown}{more}): give more digits of an ID"
