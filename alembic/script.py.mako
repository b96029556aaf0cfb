"""${message}.

Revision ${up_revision}, follows ${down_revision | comma,n}. After adding one, raise `schema.offline.DATABASE_VERSION`.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the tables; runs in one transaction."""
    ${upgrades if upgrades else "pass"}
