"""Converts rows of entries to records for other daemons: those of an exported file, or of a team."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pygraphd.daemon import tables
from pygraphd.daemon.queries import row_place, rows_of, weighed
from pygraphd.daemon.rederiving import decision_of, measurement_of
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Graph, Kind, Origin, Record
from pygraphd.schema.portable import Portable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.daemon.queries import Key
    from pygraphd.daemon.rederiving import Row


def entries(
    connection: sa.Connection, where: sa.ColumnElement[bool]
) -> tuple[list[dict[str, Any]], dict[Key, list[Row]]]:
    """Return the rows of some decisions with graph and environment, and the measurements that each rests on, in the caller's transaction."""
    return rows_of(connection, _selected(where)), weighed(connection, where)


def _selected(where: sa.ColumnElement[bool]) -> sa.Select[*tuple[Any, ...]]:
    decision, environment, of = tables.Decision, tables.Environment, tables.Graph
    columns = [
        row_place,
        *sa.inspect(decision).columns,
        *(each for each in sa.inspect(environment).columns if each.name != "id"),
        *(each for each in sa.inspect(of).columns if each.name != "digest"),
    ]
    query = sa.select(*columns).join_from(decision, environment, decision.environment == environment.id)
    return query.join(of, decision.graph == of.digest).where(where)


def portable(row: Row, measured: Sequence[Row]) -> Portable:
    """Return the entry that a row and its measurements make; raises InvalidMessageError for one that is not valid, or not final."""
    try:
        return _portable(row, measured)
    except InvalidMessageError:
        raise
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        # Tables without types hold anything.
        raise InvalidMessageError(str(error)) from error


def _portable(row: Row, measured: Sequence[Row]) -> Portable:
    if row["measured_at"] is not None and not measured:
        raise InvalidMessageError("measured_at: what was measured then is gone")
    environment = Environment(**{field.name: row[field.name] for field in dataclasses.fields(Environment)})
    # Versions are stored with measurements, so a decision by rule has none.
    origin = Origin(row["host"], measured[0]["version"] if measured else "")
    return Portable(environment, origin, _record(row, measured), row["measured_at"])


def _record(row: Row, measured: Sequence[Row]) -> Record:
    sizes = tuple(int(size) for size in row["sizes"].split(",") if size)
    facts = row["partition"], row["partitions"], row["operators"]
    return Record(
        Graph(row["graph"], Kind(row["kind"]), *facts, sizes, row["whole"]),
        decision_of(row),
        tuple(measurement_of(each) for each in measured),
        row["recording_us"],
    )
