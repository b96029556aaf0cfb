"""Add to each graph at dynamic sizes the graph that it is a size of, so that all sizes of a graph are found.

Revision 0003. Databases are not downgraded.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import sqlalchemy as sa
from alembic import op

from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.messages import check_sized

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_SIZED = "SELECT digest, sizes, kind, partition, partitions, operators FROM graph WHERE sizes <> ''"
_WHOLE = """
SELECT DISTINCT digest, kind, partition, partitions, operators FROM graph JOIN decision ON graph = digest
WHERE reason = 'decided_by_size'
"""


def upgrade() -> None:
    """Add the column and its index, and fill it for the rows that are there."""
    op.add_column("graph", sa.Column("whole", sa.Text(), nullable=True))
    op.create_index("graph_by_whole", "graph", ["whole"], sqlite_where=sa.text("whole IS NOT NULL"))
    connection = op.get_bind()
    driver: Any = connection.connection.dbapi_connection
    before = driver.text_factory
    # One row whose text is not UTF-8 must not keep a database from being migrated.
    driver.text_factory = lambda text: text.decode(errors="replace")
    try:
        _fill(connection)
    finally:
        driver.text_factory = before


def _fill(connection: sa.Connection) -> None:
    """Find the wholes of sizes among the graphs with the same facts: a digest tells whether one is made of another."""
    wholes = defaultdict(list)
    for digest, *facts in connection.exec_driver_sql(_WHOLE):
        wholes[tuple(facts)].append(digest)
    for digest, sizes, *facts in connection.exec_driver_sql(_SIZED).all():
        for whole in wholes[tuple(facts)]:
            if _is_size_of(digest, whole, sizes):
                connection.exec_driver_sql("UPDATE graph SET whole = ? WHERE digest = ?", (whole, digest))
                break


def _is_size_of(digest: str, whole: str, sizes: str) -> bool:
    try:
        check_sized(digest, whole, tuple(map(int, sizes.split(","))))
    except (InvalidMessageError, ValueError):
        return False
    return True
