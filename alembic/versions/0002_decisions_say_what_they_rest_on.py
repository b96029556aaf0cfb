"""Decisions say what they rest on: who took them where, the measurements' time, and whether a forward runs in TREES.

Revision 0002. Without these a decision cannot be derived anew from what is stored.
"""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# The reason that policy 1 gave; spelt out, since a migration must not change with the program.
_FORWARD_NOT_IN_TREES = "its forward is in no tree, so all that was saved for it would have to be copied"


def upgrade() -> None:
    """Add the columns, and fill in what the rows tell."""
    _add_columns()
    _fill_measured_at()
    _fill_forward_in_trees()


def _add_columns() -> None:
    # As text: Alembic would copy the table for the sake of a CHECK, which SQLite adds with a column in no time.
    op.execute("ALTER TABLE decision ADD COLUMN host TEXT DEFAULT '' NOT NULL")
    op.execute("ALTER TABLE decision ADD COLUMN measured_at REAL")
    op.execute(
        "ALTER TABLE decision ADD COLUMN forward_in_trees INTEGER "
        "CONSTRAINT decision_forward_in_trees CHECK (forward_in_trees IN (0, 1))"
    )


def _fill_measured_at() -> None:
    # A record's decision and measurements were stored with one and the same time.
    op.execute(
        "UPDATE decision SET measured_at = created_at WHERE EXISTS (SELECT 1 FROM measurement AS m WHERE "
        "m.environment = decision.environment AND m.graph = decision.graph AND m.measured_at = decision.created_at)"
    )


def _fill_forward_in_trees() -> None:
    op.execute(f"UPDATE decision SET forward_in_trees = 0 WHERE reason = '{_FORWARD_NOT_IN_TREES}'")
