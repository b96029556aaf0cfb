"""The first tables of a team: environment, graph, decision, measurement; and the trigger that signs each row.

Revision 0001. Databases are not downgraded.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SCHEMA = "pygraphd"
_TABLES = ("environment", "graph", "decision", "measurement")


def upgrade() -> None:
    """Make the tables and their triggers."""
    _create_environment()
    _create_graph()
    _create_decision()
    _create_measurement()
    _sign_rows()


def _text(*names: str) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=False) for name in names]


def _whole(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger(), nullable=False) for name in names]


def _number(*names: str, nullable: bool = False) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Double(), nullable=nullable) for name in names]


def _publisher() -> sa.Column[str]:
    return sa.Column("publisher", sa.Text(), server_default=sa.text("CURRENT_USER"), nullable=False)


def _create_environment() -> None:
    op.create_table(
        "environment",
        *_text("id", "gpu", "capability"),
        *_whole("sm_count", "memory_mb"),
        *_text("mig", "torch", "triton", "cuda", "driver", "cudnn"),
        _publisher(),
        sa.PrimaryKeyConstraint("id", "publisher", name="environment_pkey"),
        schema=_SCHEMA,
    )


def _create_graph() -> None:
    op.create_table(
        "graph",
        *_text("digest", "kind"),
        *_whole("partition", "partitions", "operators"),
        *_text("sizes"),
        _publisher(),
        sa.PrimaryKeyConstraint("digest", "publisher", name="graph_pkey"),
        schema=_SCHEMA,
    )


def _create_decision() -> None:
    op.create_table(
        "decision",
        *_text("id", "environment", "graph", "deployment", "reason", "detail", "against", "against_detail"),
        *_whole("policy", "final", "calls", "uid"),
        *_text("host"),
        *_number("measured_at", "recording_us", nullable=True),
        *_text("version", "job"),
        _publisher(),
        sa.Column(
            "published_at",
            sa.Double(),
            server_default=sa.text("EXTRACT(EPOCH FROM CLOCK_TIMESTAMP())"),
            nullable=False,
        ),
        sa.PrimaryKeyConstraint("id", "publisher", name="decision_pkey"),
        sa.ForeignKeyConstraint(
            ["environment", "publisher"],
            [f"{_SCHEMA}.environment.id", f"{_SCHEMA}.environment.publisher"],
            name="decision_environment_fkey",
        ),
        sa.ForeignKeyConstraint(
            ["graph", "publisher"],
            [f"{_SCHEMA}.graph.digest", f"{_SCHEMA}.graph.publisher"],
            name="decision_graph_fkey",
        ),
        schema=_SCHEMA,
    )
    key = ["environment", "graph", "publisher", "published_at"]
    op.create_index("decision_by_key", "decision", key, schema=_SCHEMA)


def _create_measurement() -> None:
    op.create_table(
        "measurement",
        *_text("decision", "deployment"),
        *_whole("samples"),
        *_number("median_us", "mad_us", "host_us", "span_us", "busy"),
        *_number("host_mad_us", "span_mad_us", nullable=True),
        _publisher(),
        sa.PrimaryKeyConstraint("decision", "publisher", "deployment", name="measurement_pkey"),
        sa.ForeignKeyConstraint(
            ["decision", "publisher"],
            [f"{_SCHEMA}.decision.id", f"{_SCHEMA}.decision.publisher"],
            name="measurement_decision_fkey",
            ondelete="CASCADE",
        ),
        schema=_SCHEMA,
    )


def _sign_rows() -> None:
    """Have the server fill in who published a row and when, whatever the statement says."""
    for name, more in (
        ("sign", ""),
        ("sign_and_date", "NEW.published_at := extract(epoch FROM clock_timestamp());"),
    ):
        op.execute(
            f"""CREATE FUNCTION {_SCHEMA}.{name}() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog AS
            $$ BEGIN NEW.publisher := current_user; {more} RETURN NEW; END $$"""
        )
    for table in _TABLES:
        function = "sign_and_date" if table == "decision" else "sign"
        op.execute(
            f"CREATE TRIGGER {function} BEFORE INSERT ON {_SCHEMA}.{table}"
            f" FOR EACH ROW EXECUTE FUNCTION {_SCHEMA}.{function}()"
        )
