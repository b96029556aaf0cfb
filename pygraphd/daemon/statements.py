"""Statements that are compiled once and run by the driver: SQLAlchemy's own execution takes several times as long as SQLite's."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.dialects import sqlite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sqlalchemy.sql import ClauseElement

_DIALECT = sqlite.dialect(paramstyle="named")


class Statement:
    """A statement with a parameter for each of its columns and named values. Every method raises `sqlalchemy.exc.DBAPIError`."""

    def __init__(self, statement: ClauseElement, columns: Sequence[str] | None = None) -> None:
        """Compile `statement`; of an INSERT, `columns` are those that are given, by default all."""
        compiled = statement.compile(dialect=_DIALECT, column_keys=columns)
        self._text = str(compiled)
        # SQLAlchemy makes parameters of literals in a statement, too: those have values, columns None.
        self._fixed = {name: value for name, value in compiled.params.items() if value is not None}

    def run(self, connection: sa.Connection, row: Mapping[str, Any]) -> sqlite3.Cursor:
        """Run it in the connection's transaction."""
        return self._on(connection, lambda driver: driver.execute(self._text, {**self._fixed, **row}))

    def run_each(self, connection: sa.Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        """Run it for each of some rows."""
        each = [{**self._fixed, **row} for row in rows]
        self._on(connection, lambda driver: driver.executemany(self._text, each))

    def _on(
        self, connection: sa.Connection, execute: Callable[[sqlite3.Connection], sqlite3.Cursor]
    ) -> sqlite3.Cursor:
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        try:
            return execute(driver)
        except sqlite3.Error as error:
            # As SQLAlchemy's own execution: by it, the store tells a full disk from a damaged file.
            raise sa.exc.DBAPIError(self._text, None, error) from error
