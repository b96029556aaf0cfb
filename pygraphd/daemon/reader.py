"""Lookups in the database file, by a read-only connection for one thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.daemon import database_files, statistics
from pygraphd.schema import offline
from pygraphd.schema.messages import Entry, LookupRequest

if TYPE_CHECKING:
    import sqlite3
    from pathlib import Path

    from pygraphd.schema.shipped import Known, Shipped


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to one lookup. `missing` has, by graph, the counter of the reason why nothing was found."""

    request: LookupRequest
    entries: tuple[Entry, ...]
    missing: dict[str, str]

    def above(self, shipped: Shipped) -> tuple[Found, list[Known]]:
        """Return the answer without what shipped decisions are better than, and these."""
        below = shipped.below(self.request, self.entries)
        if not below and not self.missing:
            return self, below
        better = {each.entry.graph for each in below}
        entries = tuple(entry for entry in self.entries if entry.graph not in better)
        missing = {
            graph: "other_environment" if why == "unknown" and graph in shipped.graphs else why
            for graph, why in self.missing.items()
            if graph not in better
        }
        return Found(self.request, entries, missing), below


class Reader:
    """The read-only connection of lookups; it follows the file when that is removed or replaced."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._identity: database_files.FileIdentity | None = None

    def lookup(self, request: LookupRequest) -> tuple[Entry, ...]:
        """Return the entries that are there; none if there is no database. Raises sqlite3.Error."""
        identity = database_files.identity(self._path)
        if identity != self._identity or self._connection is None:
            self.close()
            if identity is None:
                return ()
            self._connection = offline.connect(self._path)
            self._identity = identity
        return offline.select_entries(self._connection, request)

    def find(self, request: LookupRequest) -> Found:
        """Return the entries that are there, and why the others are not. Raises sqlite3.Error."""
        entries = self.lookup(request)
        found = {entry.graph for entry in entries}
        missing = [graph for graph in request.graphs if graph not in found]
        elsewhere = self._known_elsewhere(missing)
        reasons = {graph: "other_environment" if graph in elsewhere else "unknown" for graph in missing}
        return Found(request, entries, reasons)

    def _known_elsewhere(self, graphs: list[str]) -> frozenset[str]:
        if self._connection is None or not graphs:
            return frozenset()
        return statistics.known_elsewhere(self._connection, graphs)

    def close(self) -> None:
        """Close the connection; the next lookup opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
