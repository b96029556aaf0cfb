"""Graphs say which dynamic sizes they are for.

Revision 0003. What is there is for all sizes, as it was measured.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.execute("ALTER TABLE graph ADD COLUMN sizes TEXT DEFAULT '' NOT NULL")
