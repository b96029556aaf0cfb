"""SQL statements of the store, each for one open transaction: messages to rows, and the queries. `store` handles faults and files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from pygraphd.daemon import tables
from pygraphd.daemon.rederiving import rederive
from pygraphd.daemon.statements import Statement
from pygraphd.schema.keys import entry_id
from pygraphd.schema.messages import RecordRequest
from pygraphd.schema.portable import HOST_PREFIXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pygraphd.daemon.pruning import PruneRequest
    from pygraphd.daemon.rederiving import Outcome, Row
    from pygraphd.schema.messages import Decision, Deployment, Record
    from pygraphd.schema.portable import Portable

_T = TypeVar("_T")

KEPT_MEASUREMENTS = 32
"""Newest measurements kept for each deployment of an entry, beside those that its decision rests on."""
CHUNK = 64
"""Entries changed in one transaction: few, so that the log of a nearly full disk stays small, and nobody waits for long."""
SCANNED = 2000
"""Rows looked at in one transaction of a prune."""

row_place = sa.literal_column("decision.rowid", sa.Integer()).label("place")
"""The number of an entry's row, in whose order the file can be read piece by piece."""
Key = tuple[str, str]
"""(environment digest, graph digest)."""


def record(
    connection: sa.Connection, request: RecordRequest, uid: int, now: float, measured_at: float | None = None
) -> None:
    """Store a request's records with their graphs and environment; `measured_at` is `now` unless it is given.

    A record whose measurements are stored already is passed over: a client that waited too long for an answer leaves it in the spool, too.
    """
    at = now if measured_at is None else measured_at
    environment = request.environment.digest()
    _ADD_ENVIRONMENT.run(connection, {"id": environment, **request.environment.factors()})
    decided = _decided(connection, environment, request)
    for record in request.records:
        decision = decision_row(environment, record, request, uid, now, at)
        rows = _measurement_rows(environment, record, request, uid, at)
        if rows and _is_decided(decision, decided.get(record.graph.digest)) and _are_stored(connection, rows):
            continue
        _ADD_GRAPH.run(connection, graph_row(record))
        _UPSERT_DECISION.run(connection, decision)
        _ADD_MEASUREMENT.run_each(connection, rows)
        _DROP_OLD_MEASUREMENTS.run_each(connection, rows)


def fill(connection: sa.Connection, rows: Iterable[Portable], uid: int) -> None:
    """Store entries, of which no two have one key, in an empty database: all at a time, which `record` is too slow for."""
    environments, graphs = {}, {}
    decisions: list[dict[str, Any]] = []
    measurements: list[dict[str, Any]] = []
    for row in rows:
        (environment, graph), at = row.key, row.measured_at or 0.0
        environments[environment] = {"id": environment, **row.environment.factors()}
        graphs[graph] = graph_row(row.record)
        request = RecordRequest(row.environment, row.origin, (row.record,))
        decisions.append(decision_row(environment, row.record, request, uid, at, at))
        measurements += _measurement_rows(environment, row.record, request, uid, at)
    tables_and_rows = (
        (tables.Environment, list(environments.values())),
        (tables.Graph, list(graphs.values())),
        (tables.Decision, decisions),
        (tables.Measurement, measurements),
    )
    for table, values in tables_and_rows:
        if values:
            connection.execute(sa.insert(table), values)


def _decided(
    connection: sa.Connection, environment: str, request: RecordRequest
) -> dict[str, Mapping[str, Any]]:
    """Return the stored decisions for the graphs of a request, by graph."""
    graphs = json.dumps([record.graph.digest for record in request.records])
    cursor = _DECISIONS.run(connection, {"environment": environment, "graphs": graphs})
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor]
    return {row["graph"]: row for row in rows}


def _is_decided(decision: dict[str, Any], stored: Mapping[str, Any] | None) -> bool:
    return stored is not None and all(
        stored[name] == decision[name] for name in decision.keys() - _TIMES_AND_HITS
    )


def _are_stored(connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> bool:
    # Two measurements never agree in the last digit of each figure.
    return all(_IS_MEASURED.run(connection, row).fetchone()[0] for row in rows)


def graph_row(record: Record) -> dict[str, Any]:
    """Return the row of a record's graph."""
    graph = record.graph
    return {
        "digest": graph.digest,
        "kind": graph.kind.value,
        "partition": graph.partition,
        "partitions": graph.partitions,
        "operators": graph.operators,
        "sizes": ",".join(map(str, graph.sizes)),
        "whole": graph.whole,
    }


def decision_row(
    environment: str, record: Record, request: RecordRequest, uid: int, now: float, measured_at: float
) -> dict[str, Any]:
    """Return the row of the decision in one of a request's records."""
    decision = record.decision
    return {
        "id": entry_id(environment, record.graph.digest),
        "environment": environment,
        "graph": record.graph.digest,
        "deployment": decision.deployment.value,
        **_reason_columns(decision),
        "policy": decision.policy,
        "final": int(decision.final),
        "calls": decision.calls,
        "uid": uid,
        "created_at": now,
        "hits": 0,
        "last_hit": None,
        "host": request.origin.host,
        "measured_at": measured_at if record.measurements else None,
        "recording_us": record.recording_us,
        **_costs([dataclasses.asdict(each) for each in record.measurements], decision.deployment),
    }


def _costs(measured: Iterable[Mapping[str, Any]], chosen: Deployment) -> dict[str, float | None]:
    """Return the columns of a decision that have the costs of the chosen deployment, as last measured."""
    costs = {each["deployment"]: each for each in measured}.get(chosen, {})
    return dict(zip(tables.COST_COLUMNS, map(costs.get, ("median_us", "host_us", "span_us")), strict=True))


def _reason_columns(decision: Decision) -> dict[str, str]:
    return {
        "reason": decision.reason.code.value,
        "detail": decision.reason.detail,
        "against": decision.against.code.value,
        "against_detail": decision.against.detail,
    }


def _measurement_rows(
    environment: str, record: Record, request: RecordRequest, uid: int, measured_at: float
) -> list[dict[str, Any]]:
    return [
        {
            "environment": environment,
            "graph": record.graph.digest,
            "deployment": measurement.deployment.value,
            "samples": measurement.samples,
            "median_us": measurement.median_us,
            "mad_us": measurement.mad_us,
            "host_us": measurement.host_us,
            "span_us": measurement.span_us,
            "host_mad_us": measurement.host_mad_us,
            "span_mad_us": measurement.span_mad_us,
            "busy": measurement.busy,
            "host": request.origin.host,
            "version": request.origin.version,
            "uid": uid,
            "measured_at": measured_at,
        }
        for measurement in record.measurements
    ]


_ADD_ENVIRONMENT = Statement(insert(tables.Environment).on_conflict_do_nothing())
_graph_insert = insert(tables.Graph)
_ADD_GRAPH = Statement(
    _graph_insert.on_conflict_do_update(
        index_elements=["digest"],
        set_={"whole": _graph_insert.excluded.whole},
        # A peer that does not say of what a graph is a size must not hide that another has.
        where=tables.Graph.whole.is_(None) & _graph_insert.excluded.whole.is_not(None),
    )
)
_ADD_MEASUREMENT = Statement(
    insert(tables.Measurement),
    [column.name for column in sa.inspect(tables.Measurement).columns if column.name != "id"],
)
_DECISIONS = Statement(
    sa.text(
        "SELECT * FROM decision WHERE environment = :environment AND graph IN (SELECT value FROM json_each(:graphs))"
    )
)
_IS_MEASURED = Statement(
    sa.select(
        sa.exists().where(
            *(
                column.is_not_distinct_from(sa.bindparam(column.name))
                for column in sa.inspect(tables.Measurement).columns
                if column.name not in {"id", "measured_at"}
            )
        )
    )
)
_TIMES_AND_HITS = frozenset({"created_at", "measured_at", "hits", "last_hit"})
_KEPT = frozenset({"id", "environment", "graph", "hits", "last_hit"})
"""Columns that keep their values when a decision is replaced."""
_decision_insert = insert(tables.Decision)
_is_from_elsewhere = sa.or_(*(tables.Decision.host.startswith(prefix) for prefix in HOST_PREFIXES))
_UPSERT_DECISION = Statement(
    _decision_insert.on_conflict_do_update(
        index_elements=["environment", "graph"],
        set_={
            column.name: _decision_insert.excluded[column.name]
            for column in sa.inspect(tables.Decision).columns
            if column.name not in _KEPT
        },
        where=sa.or_(
            # A guess made because a program ended early never replaces what a longer one found out,
            _decision_insert.excluded.final >= tables.Decision.final,
            # but that is used by nobody if an older policy decided it,
            _decision_insert.excluded.policy > tables.Decision.policy,
            # and what came from elsewhere was not found out here: it was not used, or did not hold.
            _is_from_elsewhere & _decision_insert.excluded.measured_at.is_not(None),
        ),
    )
)

_rests_on = (
    sa.select(tables.Decision.measured_at)
    .where(
        tables.Decision.environment == sa.bindparam("environment"),
        tables.Decision.graph == sa.bindparam("graph"),
    )
    .scalar_subquery()
)
_older = sa.orm.aliased(tables.Measurement)
_DROP_OLD_MEASUREMENTS = Statement(
    sa.delete(tables.Measurement).where(
        tables.Measurement.environment == sa.bindparam("environment"),
        tables.Measurement.graph == sa.bindparam("graph"),
        tables.Measurement.deployment == sa.bindparam("deployment"),
        # Programs that end early add theirs for ever, and leave a final decision as it is.
        tables.Measurement.measured_at.is_distinct_from(_rests_on),
        tables.Measurement.id
        <= sa.select(_older.id)
        .where(
            _older.environment == sa.bindparam("environment"),
            _older.graph == sa.bindparam("graph"),
            _older.deployment == sa.bindparam("deployment"),
        )
        .order_by(_older.id.desc())
        .offset(KEPT_MEASUREMENTS)
        .limit(1)
        .scalar_subquery(),
    )
)

_ADD_HITS = (
    sa.update(tables.Decision)
    .where(
        tables.Decision.environment == sa.bindparam("of_environment"),
        tables.Decision.graph == sa.bindparam("of_graph"),
    )
    .values(hits=tables.Decision.hits + sa.bindparam("more"), last_hit=sa.bindparam("at"))
)


def add_hits(connection: sa.Connection, hits: Mapping[Key, tuple[int, float]]) -> None:
    """Add to entries' counts; a key without an entry is passed over."""
    rows = [
        {"of_environment": environment, "of_graph": graph, "more": count, "at": last}
        for (environment, graph), (count, last) in hits.items()
    ]
    connection.execute(_ADD_HITS, rows)


@dataclass(frozen=True, slots=True)
class Prunable:
    """Some entries that a prune deletes, and the row after which the search goes on; None: these are the last."""

    ids: Sequence[str]
    after: int | None


def prunable(
    connection: sa.Connection, request: PruneRequest, now: float, after: int, most: int = CHUNK
) -> Prunable:
    """Return the first `most` prunable entries behind the row `after` (0: all rows), looking at `SCANNED` rows at most."""
    if request.entries:
        named = sa.select(tables.Decision.id).where(tables.Decision.id.in_(request.entries))
        return Prunable(list(connection.scalars(named)), None)
    scanned = sa.select(row_place).select_from(tables.Decision).where(row_place > after).order_by(row_place)
    # By rows and not by matches, or a filter that few entries match would have all read in one transaction.
    last = connection.scalar(sa.select(sa.func.max(scanned.limit(SCANNED).subquery().c.place)))
    if last is None:
        return Prunable((), None)
    query = (
        sa.select(row_place, tables.Decision.id)
        .join(tables.Environment, tables.Decision.environment == tables.Environment.id)
        .where(row_place > after, row_place <= last, *_selected(request, now))
    )
    found = connection.execute(query.order_by(row_place).limit(most)).all()
    return Prunable([id_ for _, id_ in found], found[-1][0] if len(found) == most else last)


def _selected(request: PruneRequest, now: float) -> list[sa.ColumnElement[bool]]:
    where: list[sa.ColumnElement[bool]] = []
    if request.older_than_s:
        last_use = sa.func.max(tables.Decision.created_at, sa.func.coalesce(tables.Decision.last_hit, 0.0))
        where.append(last_use < now - request.older_than_s)
    if request.gpu:
        where.append(tables.Environment.gpu.icontains(request.gpu, autoescape=True))
    return where


def _of_entries(ids: Sequence[str]) -> sa.ColumnElement[bool]:
    keys = sa.select(tables.Decision.environment, tables.Decision.graph).where(tables.Decision.id.in_(ids))
    return sa.tuple_(tables.Measurement.environment, tables.Measurement.graph).in_(keys)


_COUNT_MEASUREMENTS = Statement(
    sa.text(
        "SELECT count(*) FROM measurement WHERE (environment, graph) IN"
        " (SELECT environment, graph FROM decision WHERE id IN (SELECT value FROM json_each(:ids)))"
    )
)


def count_measurements(connection: sa.Connection, ids: Sequence[str]) -> int:
    """Return the number of measurements of some entries."""
    return int(_COUNT_MEASUREMENTS.run(connection, {"ids": json.dumps(list(ids))}).fetchone()[0])


def chunks(ids: Sequence[_T], length: int = CHUNK) -> list[Sequence[_T]]:
    """Return ids in portions for one transaction each."""
    return [ids[start : start + length] for start in range(0, len(ids), length)]


def delete_entries(connection: sa.Connection, ids: Sequence[str]) -> None:
    """Delete entries, their measurements, and the graphs that no other entry names."""
    graphs = list(
        connection.scalars(sa.select(tables.Decision.graph).where(tables.Decision.id.in_(ids)).distinct())
    )
    # Before the decisions, by which they are found.
    connection.execute(sa.delete(tables.Measurement).where(_of_entries(ids)))
    connection.execute(sa.delete(tables.Decision).where(tables.Decision.id.in_(ids)))
    _delete_unnamed_graphs(connection, graphs)


def _delete_unnamed_graphs(connection: sa.Connection, digests: Sequence[str]) -> None:
    """Delete those of some graphs that neither an entry nor a measurement without a decision names."""
    # Foreign keys are enforced: a graph that is still named would end the whole transaction.
    named = sa.or_(
        *(
            sa.exists().where(table.graph == tables.Graph.digest)
            for table in (tables.Decision, tables.Measurement)
        )
    )
    for some in chunks(digests):
        connection.execute(sa.delete(tables.Graph).where(tables.Graph.digest.in_(some), ~named))


def delete_unnamed_environments(connection: sa.Connection) -> None:
    """Delete the environments that no entry names any more, with measurements there that have no decision."""
    named = sa.exists().where(tables.Decision.environment == tables.Environment.id)
    for unnamed in list(connection.scalars(sa.select(tables.Environment.id).where(~named))):
        strays = tables.Measurement.environment == unnamed
        graphs = list(connection.scalars(sa.select(tables.Measurement.graph).where(strays).distinct()))
        connection.execute(sa.delete(tables.Measurement).where(strays))
        connection.execute(sa.delete(tables.Environment).where(tables.Environment.id == unnamed))
        _delete_unnamed_graphs(connection, graphs)


def free_pages(connection: sa.Connection) -> int:
    """Return the number of pages of the file that hold nothing."""
    return int(connection.exec_driver_sql("PRAGMA freelist_count").scalar_one())


def measured(connection: sa.Connection, policy_below: int | None = None) -> list[str]:
    """Return the ids of entries whose decision rests on measurements; with `policy_below`, of older policies only."""
    query = sa.select(tables.Decision.id).where(tables.Decision.measured_at.is_not(None))
    if policy_below is not None:
        query = query.where(tables.Decision.policy < policy_below)
    return list(connection.scalars(query))


def rederive_entries(
    connection: sa.Connection, ids: Sequence[str], now: float, *, dry_run: bool
) -> list[Outcome]:
    """Derive the decisions of some entries anew from their measurements; return the outcome of each."""
    stored = rows_of(
        connection, sa.select(*sa.inspect(tables.Decision).columns).where(tables.Decision.id.in_(ids))
    )
    rest_on = weighed(connection, tables.Decision.id.in_(ids))
    measured = {row["id"]: rest_on.get((row["environment"], row["graph"]), []) for row in stored}
    outcomes = {row["id"]: rederive(row, measured[row["id"]]) for row in stored}
    rows = [
        _derived_row(id_, outcome, measured[id_], now) for id_, outcome in outcomes.items() if outcome.is_new
    ]
    if rows and not dry_run:
        connection.execute(_REPLACE_DECISION, rows)
    return list(outcomes.values())


def weighed(connection: sa.Connection, *where: sa.ColumnElement[bool]) -> dict[Key, list[Row]]:
    """Return, for each entry that `where` selects, the measurements that its decision rests on, one for each deployment."""
    decision, measurement = tables.Decision, tables.Measurement
    query = sa.select(*sa.inspect(measurement).columns).join(
        decision,
        (decision.environment == measurement.environment)
        & (decision.graph == measurement.graph)
        # A decision and the measurements that it rests on come in one record, and have its time.
        & (decision.measured_at == measurement.measured_at),
    )
    by_entry: dict[Key, dict[str, Row]] = {}
    for row in rows_of(connection, query.where(*where).order_by(measurement.id)):
        by_entry.setdefault((row["environment"], row["graph"]), {})[row["deployment"]] = row
    return {key: list(rows.values()) for key, rows in by_entry.items()}


def rows_of(connection: sa.Connection, query: sa.Select[*tuple[Any, ...]]) -> list[dict[str, Any]]:
    """Return the rows that a query finds."""
    found = connection.execute(query)
    names = tuple(found.keys())
    return [dict(zip(names, row, strict=True)) for row in found]  # a third of the time of `dict` of a mapping


def _derived_row(id_: str, outcome: Outcome, measured: Sequence[Row], now: float) -> dict[str, Any]:
    decision = outcome.after
    assert decision is not None
    return {
        "of_id": id_,
        "deployment": decision.deployment.value,
        **_reason_columns(decision),
        "policy": decision.policy,
        "final": int(decision.final),
        "created_at": now,
        **_costs(measured, decision.deployment),
    }


_DERIVED = (
    "deployment",
    "reason",
    "detail",
    "against",
    "against_detail",
    "policy",
    "final",
    "created_at",
    *tables.COST_COLUMNS,
)
# Not whose it is: the facts are still theirs.
_REPLACE_DECISION = (
    sa.update(tables.Decision)
    .where(tables.Decision.id == sa.bindparam("of_id"))
    .values({name: sa.bindparam(name) for name in _DERIVED})
)


def count_unmeasured(connection: sa.Connection) -> int:
    """Return the number of entries whose decision rests on no measurement."""
    count = sa.select(sa.func.count()).select_from(tables.Decision)
    return connection.scalar(count.where(tables.Decision.measured_at.is_(None))) or 0


def count_entries(connection: sa.Connection) -> int:
    """Return the number of entries."""
    return connection.scalar(sa.select(sa.func.count()).select_from(tables.Decision)) or 0


def size(connection: sa.Connection) -> int:
    """Return the database's size in bytes, whether its pages lie in the file or still in the log."""
    pages = connection.exec_driver_sql("PRAGMA page_count").scalar_one()
    return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())
