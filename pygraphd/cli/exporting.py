"""Select the entries for `cache export`: final decisions, each with the measurements that it rests on."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pygraphd.daemon import tables
from pygraphd.daemon.exchange import Portable
from pygraphd.daemon.queries import rows_of, weighed
from pygraphd.daemon.rederiving import NOT_VALID, decision_of, measurement_of
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Graph, Kind, Origin, Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.cli.catalogue import Catalogue
    from pygraphd.daemon.rederiving import Row

NOT_FINAL = "not final: whoever meets that graph measures it"


@dataclass(frozen=True, slots=True)
class Export:
    """The entries to write, and the number of entries left out, by reason."""

    entries: tuple[Portable, ...]
    left_out: Mapping[str, int]


def export(catalogue: Catalogue, gpu: str = "", graph: str = "") -> Export:
    """Return the entries whose GPU name contains `gpu` and whose graph digest begins with `graph`, oldest first."""
    # Of one moment: a decision of the next one rests on other measurements.
    rows, measured = catalogue.read(
        lambda connection: (rows_of(connection, _selected(gpu, graph)), weighed(connection))
    )
    entries: list[Portable] = []
    left_out: Counter[str] = Counter()
    for row in rows:
        if not row["final"]:
            left_out[NOT_FINAL] += 1
            continue
        try:
            entries.append(_portable(row, measured.get((row["environment"], row["graph"]), [])))
        except ValueError:  # another program's deployment, or a time that is none
            left_out[NOT_VALID] += 1
    return Export(tuple(entries), left_out)


def _selected(gpu: str, graph: str) -> sa.Select[*tuple[Any, ...]]:
    decision, environment, of = tables.Decision, tables.Environment, tables.Graph
    columns = [
        *sa.inspect(decision).columns,
        *(each for each in sa.inspect(environment).columns if each.name != "id"),
        *(each for each in sa.inspect(of).columns if each.name != "digest"),
    ]
    query = (
        sa.select(*columns)
        .join(environment, decision.environment == environment.id)
        .join(of, decision.graph == of.digest)
        .order_by(decision.created_at, decision.id)
    )
    if gpu:
        query = query.where(environment.gpu.icontains(gpu, autoescape=True))
    return query.where(decision.graph.startswith(graph.lower(), autoescape=True)) if graph else query


def _portable(row: Row, measured: Sequence[Row]) -> Portable:
    if row["measured_at"] is not None and not measured:
        raise InvalidMessageError("measured_at: what was measured then is gone")
    environment = Environment(**{field.name: row[field.name] for field in dataclasses.fields(Environment)})
    origin = Origin(row["host"], measured[0]["version"] if measured else "")
    return Portable(environment, origin, _record(row, measured), row["measured_at"])


def _record(row: Row, measured: Sequence[Row]) -> Record:
    sizes = tuple(int(size) for size in row["sizes"].split(",") if size)
    return Record(
        Graph(row["graph"], Kind(row["kind"]), row["partition"], row["partitions"], row["operators"], sizes),
        decision_of(row),
        tuple(measurement_of(each) for each in measured),
    )
