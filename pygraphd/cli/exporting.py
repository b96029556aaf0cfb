"""Select the entries for `cache export`: final decisions, each with the measurements that it rests on."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from pygraphd.cli.catalogue import PAGE
from pygraphd.daemon import tables
from pygraphd.daemon.queries import chunks, row_place, rows_of, weighed
from pygraphd.daemon.rederiving import NOT_VALID, decision_of, measurement_of
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import Graph, Kind, Origin, Record
from pygraphd.schema.portable import Portable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pygraphd.cli.catalogue import Catalogue
    from pygraphd.daemon.queries import Key
    from pygraphd.daemon.rederiving import Row

NOT_FINAL = "not final: whoever meets that graph measures it"


class Export:
    """The entries whose GPU name contains `gpu` and whose graph digest begins with `graph`, oldest first, as they are read.

    `left_out` has the number of entries left out so far, by reason.
    """

    def __init__(self, catalogue: Catalogue, gpu: str = "", graph: str = "") -> None:
        self._catalogue = catalogue
        self._places = catalogue.places(gpu, graph)
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Portable]:
        for some in chunks(self._places, PAGE):
            rows, measured = self._catalogue.read(functools.partial(_page, row_place.in_(some)))
            by_place = {row["place"]: row for row in rows}
            for row in (by_place[place] for place in some if place in by_place):
                if (entry := self._entry(row, measured)) is not None:
                    yield entry

    def _entry(self, row: Row, measured: Mapping[Key, Sequence[Row]]) -> Portable | None:
        if not row["final"]:
            self.left_out[NOT_FINAL] += 1
            return None
        try:
            return _portable(row, measured.get((row["environment"], row["graph"]), []))
        except ValueError:  # another program's deployment, or a time that is none
            self.left_out[NOT_VALID] += 1
            return None


def _page(
    where: sa.ColumnElement[bool], connection: sa.Connection
) -> tuple[list[dict[str, Any]], dict[Key, list[Row]]]:
    # Of one moment: a decision of the next one rests on other measurements.
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
        row["recording_us"],
    )
