"""Alembic's environment for a team's PostgreSQL database: runs the migrations on the given connection, in the caller's transaction.

`pygraphd.daemon.team.migrating` calls it. There is no URL and no `alembic.ini`.
"""

from __future__ import annotations

from alembic import context

from pygraphd.daemon.team.tables import SCHEMA, VERSION_TABLE, metadata

_connection = context.config.attributes.get("connection")
if _connection is None:
    raise SystemExit(
        "migrations run on a connection that pygraphd.daemon.team.migrating hands over; run: pygraphd team init"
    )

context.configure(
    connection=_connection,
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    version_table_schema=SCHEMA,
    include_schemas=True,
    include_name=lambda name, kind, _parents: kind != "schema" or name == SCHEMA,
)
context.run_migrations()
