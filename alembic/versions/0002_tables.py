"""The first tables: environment, graph, measurement, decision, statistic.

Revision 0002. Databases are not downgraded. Revision 0001 was never released, and this one makes its tables, too.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the tables."""
    _create_environment()
    _create_graph()
    _create_measurement()
    _create_decision()
    _create_statistic()


def _create_environment() -> None:
    op.create_table(
        "environment",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("gpu", sa.Text(), nullable=False),
        sa.Column("capability", sa.Text(), nullable=False),
        sa.Column("sm_count", sa.Integer(), nullable=False),
        sa.Column("memory_mb", sa.Integer(), nullable=False),
        sa.Column("mig", sa.Text(), nullable=False),
        sa.Column("torch", sa.Text(), nullable=False),
        sa.Column("triton", sa.Text(), nullable=False),
        sa.Column("cuda", sa.Text(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("cudnn", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_strict=True,
    )


def _create_graph() -> None:
    op.create_table(
        "graph",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("partition", sa.Integer(), nullable=False),
        sa.Column("partitions", sa.Integer(), nullable=False),
        sa.Column("operators", sa.Integer(), nullable=False),
        sa.Column("sizes", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
        sqlite_strict=True,
    )


def _create_measurement() -> None:
    op.create_table(
        "measurement",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("graph", sa.Text(), nullable=False),
        sa.Column("deployment", sa.Text(), nullable=False),
        sa.Column("samples", sa.Integer(), nullable=False),
        sa.Column("median_us", sa.REAL(), nullable=False),
        sa.Column("mad_us", sa.REAL(), nullable=False),
        sa.Column("host_us", sa.REAL(), nullable=False),
        sa.Column("span_us", sa.REAL(), nullable=False),
        sa.Column("busy", sa.REAL(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("uid", sa.Integer(), nullable=False),
        sa.Column("measured_at", sa.REAL(), nullable=False),
        sa.Column("host_mad_us", sa.REAL(), nullable=True),
        sa.Column("span_mad_us", sa.REAL(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.ForeignKeyConstraint(["environment"], ["environment.id"]),
        sa.ForeignKeyConstraint(["graph"], ["graph.digest"]),
        sqlite_strict=True,
    )
    op.create_index("measurement_by_deployment", "measurement", ["environment", "graph", "deployment", "id"])
    op.create_index("measurement_by_graph", "measurement", ["graph"])


def _create_decision() -> None:
    op.create_table(
        "decision",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("graph", sa.Text(), nullable=False),
        sa.Column("deployment", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.Column("against", sa.Text(), nullable=False),
        sa.Column("against_detail", sa.Text(), nullable=False),
        sa.Column("policy", sa.Integer(), nullable=False),
        sa.Column("final", sa.Integer(), nullable=False),
        sa.Column("calls", sa.Integer(), nullable=False),
        sa.Column("uid", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.REAL(), nullable=False),
        sa.Column("hits", sa.Integer(), nullable=False),
        sa.Column("last_hit", sa.REAL(), nullable=True),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("measured_at", sa.REAL(), nullable=True),
        sa.Column("recording_us", sa.REAL(), nullable=True),
        sa.Column("cost_us", sa.REAL(), nullable=True),
        sa.Column("host_us", sa.REAL(), nullable=True),
        sa.Column("span_us", sa.REAL(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("environment", "graph", name="decision_key"),
        sa.ForeignKeyConstraint(["environment"], ["environment.id"]),
        sa.ForeignKeyConstraint(["graph"], ["graph.digest"]),
        sa.CheckConstraint("final IN (0, 1)", name="decision_final"),
        sqlite_strict=True,
    )
    op.create_index("decision_by_graph", "decision", ["graph"])


def _create_statistic() -> None:
    op.create_table(
        "statistic",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.REAL(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
        sqlite_strict=True,
    )
