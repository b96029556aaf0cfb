"""The costs of the chosen deployment, in the row of the decision.

Revision 0002. Databases are not downgraded.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_NAMES = ("cost_us", "host_us", "span_us")
_FILL = """
UPDATE decision
SET (cost_us, host_us, span_us) = (
    SELECT median_us, measurement.host_us, measurement.span_us
    FROM measurement
    WHERE measurement.environment = decision.environment AND measurement.graph = decision.graph
        AND measurement.deployment = decision.deployment AND measurement.measured_at = decision.measured_at
    ORDER BY measurement.id DESC
    LIMIT 1
)
WHERE measured_at IS NOT NULL
"""


def upgrade() -> None:
    """Add the columns, and copy into them the measurements that decisions rest on."""
    for name in _NAMES:
        op.add_column("decision", sa.Column(name, sa.REAL(), nullable=True))
    op.execute(_FILL)
