"""Opening the SQLite file for its one writer: settings, health, migrations.

The caller holds the daemon's lock. Nothing here reads or writes an entry: see `store`.
"""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.pool import StaticPool

from pygraphd.daemon.database_files import APPLICATION_ID, CORRUPT, DAMAGE, FOREIGN, OUTDATED, set_aside
from pygraphd.schema.offline import DATABASE_VERSION, OLDEST_MIGRATED

if TYPE_CHECKING:
    from alembic.config import Config
    from sqlalchemy.engine.interfaces import DBAPIConnection
    from sqlalchemy.pool import ConnectionPoolEntry

_log = logging.getLogger(__name__)

BUSY_TIMEOUT_MS = 5000
_WAL_BYTES = 4 * 2**20
CACHE_KIB = 16_384
"""Deleting touches all indices at random places, for which SQLite's own 2 MB are few; 32 MB save no processor time."""

_SET_ASIDE = "%s: %s; set aside as %s, and a new database is begun"

_PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    # In WAL mode, a power cut may then lose the last commits, but damages nothing.
    "PRAGMA synchronous=NORMAL",
    "PRAGMA foreign_keys=ON",
    f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}",
    # Some of the log's file stays: on a full disk even deletions need room in it.
    f"PRAGMA journal_size_limit={_WAL_BYTES}",
    f"PRAGMA cache_size=-{CACHE_KIB}",
)


class DamagedError(Exception):
    """The file is no sound database of ours. `label` is for its new name."""

    label = CORRUPT


class ForeignError(DamagedError):
    """The file is a sound database, but another program's."""

    label = FOREIGN


class OutdatedError(Exception):
    """The file is a database of an unreleased version, for which there is no migration."""

    def __init__(self, version: int) -> None:
        super().__init__(f"is of version {version}, which was never released, and is not migrated")
        self.version = version


def open_writer(path: Path) -> sa.Engine:
    """Return an engine on a sound database of this version. A damaged or outdated file is renamed, and a new one is begun.

    The engine holds one connection, whose transactions take the write lock at once. Raises `sqlalchemy.exc.DBAPIError` if the disk
    or the folder is at fault.
    """
    try:
        return _open_sound(path)
    except DamagedError as error:
        _log.error(_SET_ASIDE, path, error, set_aside(path, error.label))
    except OutdatedError as error:
        _log.warning(_SET_ASIDE, path, error, set_aside(path, f"{OUTDATED}{error.version}"))
    return _open_sound(path)


def is_damage(error: sa.exc.DBAPIError) -> bool:
    """Return whether SQLite says that the file is not, or no longer, a sound database."""
    return primary_code(error) in DAMAGE


def primary_code(error: sa.exc.DBAPIError) -> int:
    """Return SQLite's primary result code of an error: 13 is SQLITE_FULL, 8 SQLITE_READONLY."""
    return int(getattr(error.orig, "sqlite_errorcode", sqlite3.SQLITE_ERROR)) & 0xFF


def _open_sound(path: Path) -> sa.Engine:
    engine = sa.create_engine(
        sa.URL.create("sqlite", database=str(path)),
        poolclass=StaticPool,
        # Opened on one thread, used and closed on another; never by two at a time.
        connect_args={"check_same_thread": False},
    )
    is_new = not path.exists() or not path.stat().st_size
    sa.event.listen(engine, "connect", _prepare_new if is_new else _configure)
    sa.event.listen(engine, "begin", _begin_immediate)
    try:
        with engine.connect() as connection:
            _check_health(connection)
            _migrate(connection)
    except sa.exc.DBAPIError as error:
        engine.dispose()
        if is_damage(error):
            raise DamagedError(str(error.orig)) from error
        raise
    except BaseException:
        engine.dispose()
        raise
    return engine


def _prepare_new(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
    assert isinstance(connection, sqlite3.Connection)
    # Must come before the first page is written; in a file that has some it would write one more at each start.
    connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
    _configure(connection, entry)


def _configure(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    assert isinstance(connection, sqlite3.Connection)
    # The driver's own transactions would commit around DDL; ours begin in `_begin_immediate`.
    connection.isolation_level = None
    for pragma in _PRAGMAS:
        connection.execute(pragma)


def _begin_immediate(connection: sa.Connection) -> None:
    # One that reads first could fail at its first write with SQLITE_BUSY, at once and whatever the timeout.
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _check_health(connection: sa.Connection) -> None:
    verdict = _pragma(connection, "quick_check(1)")
    if verdict != "ok":
        raise DamagedError(f"quick_check says: {' '.join(str(verdict).split())}")
    if _has_tables(connection) and _pragma(connection, "application_id") != APPLICATION_ID:
        raise ForeignError("is another program's database")
    # Ends the transaction that SQLAlchemy began for the reads, and with it the write lock.
    connection.rollback()


def _migrate(connection: sa.Connection) -> None:
    version = int(str(_pragma(connection, "user_version")))
    has_tables = _has_tables(connection)
    connection.rollback()
    if version == DATABASE_VERSION:
        return
    if has_tables and version < OLDEST_MIGRATED:
        raise OutdatedError(version)
    with connection.begin():
        upgrade(connection)


def upgrade(connection: sa.Connection) -> None:
    """Make the tables, or bring older ones up to this version, in the caller's transaction."""
    # Imported here: it costs a quarter of a second, and only a new or older file needs it.
    from alembic import command

    command.upgrade(migration_config(connection), "head")
    # In the transaction that makes the tables: whoever reads the version finds all of them.
    connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
    connection.exec_driver_sql(f"PRAGMA user_version={DATABASE_VERSION}")


def migration_config(connection: sa.Connection) -> Config:
    """Return Alembic's configuration for the migrations of this package, on one connection."""
    from alembic.config import Config

    config = Config()
    # configparser takes a "%" for a reference to another option.
    config.set_main_option(
        "script_location", str(Path(__file__).parents[1] / "migrations").replace("%", "%%")
    )
    config.attributes["connection"] = connection
    return config


def _pragma(connection: sa.Connection, name: str) -> object:
    return connection.exec_driver_sql(f"PRAGMA {name}").scalar()


def _has_tables(connection: sa.Connection) -> bool:
    return bool(connection.exec_driver_sql("SELECT EXISTS (SELECT 1 FROM sqlite_schema)").scalar())
