"""The PostgreSQL server of a benchmark, as an administrator sees it: rows, bytes, connections, and its processor time if it runs here."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString, Self

import psycopg

from benchmarks.errors import BenchmarkError

if TYPE_CHECKING:
    from types import TracebackType

_TABLES = ("environment", "graph", "decision", "measurement")
_SETTINGS = ("server_version", "fsync", "synchronous_commit", "shared_buffers", "max_connections")
_LOOK_S = 0.2
_TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A connection to the server at a URL of the owner of the database. Raises BenchmarkError if there is none."""

    def __init__(self, url: str) -> None:
        # The name of the driver is SQLAlchemy's, and psycopg itself does not know it.
        address = url.replace("postgresql+psycopg://", "postgresql://", 1)
        try:
            # Each query is a transaction of its own: within one, PostgreSQL shows pg_stat_activity as it was
            # first read.
            self._connection = psycopg.connect(address, autocommit=True)
        except psycopg.Error as error:
            raise BenchmarkError(f"--url: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def settings(self) -> dict[str, str]:
        """Return the settings on which figures depend."""
        return {name: str(self._one("SELECT current_setting(%s)", name)) for name in _SETTINGS}

    def is_used(self) -> bool:
        """Return whether a team has published something here."""
        # `to_regclass` gives NULL for a table that is not there, where naming it would be an error.
        there = self._one("SELECT to_regclass('pygraphd.decision') IS NOT NULL")
        return bool(there and self._one("SELECT EXISTS (SELECT FROM pygraphd.decision)"))

    def published(self) -> int:
        """Return the number of records."""
        return int(self._one("SELECT count(*) FROM pygraphd.decision"))

    def tables(self) -> dict[str, dict[str, int]]:
        """Return the rows and the bytes of each table, with its indexes."""
        found = {}
        for table in _TABLES:
            name = f"pygraphd.{table}"
            # The name of a table cannot be a parameter of a query. `query_to_xml` takes a whole query as one.
            query = "SELECT (xpath('/row/c/text()', query_to_xml('SELECT count(*) AS c FROM ' || %s, false, true, '')))[1]"
            rows = int(str(self._one(query, name)))
            found[table] = {"rows": rows, "bytes": int(self._one("SELECT pg_total_relation_size(%s)", name))}
        return found

    def connections(self) -> int:
        """Return the number of connections of daemons."""
        return int(self._one("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pygraphd'"))

    def processor_s(self) -> float | None:
        """Return the processor time of all of the server's processes so far, None if it does not run on this host.

        Processes that have ended count, once the first one has waited for them.
        """
        try:
            first = _parent(int(self._one("SELECT pg_backend_pid()")))
            return sum(_ticks(pid, ended=pid == first) for pid in (first, *_children(first))) / _TICKS
        except (OSError, IndexError, ValueError):
            return None

    def _one(self, query: LiteralString, *values: object) -> Any:
        row = self._connection.execute(query, values).fetchone()
        return None if row is None else row[0]


class Watch:
    """Looks at the number of connections several times a second within a `with` block; `most` is the largest."""

    def __init__(self, url: str) -> None:
        self._server = Server(url)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.most = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        self._server.close()

    def _look(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self.most = max(self.most, self._server.connections())


def _fields(pid: int) -> list[str]:
    # Behind the name, which may hold spaces.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _parent(pid: int) -> int:
    # If the server runs on another host, some other process may have this number here.
    if "postgres" not in Path(f"/proc/{pid}/comm").read_text():
        raise ValueError("the server runs elsewhere")
    return int(_fields(pid)[1])


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _ticks(pid: int, *, ended: bool) -> int:
    """Return user and system time of a process, with those of its children that have ended if `ended`; 0 if it has gone."""
    try:
        fields = _fields(pid)
    except OSError:
        return 0
    return sum(map(int, fields[11 : 15 if ended else 13]))
