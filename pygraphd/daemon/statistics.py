"""Statistics: counts of the daemon's requests and answers, since its start and, in the table `statistic`, in all.

Statements are for one open transaction. Nothing here needs the daemon's lock but `add` and `zero`.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.dialects.sqlite import insert

from pygraphd.daemon import tables
from pygraphd.schema.messages import MAX_COUNT
from pygraphd.schema.policy import POLICY_VERSION

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Mapping
    from typing import Self

    from pygraphd.schema.messages import Decision

SINCE = "since"
"""The row of `statistic` with the time, in seconds since the epoch, from which the others are counted."""


@dataclass(slots=True)
class Counters:
    """Counts of requests and answers. A hit is a graph whose decision its program can use; each miss has one of `MISSES`."""

    lookups: int = 0
    graphs: int = 0
    hits: int = 0
    shipped_hits: int = 0
    """Hits: decisions that came with the package."""
    misses: int = 0
    unknown: int = 0
    """Misses: graphs that were never recorded."""
    other_environment: int = 0
    """Misses: graphs that were recorded in other environments only."""
    being_measured: int = 0
    """Misses: graphs that another process is measuring; it holds the lease."""
    provisional: int = 0
    """Misses: the decision is not final, so that the program measures."""
    other_policy: int = 0
    """Misses: the decision is of another version of the policy."""
    unreadable: int = 0
    """Misses: the database could not be read."""
    records: int = 0
    spooled: int = 0
    leases: int = 0
    evicted: int = 0
    invalid: int = 0
    refused: int = 0
    failed: int = 0
    measuring_saved_s: float = 0.0
    """Extra host time of the trials that hits made unnecessary: that of calls in the deployment that was not chosen."""
    recording_saved_s: float = 0.0
    """Host time of the recordings that hits for KERNELS made unnecessary."""
    team_hits: int = 0
    """Hits whose decision came from the team."""
    team_asked: int = 0
    """Graphs that the team was asked for."""
    team_found: int = 0
    team_invalid: int = 0
    """Records of the team that were not valid, and not used."""
    team_published: int = 0
    team_failed: int = 0
    """Times that the team's database could not be used."""

    def __iadd__(self, other: Counters) -> Self:
        for name in _NAMES:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def __sub__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, name) - getattr(other, name) for name in _NAMES))

    def clear(self) -> None:
        """Set all to zero."""
        self += Counters() - self


MISSES = ("unknown", "other_environment", "being_measured", "provisional", "other_policy", "unreadable")
"""The counters of misses, by reason; they add up to `misses`."""
_NAMES = tuple(field.name for field in dataclasses.fields(Counters))
_KINDS = {name: type(value) for name, value in dataclasses.asdict(Counters()).items()}


@dataclass(frozen=True, slots=True)
class Stored:
    """The counts in all, which began at `since` (seconds since the epoch)."""

    since: float
    counters: Counters

    def as_json(self) -> dict[str, object]:
        """Return the counts by name."""
        return {SINCE: self.since, **dataclasses.asdict(self.counters)}


def why_missed(decision: Decision) -> str | None:
    """Return the counter of the reason why a program cannot use a decision that was found; None if it can.

    A program may have reasons of its own, as `PYGRAPH_MAX_AGE`, which the daemon does not know.
    """
    if not decision.final:
        return "provisional"
    return None if decision.policy == POLICY_VERSION else "other_policy"


def known_elsewhere(connection: sqlite3.Connection, graphs: Iterable[str]) -> frozenset[str]:
    """Return those of some graphs (digests) that any entry names; raises sqlite3.Error."""
    rows = connection.execute(
        "SELECT digest FROM graph WHERE digest IN (SELECT value FROM json_each(?))",
        (json.dumps(list(graphs)),),
    )
    return frozenset(digest for (digest,) in rows)


def saved(connection: sa.Connection, hits: Mapping[tuple[str, str], int]) -> Counters:
    """Return the seconds that hits saved, as counters; `hits` has their number by environment and graph."""
    measuring_us = recording_us = 0.0
    graphs: defaultdict[str, dict[str, int]] = defaultdict(dict)
    for (environment, graph), count in hits.items():
        graphs[environment][graph] = count
    for environment, counts in graphs.items():
        for row in connection.execute(_COSTS, {"environment": environment, "graphs": list(counts)}):
            measuring_us += counts[row.graph] * _valid_us(row.measuring_us)
            recording_us += counts[row.graph] * _valid_us(row.recording_us)
    return Counters(measuring_saved_s=measuring_us / 1e6, recording_saved_s=recording_us / 1e6)


def _valid_us(value: float | None) -> float:
    """Return a time of a row, 0 for one that no program records: an infinite one would stay in the sum for ever."""
    return value if value is not None and 0 <= value <= MAX_COUNT else 0.0


def add(connection: sa.Connection, counted: Counters, since: float) -> None:
    """Add to the counts in all; if there are none, they began at `since`."""
    connection.execute(insert(tables.Statistic).on_conflict_do_nothing(), {"name": SINCE, "value": since})
    rows = [{"name": name, "value": value} for name, value in dataclasses.asdict(counted).items() if value]
    if rows:
        connection.execute(_ADD, rows)


def read(connection: sa.Connection) -> Stored | None:
    """Return the counts in all, None if nothing was counted; names of other versions are left out."""
    rows = connection.execute(sa.select(tables.Statistic.name, tables.Statistic.value))
    values: dict[str, float] = {row.name: row.value for row in rows if _is_count(row.value)}
    if SINCE not in values:
        return None
    # Names of other versions stay in the file. The column is REAL, so counts come back as floats.
    known = {name: _KINDS[name](value) for name, value in values.items() if name in _NAMES}
    return Stored(values[SINCE], Counters(**known))


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= MAX_COUNT


def zero(connection: sa.Connection, now: float) -> None:
    """Begin to count anew."""
    connection.execute(sa.delete(tables.Statistic))
    add(connection, Counters(), now)


_insert = insert(tables.Statistic)
_ADD = _insert.on_conflict_do_update(
    index_elements=["name"], set_={"value": tables.Statistic.value + _insert.excluded.value}
)

_chosen, _other = sa.orm.aliased(tables.Measurement), sa.orm.aliased(tables.Measurement)
# With two arguments SQLite's max is a scalar function, no aggregate.
_extra_us = sa.func.max(_other.host_us - _chosen.host_us, 0.0) * _other.samples
_MEASURING_US = (
    sa.select(sa.func.coalesce(sa.func.sum(_extra_us), 0.0))
    .where(
        _chosen.environment == tables.Decision.environment,
        _chosen.graph == tables.Decision.graph,
        _chosen.deployment == tables.Decision.deployment,
        _chosen.measured_at == tables.Decision.measured_at,
        _other.environment == tables.Decision.environment,
        _other.graph == tables.Decision.graph,
        _other.deployment != tables.Decision.deployment,
        _other.measured_at == tables.Decision.measured_at,
    )
    .scalar_subquery()
)
# Other entries are found as well, but their program measures all the same.
_IS_USED = (tables.Decision.final == 1) & (tables.Decision.policy == POLICY_VERSION)
# A program that runs a GRAPH records it anyway; one that is told KERNELS need not.
_RECORDING_US = sa.case((tables.Decision.deployment == "KERNELS", tables.Decision.recording_us), else_=0.0)
_COSTS = sa.select(
    tables.Decision.graph, _MEASURING_US.label("measuring_us"), _RECORDING_US.label("recording_us")
).where(
    tables.Decision.environment == sa.bindparam("environment"),
    tables.Decision.graph.in_(sa.bindparam("graphs", expanding=True)),
    _IS_USED,
)
