"""Deployments are KERNELS (LAUNCH before) and GRAPH (RELOCATE before); TREES, and what was noted for it, is gone.

Revision 0005. What was decided with TREES among the figures stands only where GRAPH and KERNELS were measured with it: the
daemon derives that anew. The rest is deleted, and so measured anew. Measurements get the spreads of host time and GPU span.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

_NAMES = {"LAUNCH": "KERNELS", "RELOCATE": "GRAPH"}
# Beginnings of reasons that policies before 5 gave, with an old name in them; spelt out, since a migration must not change
# with the program.
_REASONS = ("no gain over LAUNCH", "only LAUNCH in this mode", "RELOCATE is faster")
_TREES_WON = "graphs of PyTorch were chosen before, and are no choice any more"

_MEASURED = (
    "EXISTS (SELECT 1 FROM measurement AS m WHERE m.environment = decision.environment AND m.graph = decision.graph "
    "AND m.measured_at = decision.measured_at AND m.deployment = '{}')"
)


def upgrade() -> None:
    """Translate the names, drop what trees have left, and add the columns."""
    _drop_what_rests_on_trees()
    _translate()
    # As text: Alembic would copy the tables.
    op.execute("ALTER TABLE decision DROP COLUMN forward_in_trees")
    op.execute("ALTER TABLE decision DROP COLUMN backward_gain_us")
    op.execute("ALTER TABLE measurement ADD COLUMN host_mad_us REAL")
    op.execute("ALTER TABLE measurement ADD COLUMN span_mad_us REAL")


def _drop_what_rests_on_trees() -> None:
    both = f"{_MEASURED.format('LAUNCH')} AND {_MEASURED.format('RELOCATE')}"
    trees = f"(deployment = 'TREES' OR {_MEASURED.format('TREES')})"
    op.execute(f"DELETE FROM decision WHERE {trees} AND NOT ({both})")
    op.execute(
        f"UPDATE decision SET deployment = 'LAUNCH', reason = '{_TREES_WON}' WHERE deployment = 'TREES'"
    )
    op.execute("DELETE FROM measurement WHERE deployment = 'TREES'")
    op.execute(
        "DELETE FROM measurement WHERE (environment, graph) NOT IN (SELECT environment, graph FROM decision)"
    )
    op.execute("DELETE FROM graph WHERE digest NOT IN (SELECT graph FROM decision)")
    op.execute("DELETE FROM environment WHERE id NOT IN (SELECT environment FROM decision)")


def _translate() -> None:
    for old, new in _NAMES.items():
        for table in ("measurement", "decision"):
            op.execute(f"UPDATE {table} SET deployment = '{new}' WHERE deployment = '{old}'")
        for reason in _REASONS:
            op.execute(
                f"UPDATE decision SET reason = replace(reason, '{old}', '{new}') WHERE reason LIKE '{reason}%' AND policy < 5"
            )
