"""Add to each graph at dynamic sizes the graph that it is a size of. Rows that are there do not say.

Revision 0002. Databases are not downgraded.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_SCHEMA = "pygraphd"


def upgrade() -> None:
    """Add the column."""
    op.add_column("graph", sa.Column("whole", sa.Text(), nullable=True), schema=_SCHEMA)
