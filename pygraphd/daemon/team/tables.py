"""The tables of a team's PostgreSQL database: those of `daemon.tables`, with who published each row.

Rows are inserted and never changed. The server fills in `publisher` and `published_at`, and `publisher` is part of every key, so
that nobody can take the key of another's row. `alembic/team/versions` makes the tables; tests compare the two.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from pygraphd.daemon import tables

SCHEMA = "pygraphd"
"""The PostgreSQL schema that holds the tables."""
VERSION_TABLE = "alembic_version"
VERSIONS = ("0001", "0002")
"""The revisions of the tables, oldest first; this version reads and writes the last one only."""
MAX_TEXT, MAX_DETAIL, MAX_SIZES_TEXT = 256, 400, 2048
"""Characters of a column that can be valid: of most, of a reason's detail, and of a graph's sizes."""

metadata = sa.MetaData(schema=SCHEMA)


def _columns(mapped: type[tables.Base], *left_out: str) -> list[sa.Column[object]]:
    """Return a local table's columns as PostgreSQL has them; its REAL and INTEGER would have 32 bits."""
    return [
        sa.Column(column.name, _type(column.type), nullable=bool(column.nullable))
        for column in sa.inspect(mapped).columns
        if column.name not in left_out
    ]


def _type(local: sa.types.TypeEngine[Any]) -> sa.types.TypeEngine[Any]:
    if isinstance(local, sa.Float):
        return sa.Double()
    return sa.BigInteger() if isinstance(local, sa.Integer) else sa.Text()


def _publisher() -> sa.Column[str]:
    return sa.Column("publisher", sa.Text(), server_default=sa.text("CURRENT_USER"), nullable=False)


environment = sa.Table(
    "environment",
    metadata,
    *_columns(tables.Environment),
    _publisher(),
    sa.PrimaryKeyConstraint("id", "publisher", name="environment_pkey"),
)

graph = sa.Table(
    "graph",
    metadata,
    *_columns(tables.Graph),
    _publisher(),
    sa.PrimaryKeyConstraint("digest", "publisher", name="graph_pkey"),
)

decision = sa.Table(
    "decision",
    metadata,
    # `id` is the digest of what was published, so that it is stored once however often it is sent.
    *_columns(tables.Decision, "hits", "last_hit", "created_at", *tables.COST_COLUMNS),
    sa.Column("version", sa.Text(), nullable=False),
    sa.Column("job", sa.Text(), nullable=False),
    _publisher(),
    sa.Column(
        # The server's clock: by its own, a publisher could keep its rows the latest for ever.
        "published_at",
        sa.Double(),
        server_default=sa.text("EXTRACT(EPOCH FROM CLOCK_TIMESTAMP())"),
        nullable=False,
    ),
    sa.PrimaryKeyConstraint("id", "publisher", name="decision_pkey"),
    sa.ForeignKeyConstraint(
        ["environment", "publisher"],
        [f"{SCHEMA}.environment.id", f"{SCHEMA}.environment.publisher"],
        name="decision_environment_fkey",
    ),
    sa.ForeignKeyConstraint(
        ["graph", "publisher"],
        [f"{SCHEMA}.graph.digest", f"{SCHEMA}.graph.publisher"],
        name="decision_graph_fkey",
    ),
    # The latest rows of one publisher are the end of a range here: see `fetching`.
    sa.Index("decision_by_key", "environment", "graph", "publisher", "published_at"),
)

measurement = sa.Table(
    "measurement",
    metadata,
    sa.Column("decision", sa.Text(), nullable=False),
    *_columns(
        tables.Measurement, "id", "environment", "graph", "host", "version", "uid", "measured_at"
    ),  # the decision has these
    _publisher(),
    sa.PrimaryKeyConstraint("decision", "publisher", "deployment", name="measurement_pkey"),
    sa.ForeignKeyConstraint(
        ["decision", "publisher"],
        [f"{SCHEMA}.decision.id", f"{SCHEMA}.decision.publisher"],
        name="measurement_decision_fkey",
        # The owner deletes old rows of `decision` alone.
        ondelete="CASCADE",
    ),
)
