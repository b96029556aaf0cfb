"""Make and migrate the tables of a team, and give roles their rights, for `pygraphd team init`. The daemon never does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa

from pygraphd.daemon.team import connecting
from pygraphd.daemon.team.tables import SCHEMA, VERSION_TABLE, VERSIONS, metadata
from pygraphd.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from alembic.config import Config

    from pygraphd.team_url import TeamUrl

_LOCK = 0x50794772
"""Key of the advisory lock: of several that migrate at once, one does."""
_LIMIT_S = 300.0
"""How long one migration may take."""


@dataclass(frozen=True, slots=True)
class Made:
    """The version of the tables before and after; None: there were none."""

    before: str | None
    after: str


def initialise(url: TeamUrl, readers: Sequence[str] = (), publishers: Sequence[str] = ()) -> Made:
    """Make or migrate the tables, then grant each role its rights, all or nothing. Raises CommandError."""
    try:
        with connecting.Database(url, limit_s=_LIMIT_S) as database, database.transaction() as connection:
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
            made = _migrate(connection)
            for role in readers:
                _grant(connection, role, "SELECT")
            for role in publishers:
                _grant(connection, role, "SELECT, INSERT")
            return made
    except connecting.TeamError as error:
        raise CommandError(f"{url}: {error}") from error


def _migrate(connection: sa.Connection) -> Made:
    # Imported here: it costs a quarter of a second.
    from alembic import command

    if (encoding := connection.exec_driver_sql("SHOW server_encoding").scalar()) != "UTF8":
        # With SQL_ASCII, one publisher's bytes that are no text would end everybody's questions.
        raise CommandError(
            f"the database has the encoding {encoding}: make one with createdb --encoding=UTF8"
        )
    before = stored_version(connection)
    if before is not None and before not in VERSIONS:
        raise CommandError(
            f"the tables were made by a newer pygraphd (version {before:.40}): upgrade this one"
        )
    if not sa.inspect(connection).has_schema(SCHEMA):
        connection.execute(sa.schema.CreateSchema(SCHEMA))
    command.upgrade(migration_config(connection), "head")
    return Made(before, VERSIONS[-1])


def stored_version(connection: sa.Connection) -> str | None:
    """Return the version of the tables, None if there are none."""
    if not sa.inspect(connection).has_table(VERSION_TABLE, SCHEMA):
        return None
    found = connection.exec_driver_sql(f"SELECT version_num FROM {SCHEMA}.{VERSION_TABLE}").scalar()
    return None if found is None else str(found)


def migration_config(connection: sa.Connection) -> Config:
    """Return Alembic's configuration for the migrations of a team's database, on one connection."""
    from alembic.config import Config

    config = Config()
    folder = Path(__file__).parents[2] / "migrations" / "team"
    # configparser takes a "%" for a reference to another option.
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _grant(connection: sa.Connection, role: str, rights: str) -> None:
    # GRANT takes no parameters, so the name of a role, which a person typed, is quoted.
    quote = connection.dialect.identifier_preparer.quote_identifier
    connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {SCHEMA} TO {quote(role)}")
    connection.exec_driver_sql(f"GRANT SELECT ON {SCHEMA}.{VERSION_TABLE} TO {quote(role)}")
    names = ", ".join(table.fullname for table in metadata.sorted_tables)
    connection.exec_driver_sql(f"GRANT {rights} ON {names} TO {quote(role)}")
