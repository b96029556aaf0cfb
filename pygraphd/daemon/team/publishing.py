"""Insert a daemon's records into the team's tables. Rows that are there already stay as they are."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pygraphd.daemon import queries
from pygraphd.daemon.team import tables
from pygraphd.schema.messages import RecordRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pygraphd.daemon.team.queue import Publication

BATCH_RECORDS = 64
"""Records inserted in one transaction."""
_Row = dict[str, Any]


def publish(connection: sa.Connection, batch: Sequence[Publication]) -> int:
    """Insert records, their graphs and environments; return the number of records that were not there yet."""
    environments: dict[str, _Row] = {}
    graphs: dict[str, _Row] = {}
    decisions: dict[str, _Row] = {}
    measurements: list[_Row] = []
    for each in batch:
        environment, graph = each.entry.key
        environments[environment] = {"id": environment, **each.entry.environment.factors()}
        graphs[graph] = queries.graph_row(each.entry.record)
        decisions[each.id] = _decision(each)
        measurements += [
            {"decision": each.id, **dataclasses.asdict(measured), "deployment": measured.deployment.value}
            for measured in each.entry.record.measurements
        ]
    # In the order of the foreign keys.
    _add(connection, tables.environment, environments.values(), "id")
    _add(connection, tables.graph, graphs.values(), "digest")
    added = _add(connection, tables.decision, decisions.values(), "id")
    _add(connection, tables.measurement, measurements, "decision")
    return added


def _decision(published: Publication) -> _Row:
    entry = published.entry
    request = RecordRequest(entry.environment, entry.origin, (entry.record,))
    at = entry.measured_at or 0.0
    row = queries.decision_row(entry.key[0], entry.record, request, published.uid, at, at)
    names = {column.name for column in tables.decision.columns}
    return {
        **{name: value for name, value in row.items() if name in names},
        "id": published.id,
        "version": entry.origin.version,
        "job": entry.origin.job,
    }


def _add(connection: sa.Connection, table: sa.Table, rows: Iterable[_Row], order: str) -> int:
    # In one order for all: of two that insert the same rows, none then waits for a row of the other's that waits for it.
    ordered = sorted(rows, key=lambda row: (row[order], row.get("deployment", "")))
    columns = {name: [row[name] for row in ordered] for name in _names(table)}
    # Without the option, SQLAlchemy tells no number of inserted rows.
    options = {"preserve_rowcount": True}
    return connection.execute(_inserts(table), columns, execution_options=options).rowcount


def _names(table: sa.Table) -> list[str]:
    """Return the columns that are not the server's to fill in."""
    return [column.name for column in table.columns if column.server_default is None]


@functools.cache
def _inserts(table: sa.Table) -> sa.TextClause:
    """Return the statement that inserts rows given as a list for each column: for any number of them, it is made and planned once."""
    names = _names(table)
    lists = ", ".join(f"CAST(:{name} AS {_type(table.columns[name])}[])" for name in names)
    quoted = ", ".join(f'"{name}"' for name in names)
    return sa.text(
        f"INSERT INTO {table.fullname} ({quoted}) SELECT * FROM unnest({lists}) ON CONFLICT DO NOTHING"
    )


def _type(column: sa.Column[Any]) -> str:
    return "double precision" if isinstance(column.type, sa.Double) else str(column.type)
