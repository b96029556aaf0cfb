"""Reads the team's records of some graphs, and checks them like a file that is imported.

Anybody who may publish may have written a row. So the server cuts text off beyond the longest valid length, and few rows of a graph are read.
A row that is not valid hides none of another publisher's.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pygraphd.daemon.rederiving import decision_of, measurement_of
from pygraphd.daemon.team import tables
from pygraphd.schema.checks import InvalidMessageError, check_digest
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Deployment, Graph, Kind, Origin, Record
from pygraphd.schema.portable import TEAM, Portable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pygraphd.daemon.team.wanted import Batch

RECORDS, RECORDS_OF_ONE = 8, 3
"""Records of one graph that are read, the latest of all, and of one publisher."""
_Row = dict[str, Any]
_LONGEST = {
    "detail": tables.MAX_DETAIL,
    "against_detail": tables.MAX_DETAIL,
    "sizes": tables.MAX_SIZES_TEXT,
}


@dataclass(frozen=True, slots=True)
class Fetched:
    """The records found, one for each graph at most, and the number of those that were not valid."""

    entries: tuple[Portable, ...]
    invalid: int


def fetch(connection: sa.Connection, batch: Batch) -> Fetched:
    """Return the latest valid record of each graph."""
    asked = {"environment": batch.environment, "graphs": list(batch.graphs)}
    rows = [dict(row) for row in connection.execute(_SELECTED, asked).mappings()]
    found: dict[str, Portable] = {}
    invalid = 0
    for record in _by_record(rows):
        graph = str(record[0]["graph"])
        if graph in found:
            continue
        try:
            found[graph] = _entry(batch.environment, record)
        except (
            ValueError,
            TypeError,
        ):  # a deployment that is none, a number that is infinite, a column that is NULL
            invalid += 1
    return Fetched(tuple(found.values()), invalid)


def _by_record(rows: Iterable[_Row]) -> list[list[_Row]]:
    """Return the rows of each record, one for each measurement, the latest record of a graph first."""
    records: dict[tuple[object, object], list[_Row]] = {}
    for row in rows:
        records.setdefault((row["id"], row["publisher"]), []).append(row)
    return list(records.values())


def _entry(environment: str, rows: Sequence[_Row]) -> Portable:
    row = rows[0]
    check_digest("graph", row["graph"])
    factors = {field.name: row[field.name] for field in dataclasses.fields(Environment)}
    found = Environment(**factors)
    # Else a publisher could have the timings of another GPU found under this one's key.
    if found.digest() != environment:
        raise InvalidMessageError("environment: its factors are not those of its digest")
    origin = Origin(f"{TEAM}{row['publisher']}@{row['host']}"[:256], row["version"])
    record = Record(_graph(row), decision_of(row), tuple(map(_measurement, rows)))
    if Deployment(row["deployment"]) not in {each.deployment for each in record.measurements}:
        raise InvalidMessageError("measurements: none of the chosen deployment")
    return Portable(found, origin, record, row["measured_at"])


def _graph(row: Mapping[str, Any]) -> Graph:
    sizes = tuple(int(size) for size in row["sizes"].split(",") if size)
    facts = row["partition"], row["partitions"], row["operators"]
    return Graph(row["graph"], Kind(row["kind"]), *facts, sizes, row["whole"])


def _measurement(row: Mapping[str, Any]) -> Any:
    return measurement_of({**row, "deployment": row["measured_deployment"]})


def _bounded(column: Any) -> Any:
    """Return a column whose text ends one character after the longest valid one."""
    if not isinstance(column.type, sa.Text):
        return column
    # One more than is valid: a text that was cut off must still be refused, and not pass for a shorter one.
    return sa.func.left(column, _LONGEST.get(column.name, tables.MAX_TEXT) + 1).label(column.name)


def _selection() -> sa.Select[*tuple[Any, ...]]:
    decision, measurement, graph = tables.decision, tables.measurement, tables.graph
    # Each publisher of a graph has one row of `graph`, and its latest decisions are the end of a range of the index. So the
    # statement costs the same however many rows somebody has added.
    latest = (
        sa.select(decision)
        .where(
            decision.c.environment == sa.bindparam("environment"),
            decision.c.graph == graph.c.digest,
            decision.c.publisher == graph.c.publisher,
        )
        .order_by(decision.c.published_at.desc())
        .limit(RECORDS_OF_ONE)
        .lateral()
    )
    place = sa.func.row_number().over(
        partition_by=latest.c.graph, order_by=[latest.c.published_at.desc(), latest.c.id]
    )
    few = (
        sa.select(
            latest, *(column for column in graph.columns if column.name not in _KEYS), place.label("place")
        )
        .select_from(graph.join(latest, sa.true()))
        .where(graph.c.digest.in_(sa.bindparam("graphs", expanding=True)))
        .subquery()
    )
    columns = [
        *(_bounded(column) for column in few.columns if column.name != "place"),
        *(_bounded(column) for column in tables.environment.columns if column.name not in _KEYS),
        *(column for column in measurement.columns if column.name not in {*_KEYS, "deployment"}),
        measurement.c.deployment.label("measured_deployment"),
    ]
    query = sa.select(*columns).select_from(few)
    for table, key, name in (
        (tables.environment, few.c.environment, "id"),
        (measurement, few.c.id, "decision"),
    ):
        query = query.join(table, (table.c[name] == key) & (table.c.publisher == few.c.publisher))
    known = measurement.c.deployment.in_([each.value for each in Deployment])
    return query.where(few.c.place <= RECORDS, known).order_by(few.c.graph, few.c.place)


_KEYS = frozenset({"id", "digest", "publisher", "decision"})
_SELECTED = _selection()
