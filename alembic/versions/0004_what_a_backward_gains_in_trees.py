"""Decisions say what a forward's backward gains in TREES.

Revision 0004. Policies before 4 did not ask; NULL is what they went by.
"""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.execute("ALTER TABLE decision ADD COLUMN backward_gain_us REAL")
