"""Forecasts for `--dry-run`: by the daemon, or, if there is none, from the files, of which nothing is changed."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from typing import TYPE_CHECKING, TypeVar

import sqlalchemy as sa

from pygraphd.cli.catalogue import Catalogue
from pygraphd.cli.output import complain
from pygraphd.cli.spool_catalogue import SpoolCatalogue
from pygraphd.cli.writing import running_daemon
from pygraphd.daemon import database_files, importing, queries, spool, tables
from pygraphd.daemon.exchange import ImportAnswer
from pygraphd.daemon.pruning import PruneAnswer, PruneProgress
from pygraphd.daemon.rederiving import summary
from pygraphd.errors import DatabaseError
from pygraphd.schema import offline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from pygraphd.daemon.pruning import PruneRequest
    from pygraphd.daemon.rederiving import Outcome, RederiveAnswer, RederiveRequest
    from pygraphd.schema.locations import Locations
    from pygraphd.schema.portable import Portable

_T = TypeVar("_T")


def prune(locations: Locations, requests: Sequence[PruneRequest]) -> PruneAnswer:
    """Return what requests with `dry_run` would delete; raises CommandError."""
    if (daemon := running_daemon(locations)) is not None:
        first, *others = map(daemon.prune, requests)
    else:
        with _opened(locations) as own:
            first, *others = (_prune(own, locations, request) for request in requests)
    return sum(others, first)


def rederive(locations: Locations, request: RederiveRequest) -> RederiveAnswer:
    """Return the outcome that a derivation would have; raises CommandError."""
    if (daemon := running_daemon(locations)) is not None:
        return daemon.rederive(request)
    with _opened(locations) as own:
        if own is None:
            return summary([], 0, dry_run=True)
        outcomes: list[Outcome] = []
        for some in queries.chunks(own.read(queries.measured)):
            outcomes += own.read(_rederiving(some))
        return summary(outcomes, own.read(queries.count_unmeasured), dry_run=True)


def add_imported(locations: Locations, entries: Iterable[Portable]) -> ImportAnswer:
    """Return the outcome that an import would have; raises CommandError."""
    with _opened(locations) as own:
        if own is None:
            return ImportAnswer(added=len({entry.key for entry in entries}), dry_run=True)
        now = time.time()
        return own.read(lambda connection: importing.foresee(connection, entries, now))


def _rederiving(ids: Sequence[str]) -> Callable[[sa.Connection], list[Outcome]]:
    now = time.time()
    return lambda connection: queries.rederive_entries(connection, ids, now, dry_run=True)


def _prune(own: Catalogue | None, locations: Locations, request: PruneRequest) -> PruneAnswer:
    answer = PruneAnswer(0, 0, 0, dry_run=True) if own is None else _counted(own, request)
    if request.everything and spool.is_any_waiting(locations.spool):
        # What a command would take in first. Older measurements of the same graphs, which would go at that time, are counted here.
        with SpoolCatalogue(locations.spool) as waiting:
            found = _counted(waiting, request)
            # Taken in, these would replace entries, and not add to them.
            known = 0 if own is None else _known(own, waiting.read(_all_ids))
        answer += PruneAnswer(found.entries - known, found.measurements, 0, dry_run=True)
    return answer


def _counted(catalogue: Catalogue, request: PruneRequest) -> PruneAnswer:
    done = PruneProgress()
    # A transaction for each portion: SQLite cannot begin its write-ahead log anew while a reader still needs
    # it.
    while not done.is_complete:
        done = catalogue.read(_counting(request, done))
    return done.answer(request, 0)


def _counting(request: PruneRequest, done: PruneProgress) -> Callable[[sa.Connection], PruneProgress]:
    def count(connection: sa.Connection) -> PruneProgress:
        after = done.after or 0
        found = queries.prunable(connection, request, done.began, after, queries.SCANNED)
        measurements = done.measurements + queries.count_measurements(connection, found.ids)
        return PruneProgress(done.entries + len(found.ids), measurements, found.after, done.began)

    return count


def _all_ids(connection: sa.Connection) -> list[str]:
    return list(connection.scalars(sa.select(tables.Decision.id)))


def _known(catalogue: Catalogue, ids: Sequence[str]) -> int:
    """Return how many of some ids have an entry."""
    # In chunks, since SQLite bounds the number of parameters.
    queried = [
        sa.select(tables.Decision.id).where(tables.Decision.id.in_(some)) for some in queries.chunks(ids)
    ]
    return sum(len(catalogue.rows(query)) for query in queried)


@contextlib.contextmanager
def _opened(locations: Locations) -> Iterator[Catalogue | None]:
    """Yield the catalogue, or None for a database that has no entries: there is none, or it would be set aside, which is said."""
    path = locations.database
    # SQLite takes an empty file for a new database.
    if not path.exists() or not path.stat().st_size:
        yield None
    # First: what a newer version wrote is neither written nor set aside.
    elif problem := database_files.why_read_only(path):
        raise DatabaseError(problem)
    elif reason := _inspected(path, _why_set_aside):
        complain(f"pygraphd: {path}: {reason}: a command that writes sets it aside, and begins a new one")
        yield None
    elif _inspected(path, _is_empty):
        yield None
    else:
        with Catalogue(path) as catalogue:
            yield catalogue


def _inspected(path: Path, look: Callable[[sqlite3.Connection], _T]) -> _T | str:
    """Return what `look` finds in a database, or SQLite's error if the file is damaged; raises CommandError for other errors."""
    try:
        with contextlib.closing(offline.connect(path)) as connection:
            return look(connection)
    except sqlite3.Error as error:
        # The low byte is the error's kind; SQLite's extended codes have more in the others.
        if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF in database_files.DAMAGE:
            return str(error)
        raise DatabaseError(database_files.why_unreadable(path, error)) from error


def _is_empty(connection: sqlite3.Connection) -> bool:
    return not connection.execute("SELECT EXISTS (SELECT 1 FROM sqlite_schema)").fetchone()[0]


def _why_set_aside(connection: sqlite3.Connection) -> str:
    """Return why `daemon.database` would set a database aside; empty if it would not."""
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        return f"quick_check says: {' '.join(verdict.split())}"
    if _is_empty(connection):
        return ""
    (program,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if program != database_files.APPLICATION_ID:
        return "another program's database"
    return f"of version {version}, which was never released" if version < offline.OLDEST_MIGRATED else ""
