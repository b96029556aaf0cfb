"""The tables of the daemon's SQLite file: facts (`Measurement`), and the conclusions drawn from them (`Decision`).

Only the daemon and its commands import it: it needs SQLAlchemy. `alembic/versions` makes these tables. Tests compare the two, and
`schema.offline` with both.
"""

from __future__ import annotations

import sqlalchemy as sa
from sqlalchemy import CheckConstraint, ForeignKey, Index, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

COST_COLUMNS = ("cost_us", "host_us", "span_us")
"""Columns of `Decision` that are copies of what `Measurement` has: who stores a decision works them out."""

# In other tables SQLite stores values of any type in any column.
_STRICT = {"sqlite_strict": True}


class Base(DeclarativeBase):
    """Maps Python's types to the few that a STRICT table knows."""

    type_annotation_map = {str: sa.Text(), float: sa.REAL(), int: sa.Integer()}  # noqa: RUF012 - SQLAlchemy's name


class Environment(Base):
    """The environment of timings: `schema.keys.Environment` with a column for each factor, so that a miss can be explained."""

    __tablename__ = "environment"
    __table_args__ = _STRICT

    id: Mapped[str] = mapped_column(primary_key=True)
    """`Environment.digest()`."""
    gpu: Mapped[str]
    capability: Mapped[str]
    sm_count: Mapped[int]
    memory_mb: Mapped[int]
    mig: Mapped[str]
    torch: Mapped[str]
    triton: Mapped[str]
    cuda: Mapped[str]
    driver: Mapped[str]
    cudnn: Mapped[str]


class Graph(Base):
    """One partition of a compiled graph: `schema.messages.Graph`."""

    __tablename__ = "graph"
    __table_args__ = (
        Index("graph_by_whole", "whole", sqlite_where=sa.text("whole IS NOT NULL")),
        _STRICT,
    )

    digest: Mapped[str] = mapped_column(primary_key=True)
    kind: Mapped[str]
    partition: Mapped[int]
    partitions: Mapped[int]
    operators: Mapped[int]
    sizes: Mapped[str]
    """Dynamic sizes, with commas between; empty where there are none, or where the entry is for all."""
    whole: Mapped[str | None]
    """The digest of the graph without sizes; NULL where there are none, or the client did not say."""


class Measurement(Base):
    """The cost of one deployment in one record, in microseconds. Rows are added and pruned, never changed."""

    __tablename__ = "measurement"
    __table_args__ = (
        # For the newest of a deployment: a listing shows it, and those far behind it are dropped.
        Index("measurement_by_deployment", "environment", "graph", "deployment", "id"),
        # For deletions, which ask whether a graph is still named.
        Index("measurement_by_graph", "graph"),
        _STRICT,
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    environment: Mapped[str] = mapped_column(ForeignKey("environment.id"))
    graph: Mapped[str] = mapped_column(ForeignKey("graph.digest"))
    deployment: Mapped[str]
    samples: Mapped[int]
    median_us: Mapped[float]
    mad_us: Mapped[float]
    host_us: Mapped[float]
    span_us: Mapped[float]
    busy: Mapped[float]
    host: Mapped[str]
    version: Mapped[str]
    uid: Mapped[int]
    measured_at: Mapped[float]
    """Seconds since the epoch; the daemon's clock."""
    host_mad_us: Mapped[float | None]
    """NULL: measured by a version that did not store it."""
    span_mad_us: Mapped[float | None]
    """NULL: measured by a version that did not store it."""


class Decision(Base):
    """The answer for one graph in one environment; a newer record replaces it, unless that is provisional and this is final."""

    __tablename__ = "decision"
    __table_args__ = (
        UniqueConstraint("environment", "graph", name="decision_key"),
        # The unique key begins with the environment, which `cache explain` and deletions do not have.
        Index("decision_by_graph", "graph"),
        CheckConstraint("final IN (0, 1)", name="decision_final"),
        _STRICT,
    )

    id: Mapped[str] = mapped_column(primary_key=True)
    """`schema.keys.entry_id(environment, graph)`."""
    environment: Mapped[str] = mapped_column(ForeignKey("environment.id"))
    graph: Mapped[str] = mapped_column(ForeignKey("graph.digest"))
    deployment: Mapped[str]
    reason: Mapped[str]
    """`schema.reasons.ReasonCode` of the deployment that was chosen."""
    detail: Mapped[str]
    """The detail of that reason."""
    against: Mapped[str]
    """`schema.reasons.ReasonCode` against the other deployment."""
    against_detail: Mapped[str]
    """The detail of that reason."""
    policy: Mapped[int]
    final: Mapped[int]
    calls: Mapped[int]
    uid: Mapped[int]
    created_at: Mapped[float]
    """Seconds since the epoch, of the decision, not of the row."""
    hits: Mapped[int]
    """Since the row was made; kept when the decision is replaced."""
    last_hit: Mapped[float | None]
    host: Mapped[str]
    """The host of the process that recorded it."""
    measured_at: Mapped[float | None]
    """The `measured_at` of the measurements that the decision rests on; NULL if it rests on none."""
    recording_us: Mapped[float | None]
    """Host time of recording and verifying the GRAPH, in microseconds; NULL: the client did not say."""
    cost_us: Mapped[float | None]
    """`median_us` of the chosen deployment in the measurements that the decision rests on; NULL if it rests on none.

    Beside the decision, since to find it in `measurement` takes a lookup as long as all the rest."""
    host_us: Mapped[float | None]
    """Its `host_us`."""
    span_us: Mapped[float | None]
    """Its `span_us`."""


class Statistic(Base):
    """One count in all, or the time since when counts are kept: `pygraphd.daemon.statistics`."""

    __tablename__ = "statistic"
    __table_args__ = _STRICT

    name: Mapped[str] = mapped_column(primary_key=True)
    value: Mapped[float]
