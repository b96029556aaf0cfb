"""A cache file with as many entries as asked for, written straight into the tables: through a daemon a million would take an hour."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import sqlite3
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from pygraphd.daemon.store import Store
from pygraphd.schema.keys import Environment, entry_id
from pygraphd.schema.locations import Locations, locate
from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import POLICY_VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PORTION = 10_000
# Else the daemon would delete the old entries before a prune does: their age is that of its default limit.
_NO_EVICTION = 'max_size = "0"\nmax_unused = "0"\n'
OLD_SHARE = 5
"""One entry of this many is old, and a prune deletes it."""
_CACHE_KIB = 2_000_000
_OLD_S = 90 * 86_400.0
KNOWN = Environment(
    "NVIDIA H200", "9.0", 132, 143771, "none", "2.11.0", "3.6.0", "13.0", "580.159.04", "91900"
)
"""Made up, and nothing depends on it: only its size is like a real one's."""
OLD = Environment("NVIDIA A100", "8.0", 108, 81920, "none", "2.11.0", "3.6.0", "13.0", "580.159.04", "91900")
"""The environment of the entries that a prune deletes."""
_COLUMNS = {
    "graph": "digest, kind, partition, partitions, operators, sizes",
    "decision": "id, environment, graph, deployment, reason, detail, against, against_detail, policy, final, calls, uid,"
    " created_at, hits, last_hit, host, measured_at, cost_us, host_us, span_us",
    "measurement": "environment, graph, deployment, samples, median_us, mad_us, host_us, span_us, busy, host, version, uid,"
    " measured_at, host_mad_us, span_mad_us",
}
_Row = tuple[str | int | float | None, ...]


def digest(number: int) -> str:
    """Return the graph digest of an entry."""
    return hashlib.sha256(str(number).encode()).hexdigest()


def made_home(folder: Path, entries: int, old: int, config: str = _NO_EVICTION) -> Locations:
    """Make the home of a daemon, with a database as `fill` does; say so on standard error. By default it deletes nothing by itself."""
    home = folder / "home"
    # The daemon refuses a folder that others can write to, as one made with a umask of 002 would be.
    home.mkdir(mode=0o700)
    (home / "config.toml").write_text(config)
    locations = locate({"PYGRAPHD_HOME": str(home)})
    # In a process of its own: the largest memory of this one is counted for each that it starts.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(fill, locations.database, entries, old).result()
    print(f"{entries} entries stored", file=sys.stderr, flush=True)
    return locations


def fill(database: Path, entries: int, old: int) -> None:
    """Make a database with the entries 0 to `entries`, of which the last `old` ones are 90 days old and of environment `OLD`."""
    # By the daemon's own code, so that the tables are those of its version.
    Store(database).close()
    # Without this level, Python's sqlite3 begins transactions of its own.
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as connection:
        # Rows go to random places of the indices: what does not stay in memory is read and written again and again.
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_CACHE_KIB}"):
            connection.execute(f"PRAGMA {pragma}")
        for environment in (KNOWN, OLD):
            row = {"id": environment.digest(), **environment.factors()}
            names = ", ".join(row)
            marks = ", ".join("?" * len(row))
            connection.execute(f"INSERT INTO environment ({names}) VALUES ({marks})", tuple(row.values()))
        # In portions, so that the rows of a million entries are not in memory all at once.
        for start in range(0, entries, _PORTION):
            numbers = range(start, min(start + _PORTION, entries))
            _insert(connection, numbers, entries - old)


def _insert(connection: sqlite3.Connection, numbers: range, first_old: int) -> None:
    now, ids = time.time(), {environment: environment.digest() for environment in (KNOWN, OLD)}
    rows: dict[str, list[_Row]] = {table: [] for table in _COLUMNS}
    for number in numbers:
        is_old, graph = number >= first_old, digest(number)
        environment, at = ids[OLD if is_old else KNOWN], now - _OLD_S * is_old
        rows["graph"].append((graph, "forward", 0, 1, 100, ""))
        rows["decision"].append(_decision(environment, graph, at))
        rows["measurement"].extend(_measurements(environment, graph, at))
    connection.execute("BEGIN")
    for table, columns in _COLUMNS.items():
        marks = ", ".join("?" * len(columns.split(",")))
        connection.executemany(f"INSERT INTO {table} ({columns}) VALUES ({marks})", rows[table])
    connection.execute("COMMIT")


def _decision(environment: str, graph: str, at: float) -> _Row:
    chosen = (Deployment.KERNELS.value, "no_gain", "", "not_stated", "", POLICY_VERSION, 1, 24)
    costs = (100.0, 90.0, 100.0)
    return (
        entry_id(environment, graph),
        environment,
        graph,
        *chosen,
        0,
        at,
        0,
        None,
        "benchmark",
        at,
        *costs,
    )


def _measurements(environment: str, graph: str, at: float) -> Iterator[_Row]:
    for deployment in Deployment:
        costs = (12, 100.0, 1.0, 90.0, 100.0, 0.5)
        yield (environment, graph, deployment.value, *costs, "benchmark", "0", 0, at, 1.0, 1.0)
