"""Lookups in the database file, by a read-only connection for one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.daemon import answers, database_files, statistics
from pygraphd.schema import offline

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

    from pygraphd.daemon.answers import Found
    from pygraphd.schema.messages import LookupRequest, SizedEntry, SizesRequest

_CACHE_KIB = 8_192
"""Enough for the inner pages of a million entries' indices, which SQLite's own 2 MB would read again and again."""


class Reader:
    """The read-only connection of lookups; it follows the file when that is removed or replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._identity: database_files.FileIdentity | None = None

    def find(self, request: LookupRequest) -> Found:
        """Return the entries that are there, none if there is no database, and why the others are not. Raises sqlite3.Error."""
        connection = self._connected()
        rows = [] if connection is None else offline.select_rows(connection, request)
        found = answers.found_in(request, rows)
        missing = [graph for graph in request.graphs if graph not in found.texts]
        elsewhere = self._known_elsewhere(missing)
        for graph in missing:
            found.missing[graph] = "other_environment" if graph in elsewhere else "unknown"
        return found

    def sizes(self, request: SizesRequest) -> tuple[SizedEntry, ...]:
        """Return the sizes of a graph that are there, the most used first. Raises sqlite3.Error."""
        connection = self._connected()
        return () if connection is None else offline.select_sizes(connection, request)

    def _connected(self) -> sqlite3.Connection | None:
        """Return the connection to the file that is there now; None if there is none."""
        # Before the file is opened: if it is replaced in between, the next lookup sees that. SQLite itself
        # goes on with a file that was removed, in which nothing new is ever found.
        identity = database_files.identity(self._path)
        if identity != self._identity or self._connection is None:
            self.close()
            if identity is None:
                return None
            self._connection = offline.connect(self._path)
            self._connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
            self._identity = identity
        return self._connection

    def _known_elsewhere(self, graphs: list[str]) -> frozenset[str]:
        if self._connection is None or not graphs:
            return frozenset()
        return statistics.known_elsewhere(self._connection, graphs)

    def close(self) -> None:
        """Close the connection; the next lookup opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
