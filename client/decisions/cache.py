"""Access to the cache of decisions: sends lookups, records and leases to the daemon, or works on files. `decision_service` uses it.

Without a daemon, it reads the database, the spool and the shipped decisions, and leaves records in the spool. Graphs without a
final decision of this cache are looked up in the bundle. Raises nothing, and each call takes a fraction of a second at most. Failures are counted in the
report. After two failures that took time, this process does not ask the daemon again.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import TYPE_CHECKING, TypeVar

from pygraphd.client.decisions import daemon_start, spool
from pygraphd.client.decisions.bundle import MAX_BUNDLE_ENTRIES, Bundle
from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.schema import messages, offline, portable, shipped
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.messages import (
    Entry,
    LeaseAnswer,
    LeaseRequest,
    LookupAnswer,
    LookupRequest,
    Record,
    RecordAnswer,
    RecordRequest,
    SizedEntry,
    SizesAnswer,
    SizesRequest,
)
from pygraphd.schema.ownership import refuse_shared
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pygraphd.client.common.report import Report
    from pygraphd.schema.keys import Environment
    from pygraphd.schema.locations import Locations

# Each may have taken `transport.TOTAL_S` of the program's time.
MAX_DAEMON_FAILURES = 2
OTHER_VERSION = "of another version; run: pygraphd restart"
_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""Variables in which schedulers name the job."""
_Read = TypeVar("_Read", Entry, SizedEntry)
_Answer = TypeVar("_Answer", LookupAnswer, SizesAnswer, RecordAnswer, LeaseAnswer)


class Cache:
    """One process's view of the shared cache."""

    def __init__(self, locations: Locations, host: str, report: Report, *, readonly: bool = False) -> None:
        """Record as `host`. `readonly`: nothing is recorded, and no lease is asked for."""
        self.bundle = Bundle(locations, report)
        self._handed_over: set[tuple[str, str]] = set()
        self._readonly = readonly
        self._locations = locations
        self._transport = Transport(locations.socket)
        self._origin = messages.Origin(host, VERSION, _job())
        self._report = report
        self._failures = 0
        self._unknown: set[str] = set()
        self._holder = uuid.uuid4().hex
        self._spooled: dict[str, dict[str, spool.Spooled]] = {}

    def lookup(self, environment: Environment, graphs: Sequence[str]) -> dict[str, Entry]:
        """Return the stored entries by graph digest."""
        began = time.perf_counter()
        requests = [LookupRequest(environment.digest(), tuple(some)) for some in messages.portions(graphs)]
        known: dict[str, Entry] = {}
        for request in requests:
            entries = self._ask(request)
            if entries is None:
                entries = self._read_files(request)
            known |= {entry.graph: entry for entry in entries if entry.graph in request.graphs}
        unknown = [
            graph for graph in graphs if (entry := known.get(graph)) is None or _ranks_below_a_bundle(entry)
        ]
        if found := self.bundle.find(environment, unknown):
            self._hand_over(found)
            known |= {each.record.graph.digest: each.entry() for each in found}
        self._report.lookup_ms += (time.perf_counter() - began) * 1e3
        return known

    def sizes(self, environment: Environment, graph: str, most: int) -> list[SizedEntry]:
        """Return final entries for the sizes of a graph (digest), by one request, at most `most` of them: the most used first.

        Neither shipped entries nor files of a bundle are among them: `lookup` finds the better one of a size that has both.
        """
        began = time.perf_counter()
        most = min(most, messages.MAX_REQUEST_GRAPHS)
        request = SizesRequest(environment.digest(), graph, most)
        if (answer := self._ask_for_sizes(request)) is not None:
            entries = answer.entries
        else:  # no files, if there is a daemon that does not know the request
            entries = () if messages.SIZES_PATH in self._unknown else self._read_sizes(request)
        self._report.lookup_ms += (time.perf_counter() - began) * 1e3
        # An older daemon lists shipped ones, the spool has provisional ones.
        return [each for each in entries if not _ranks_below_a_bundle(each.entry)][:most]

    def count_hits(self, environment: Environment, graphs: Sequence[str]) -> None:
        """Tell the daemon which of the entries that `sizes` returned are used, so that it knows the most used ones."""
        for some in messages.portions(graphs):
            self._ask(LookupRequest(environment.digest(), tuple(some)))

    def _hand_over(self, entries: Sequence[portable.Portable]) -> None:
        """Have the daemon import the entries that a bundle brought, once, so that it serves and shows them."""
        new = [each for each in entries if each.key not in self._handed_over]
        if len(self._handed_over) < MAX_BUNDLE_ENTRIES:  # else handed over again, which changes nothing
            self._handed_over.update(each.key for each in new)
        self._report.count(from_bundle=len(new))
        for request in portable.requests(new) if not self._readonly else ():
            self._send(messages.IMPORT_PATH, json.dumps(request.as_json()).encode())

    def record(self, environment: Environment, records: Sequence[Record]) -> None:
        """Record decisions and measurements: at the daemon, else in the spool."""
        for each in records:
            self.bundle.add(environment, self._origin, each)
        if self._readonly:
            self._report.count(withheld=len(records))
            return
        # A program may end with more undecided graphs than fit in one request.
        for some in messages.portions(records):
            self._record(RecordRequest(environment, self._origin, tuple(some)))

    def _record(self, request: RecordRequest) -> None:
        body = messages.encode(request)
        answer = self._exchange(messages.RECORD_PATH, body, RecordAnswer, request.environment.digest())
        if answer is not None:
            self._report.count(recorded=answer.stored)
        else:
            self._spool(body, request)

    def lease(self, environment: Environment, graphs: Sequence[str]) -> LeaseAnswer | None:
        """Ask for leases of some graphs, or prolong them; None: there is no daemon to ask."""
        if self._readonly:
            return None  # others are not to wait for an answer that will not come
        request = LeaseRequest(environment.digest(), self._holder, tuple(graphs))
        return self._exchange(messages.LEASE_PATH, messages.encode(request), LeaseAnswer, request.environment)

    def _ask(self, request: LookupRequest) -> tuple[Entry, ...] | None:
        answer = self._exchange(
            messages.LOOKUP_PATH, messages.encode(request), LookupAnswer, request.environment
        )
        return None if answer is None else answer.entries

    def _ask_for_sizes(self, request: SizesRequest) -> SizesAnswer | None:
        body = messages.encode(request)
        answer = self._exchange(messages.SIZES_PATH, body, SizesAnswer, request.environment)
        if answer is not None and answer.graph != request.graph:
            self._fail("daemon: answered for another graph")
            return None
        return answer

    def _exchange(self, target: str, body: bytes, kind: type[_Answer], environment: str) -> _Answer | None:
        answer = self._send(target, body)
        if answer is None:
            return None
        try:
            read = messages.decode(kind, answer)
        except InvalidMessageError:
            self._fail("daemon: answer not understood")
            return None
        # Counted like a failure that took time: a daemon that mixes up answers is not asked on.
        if read.environment != environment:
            self._fail("daemon: answered for another environment")
            return None
        self._report.daemon_version = read.version
        return read

    def _send(self, target: str, body: bytes) -> bytes | None:
        if self._failures >= MAX_DAEMON_FAILURES or target in self._unknown:
            return None
        try:
            return self._transport.request("POST", target, body)
        except TransportError as error:
            if error.unknown:
                # A daemon of another version: only this path is given up.
                self._unknown.add(target)
                self._fail(f"daemon: {OTHER_VERSION}", free=True)
            elif not (error.absent and self._is_starting()):
                self._fail(f"daemon: {error}", free=error.absent)
            return None

    def _fail(self, reason: str, *, free: bool = False) -> None:
        self._failures += not free
        self._report.count_failure(reason)

    def _read_files(self, request: LookupRequest) -> tuple[Entry, ...]:
        own = self._read_own(request)
        read = self._load_shipped(request.graphs)
        return own + tuple(known.entry for known in read.for_unanswered(request, shipped.answered(own)))

    def _read_own(self, request: LookupRequest) -> tuple[Entry, ...]:
        entries = self._read_database(lambda database: offline.read_entries(database, request))
        found = {entry.graph for entry in entries}
        spooled = self._read_spool(request.environment)
        return entries + tuple(
            spooled[graph].entry for graph in request.graphs if graph in spooled and graph not in found
        )

    def _read_sizes(self, request: SizesRequest) -> tuple[SizedEntry, ...]:
        entries = self._read_database(lambda database: offline.read_sizes(database, request))
        found = {each.entry.graph for each in entries}
        spooled = [
            each
            for each in self._read_spool(request.environment).values()
            if each.graph.whole == request.graph and each.graph.digest not in found
        ]
        spooled.sort(key=lambda each: each.left_at)
        return entries + tuple(SizedEntry(each.graph.sizes, each.entry) for each in spooled)

    def _load_shipped(self, graphs: Sequence[str]) -> shipped.Shipped:
        try:
            read = shipped.load(shipped.folder(os.environ.get(shipped.VARIABLE, "")), graphs)
        except ValueError as error:
            self._report.count_failure(f"{shipped.VARIABLE}: {error}")
            return shipped.Shipped()
        for problem in read.problems:
            self._report.count_failure(f"shipped: {problem}")
        return read

    def _read_database(self, read: Callable[[Path], tuple[_Read, ...]]) -> tuple[_Read, ...]:
        try:
            # In a folder that others may write to, anybody may have put the rows there.
            refuse_shared(self._locations.cache)
            # No database is no failure. SQLite's error would be the same for a file that cannot be opened.
            self._locations.database.stat()
            return read(self._locations.database)
        except (FileNotFoundError, NotADirectoryError):
            return ()
        except Exception as error:  # noqa: BLE001 - whatever lies there
            if not self._is_starting():  # else it is being made, or brought up to date
                self._report.count_failure(f"database: {_error_text(error)}")
            return ()

    def _is_starting(self) -> bool:
        return daemon_start.starting.is_under_way(self._locations.lock)

    def _read_spool(self, environment: str) -> dict[str, spool.Spooled]:
        # Once for a process: what it leaves there itself is added as it goes.
        if environment not in self._spooled:
            try:
                self._spooled[environment] = spool.read_entries(self._locations.spool, environment)
            except Exception as error:  # noqa: BLE001 - whatever lies there
                self._report.count_failure(f"spool: {_error_text(error)}")
                self._spooled[environment] = {}
        return self._spooled[environment]

    def _spool(self, body: bytes, request: RecordRequest) -> None:
        try:
            spool.leave(self._locations.spool, body)
        except Exception as error:  # noqa: BLE001 - whatever lies there
            self._report.count_failure(f"spool: {_error_text(error)}")
        else:
            self._report.count(spooled=len(request.records))
            known = self._spooled.get(request.environment.digest(), {})
            spool.merge(known, request, time.time(), newer=True)


def _error_text(error: Exception) -> str:
    strerror = error.strerror if isinstance(error, OSError) else None
    return strerror or f"{type(error).__name__}: {error}"


def _ranks_below_a_bundle(entry: Entry) -> bool:
    return not entry.decision.final or entry.host.startswith(shipped.SHIPPED)


def _job() -> str:
    """Return the name of the scheduler's job that this process belongs to; empty if there is none that can be stored."""
    name = next((os.environ[each] for each in _JOBS if os.environ.get(each)), "")
    return name if len(name) <= messages.MAX_JOB and name.isprintable() else ""
