"""Alembic's environment: runs the migrations on the given connection, in the caller's transaction.

`pygraphd.daemon.database` calls it, holding the daemon's lock. There is no URL and no `alembic.ini`.
"""

from __future__ import annotations

from alembic import context

from pygraphd.daemon.tables import Base

_connection = context.config.attributes.get("connection")
if _connection is None:
    raise SystemExit(
        "migrations run on a connection that pygraphd.daemon.database hands over; start pygraphd instead"
    )

context.configure(
    connection=_connection,
    target_metadata=Base.metadata,
    # SQLite changes a column only by copying the table.
    render_as_batch=True,
    # Alembic takes SQLite's DDL for non-transactional, because the driver's own transactions are; ours are not.
    transactional_ddl=True,
)
context.run_migrations()
