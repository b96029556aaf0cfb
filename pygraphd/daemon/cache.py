"""The cache for the event loop: all writes run on one thread, large lookups on another, and small ones at once.

Large bodies are decoded on those threads too, so that they do not delay other answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

from pygraphd.daemon.answers import Found
from pygraphd.daemon.evicting import Eviction, Limits
from pygraphd.daemon.leases import Holder, Leases
from pygraphd.daemon.processes import Processes
from pygraphd.daemon.pruning import PruneProgress, PruneRequest
from pygraphd.daemon.reader import Reader
from pygraphd.daemon.rederiving import RederiveRequest, summary
from pygraphd.daemon.spool import Intake
from pygraphd.daemon.statistics import Counters, Stored
from pygraphd.daemon.store import EndingError, Store, StoreError
from pygraphd.daemon.team.tier import Team
from pygraphd.schema import portable
from pygraphd.schema import shipped as shipping
from pygraphd.schema.messages import (
    LeaseAnswer,
    LeaseRequest,
    LookupRequest,
    RecordAnswer,
    RecordRequest,
    SizesAnswer,
    SizesRequest,
    decode,
)
from pygraphd.schema.portable import ImportRequest
from pygraphd.schema.shipped import Shipped
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pygraphd.daemon import queries
    from pygraphd.daemon.exchange import ImportAnswer
    from pygraphd.daemon.peer import Peer
    from pygraphd.daemon.pruning import PruneAnswer
    from pygraphd.daemon.rederiving import Outcome, RederiveAnswer
    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import SizedEntry
    from pygraphd.schema.portable import Portable
    from pygraphd.team_url import TeamUrl

HITS_DELAY_S = 2.0
"""How long after a hit its count reaches the database, if few are waiting."""
HITS_PORTION = 128
"""Counts written in one transaction: few, so that a record waits for milliseconds only."""
MAX_WAITING_HITS = 65_536
"""Entries whose counts wait in memory. Where more are hit before that is written, the further ones are not counted."""
_HITS_SHARE, _PRUNE_SHARE = 0.05, 0.2
"""The share of the writer's time that counting and pruning take while others ask for something."""
_SMALL_BYTES = 4096
"""Bodies up to this length, of some 55 graphs, are looked up on the event loop's thread."""
_SPOOL_S = 0.1
"""How long a lookup waits for the spool: less than its client waits for the lookup."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")


class Cache:
    """The store and its reader, each on a thread of its own; lookups of few graphs are read on the event loop."""

    def __init__(
        self, locations: Locations, store: Store, leases: Leases, limits: Limits | None = None
    ) -> None:
        self.counters = Counters()
        self._written = Counters()
        """The part of `counters` that the database has."""
        self.counted_since = time.time()
        """When `counters` began, in seconds since the epoch."""
        self._leases = leases
        self.processes = Processes(leases)
        self.shipped = Shipped()
        """Decisions that rank below those in the database."""
        self._loading: asyncio.Future[None] | None = None
        self.eviction = Eviction(locations.database, limits or Limits())
        self._asked = (0, 0)
        self._spool = Intake(locations.spool)
        self._store = store
        self._reader, self._large_reader = (Reader(locations.database) for _ in range(2))
        self._writing = ThreadPoolExecutor(1, "writer")
        self._reading = ThreadPoolExecutor(1, "reader")
        self._hits: dict[queries.Key, tuple[int, float]] = {}
        self._read_fault: str | None = None
        self._has_checked = False
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.team = Team(locations, self._store_of_team, self._count_of_team)
        self._writing_hits: asyncio.Task[None] | None = None
        self._ingesting: asyncio.Task[None] | None = None

    def lookup_at_once(self, body: bytes) -> bytes | None:
        """Return what `lookup` does, None where that would have to wait for something; raises InvalidMessageError."""
        if len(body) > _SMALL_BYTES or self._loading is not None:
            return None
        # On this thread: to hand it to another one takes longer than all of a lookup.
        found = self._find(self._reader, body)
        if found.missing and self._may_be_spooled():
            return None
        return self._answer(found)

    async def lookup(self, body: bytes) -> bytes:
        """Return the encoded answer to one lookup; raises InvalidMessageError. A database that cannot be read answers with misses."""
        if (answer := self.lookup_at_once(body)) is not None:
            return answer
        spooled = self.counters.spooled
        found = await self._run(self._reading, self._find, self._large_reader, body)
        for _ in range(2):  # a task under way may have listed the files before the latest came
            if found.missing and self._may_be_spooled():
                await asyncio.wait({self._ingestion()}, timeout=_SPOOL_S / 2)
        if found.missing and self.counters.spooled > spooled:
            found = await self._run(self._reading, self._find, self._large_reader, body)
        if self._loading is not None:
            await asyncio.wait({self._loading}, timeout=_SPOOL_S)
        return self._answer(found)

    def _answer(self, found: Found) -> bytes:
        environment, asked = found.request.environment, len(found.request.graphs)
        if self.team.is_used:
            self.team.want(environment, [*found.missing, *found.unusable])
        found, shipped = found.with_shipped(self.shipped)
        found.count(self.counters, shipped, functools.partial(self._leases.is_held, environment))
        self._note_hits(environment, found.texts)
        known = len(found.texts) + len(shipped)
        _log.debug("lookup in environment %.12s: %d of %d known", environment, known, asked)
        return found.encode(shipped)

    async def sizes(self, body: bytes) -> SizesAnswer:
        """Return the decided sizes of a graph; raises InvalidMessageError. A database that cannot be read answers with none."""
        request = decode(SizesRequest, body)
        for _ in range(2):  # as in `lookup`
            if self._may_be_spooled():
                await asyncio.wait({self._ingestion()}, timeout=_SPOOL_S / 2)
        found = await self._run(self._reading, self._find_sizes, request)
        self.counters.lookups += 1  # entries are hit when a program says which ones it used
        return SizesAnswer(request.environment, VERSION, request.graph, found)

    async def ship(self, setting: str) -> None:
        """Read the exports that a setting asks for, on a thread of its own; lookups wait for it, but not for long."""
        self._loading = asyncio.ensure_future(self._ship(setting))
        try:
            await self._loading
        finally:
            self._loading = None

    async def _ship(self, setting: str) -> None:
        self.shipped = await asyncio.to_thread(lambda: shipping.load(shipping.folder(setting)))
        for problem in self.shipped.problems:
            _log.error("%s", problem)
        _log.info("%d shipped decisions", len(self.shipped.known))

    async def record(self, body: bytes, peer: Peer) -> RecordAnswer:
        """Store a client's records; raises InvalidMessageError, StoreError."""
        request, stored = await self._run(self._writing, self._store_body, body, peer.uid)
        self.counters.records += stored
        environment = request.environment.digest()
        graphs = {
            final: [each.graph.digest for each in request.records if each.decision.final is final]
            for final in (True, False)
        }
        self._leases.recorded(environment, graphs[True], graphs[False], peer)
        _log.info("recorded %d decisions of uid %d in environment %.12s", stored, peer.uid, environment)
        return RecordAnswer(environment, VERSION, stored)

    def lease(self, body: bytes, peer: Peer) -> LeaseAnswer:
        """Say which graphs a client may measure; raises InvalidMessageError."""
        request = decode(LeaseRequest, body)
        granted = request.graphs
        if self._store.can_store:  # else no answer would come that the others could wait for
            asked = [each for each in request.graphs if not self.team.is_awaited(request.environment, each)]
            granted = self._leases.ask(request.environment, asked, Holder.of(request.holder, peer))
        self.processes.note_lease(peer, request.environment, request.graphs, granted)
        self.counters.leases += len(granted)
        _log.debug(
            "lease in environment %.12s: %d of %d granted to pid %d",
            request.environment,
            len(granted),
            len(request.graphs),
            peer.pid,
        )
        return LeaseAnswer(request.environment, VERSION, granted, self._leases.seconds)

    async def prune(self, body: bytes) -> PruneAnswer:
        """Delete entries; raises InvalidMessageError, StoreError."""
        request = decode(PruneRequest, body)
        if request.everything:
            await self._empty_spool()
        answer = await self._prune(request)
        if not request.dry_run:
            _log.info("pruned %d entries", answer.entries)
        return answer

    async def _prune(self, request: PruneRequest) -> PruneAnswer:
        with contextlib.suppress(StoreError):
            await self.write_hits()
        before, done = await self._run(self._writing, self._store.size), PruneProgress()
        while not done.is_complete:
            # A transaction at a time, so that nobody's record has to wait for all of them.
            one = functools.partial(self._store.prune_some, request, done)
            done = await self._run_gently(_PRUNE_SHARE, one)
            if self._is_closing:
                raise EndingError(f"pygraphd is ending; {done.entries} entries were pruned: prune once more")
        if not request.dry_run:
            await self._shrink()
        return done.answer(request, before - await self._run(self._writing, self._store.size))

    async def _shrink(self) -> None:
        # An end of the daemon leaves the file larger than it need be.
        while await self._run_gently(_PRUNE_SHARE, self._store.shrink_some) and not self._is_closing:
            pass

    async def rederive(self, body: bytes) -> RederiveAnswer:
        """Derive decisions anew; raises InvalidMessageError, StoreError."""
        request = decode(RederiveRequest, body)
        outcomes: list[Outcome] = []
        for some in await self._run(self._writing, self._store.measured):
            # A portion at a time, so that nobody's lookup or record has to wait for all of it.
            one = functools.partial(self._store.rederive_some, some, dry_run=request.dry_run)
            outcomes += await self._run_gently(_PRUNE_SHARE, one)
        unmeasured = await self._run(self._writing, self._store.count_unmeasured)
        answer = summary(outcomes, unmeasured, dry_run=request.dry_run)
        if not request.dry_run:
            changed = sum(each.entries for each in answer.changed)
            _log.info("derived %d entries anew: %d changed their deployment", answer.entries, changed)
        return answer

    async def add_imported(self, body: bytes, peer: Peer) -> ImportAnswer:
        """Store imported entries; raises InvalidMessageError, StoreError."""
        answer = await self._run(self._writing, self._add_imported, body, peer.uid)
        _log.info("imported %d entries of uid %d", answer.added + answer.replaced, peer.uid)
        return answer

    async def describe(self) -> tuple[int | None, list[str]]:
        """Return the number of entries (None if it cannot be counted) and the problems for `pygraphd status`."""
        return await self._run(self._writing, self._describe)

    async def size(self) -> int | None:
        """Return the database's size in bytes, None if it cannot be read."""
        try:
            return await self._run(self._writing, self._store.size)
        except StoreError:
            return None

    async def use_team(self, url: TeamUrl) -> None:
        """Exchange decisions with a team's database from now on; empty: with none."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self.team.use, url)

    def set_lease(self, seconds: float) -> None:
        """Set the time of leases that are granted from now on."""
        self._leases.seconds = seconds

    async def housekeep(self) -> None:
        """Write hit counts, read the spool, write statistics. A step that fails is repeated at the next housekeeping."""
        await self._run(self._writing, self._store.retry)
        self._has_checked = False
        self._write_hits_later()
        await asyncio.wait({self._ingestion()})
        try:
            await self._evict()
            await self.write_statistics()
        except StoreError as error:
            _log.warning("housekeeping: %s", error)

    async def _evict(self) -> None:
        before, self._asked = self._asked, (self.counters.lookups, self.counters.records)
        pack = functools.partial(self._run, self._writing, self._store.pack)
        self.counters.evicted += await self.eviction.keep(self._prune, pack, is_quiet=before == self._asked)

    async def _empty_spool(self) -> None:
        """Store all that waits in the spool, as far as it can be stored."""
        before = -1
        while before < self.counters.spooled and self._spool.is_any_waiting():
            before = self.counters.spooled
            await asyncio.wait({self._ingestion()})

    def _ingestion(self) -> asyncio.Task[None]:
        """Return the task that stores the records in the spool; there is one at a time."""
        if self._ingesting is None or self._ingesting.done():
            self._ingesting = asyncio.create_task(self._take_in_spool())
        return self._ingesting

    def _may_be_spooled(self) -> bool:
        # A file goes once it is stored, which may be after its records were missed.
        return not (self._ingesting is None or self._ingesting.done()) or self._spool.is_any_waiting()

    async def _take_in_spool(self) -> None:
        taken = 0
        try:
            for name in await self._run(self._reading, self._spool.records):
                # A file at a time, so that nobody's record has to wait for all of them.
                stored = await self._run(self._writing, self._spool.ingest, name, self._queue_and_store)
                self.counters.spooled += stored
                taken += stored
        except StoreError as error:
            _log.warning("spool: %s", error)
        if taken:
            _log.info("stored %d records from the spool", taken)

    def _write_hits_later(self) -> None:
        if self._hits and (self._writing_hits is None or self._writing_hits.done()):
            self._writing_hits = asyncio.create_task(self._write_hits_slowly())

    async def _write_hits_slowly(self) -> None:
        # Soon enough for who looks at the cache next, late enough for a burst of lookups to be one write.
        await asyncio.sleep(HITS_DELAY_S)
        with contextlib.suppress(StoreError):  # kept until the next hit or housekeeping
            while self._hits:
                await self._write_some_hits(_HITS_SHARE)

    async def write_hits(self) -> None:
        """Add the hits counted so far to the database; raises StoreError, and then keeps them."""
        for _ in range(0, len(self._hits), HITS_PORTION):
            await self._write_some_hits()

    async def _write_some_hits(self, share: float = 1.0) -> None:
        portion = dict(itertools.islice(self._hits.items(), HITS_PORTION))
        for key in portion:
            del self._hits[key]
        add = functools.partial(self._store.add_hits, portion, self.counted_since)
        try:
            saved = await self._run_gently(share, add)
        except StoreError:
            for (environment, graph), (count, last) in portion.items():
                self._note_hit(environment, graph, count, last)
            raise
        self.counters += saved
        self._written += saved

    async def write_statistics(self) -> None:
        """Add the counts of this process to the stored statistics; raises StoreError, and then keeps them."""
        counted = self.counters - self._written
        if counted == Counters():
            return
        self._written += counted
        try:
            await self._run(self._writing, self._store.add_statistics, counted, self.counted_since)
        except StoreError:
            self._written += Counters() - counted
            raise

    async def statistics(self) -> Stored | None:
        """Return the stored statistics, None if they cannot be read."""
        pending = self.counters - self._written
        try:
            stored = await self._run(self._writing, self._store.statistics)
        except StoreError:
            return None
        stored = stored or Stored(self.counted_since, Counters())
        total = stored.counters
        total += pending
        return stored

    async def zero_statistics(self) -> None:
        """Begin the statistics anew: since the start, and in all. Raises StoreError."""
        await self._run(self._writing, self._store.zero_statistics)
        self.counters.clear()
        self._written.clear()
        self.counted_since = time.time()
        _log.info("statistics begun anew")

    async def _run_gently(self, share: float, function: Callable[[], _T]) -> _T:
        """Run a piece of long work on the writer's thread, then leave that to others for as long as `share` asks for, if there are any."""
        started, requests = time.monotonic(), self._requests
        # Shielded: what has been taken from the counts must be written even if this task is cancelled.
        result = await asyncio.shield(self._run(self._writing, function))
        is_alone = requests == self._requests
        await asyncio.sleep(0 if is_alone else (time.monotonic() - started) * (1 / share - 1))
        return result

    @property
    def _requests(self) -> int:
        return self.counters.lookups + self.counters.records

    def end_long_work(self) -> None:
        """Have prunes end after their present piece."""
        self._is_closing = True

    async def close(self) -> None:
        """Finish running work, write pending hit counts, close the database."""
        self.end_long_work()
        await asyncio.to_thread(self.team.close)
        for task in (self._writing_hits, self._ingesting):
            if task is not None:
                task.cancel()
        with contextlib.suppress(StoreError):
            await self.write_hits()
        with contextlib.suppress(StoreError):
            await self.write_statistics()
        self._reader.close()
        await self._run(self._reading, self._large_reader.close)
        await self._run(self._writing, self._store.close)
        self._reading.shutdown()
        self._writing.shutdown()

    def _find(self, reader: Reader, body: bytes) -> Found:
        request = decode(LookupRequest, body)
        found = self._read(reader, lambda: reader.find(request))
        return found or Found(request, missing=dict.fromkeys(request.graphs, "unreadable"))

    def _find_sizes(self, request: SizesRequest) -> tuple[SizedEntry, ...]:
        reader = self._large_reader
        return self._read(reader, lambda: reader.sizes(request)) or ()

    def _read(self, reader: Reader, action: Callable[[], _T]) -> _T | None:
        """Return what `action` reads; None if the database cannot be read, which is noted."""
        try:
            found = action()
        except (sqlite3.Error, OSError, ValueError) as error:
            self._note_read_fault(f"lookups fail: {error}")
            reader.close()
            if not self._has_checked:  # else each lookup would have the whole file read
                self._has_checked = True
                self._writing.submit(self._store.check)
            return None
        self._note_read_fault(None)
        return found

    def _note_read_fault(self, fault: str | None) -> None:
        if fault is not None and self._read_fault is None:
            _log.error("%s", fault)
        elif fault is None and self._read_fault is not None:
            _log.info("lookups work again")
        self._read_fault = fault

    def _store_body(self, body: bytes, uid: int) -> tuple[RecordRequest, int]:
        request = decode(RecordRequest, body)
        return request, self._queue_and_store(request, uid)

    def _queue_and_store(self, request: RecordRequest, uid: int) -> int:
        at = time.time()  # one for both: what the queue has no room for is looked for in the database by it
        self.team.queue(request, uid, at)
        return self._store.record(request, uid, at)

    def _store_of_team(self, entries: Sequence[Portable]) -> None:
        """Store what the team knew, as imported entries are stored; called on the team's thread."""
        for request in portable.requests(entries):
            try:
                self._writing.submit(self._store.add_imported, request, os.geteuid()).result()
            except StoreError as error:
                _log.warning("team: %s", error)

    def _count_of_team(self, counted: Counters) -> None:
        def add() -> None:
            self.counters += counted

        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(add)

    def _add_imported(self, body: bytes, uid: int) -> ImportAnswer:
        return self._store.add_imported(decode(ImportRequest, body), uid)

    def _describe(self) -> tuple[int | None, list[str]]:
        try:
            entries = self._store.count_entries()
        except StoreError:
            return None, self._problems()
        return entries, self._problems()

    def _problems(self) -> list[str]:
        fault = [self._read_fault] if self._read_fault else []
        return [*self._store.problems(), *fault, *self._spool.problems(), *self.shipped.problems]

    def _note_hits(self, environment: str, graphs: Iterable[str]) -> None:
        now = time.time()
        for graph in graphs:
            self._note_hit(environment, graph, 1, now)
        self._write_hits_later()

    def _note_hit(self, environment: str, graph: str, count: int, last: float) -> None:
        key = (environment, graph)
        known, known_last = self._hits.get(key, (0, 0.0))
        if known or len(self._hits) < MAX_WAITING_HITS:
            self._hits[key] = (known + count, max(known_last, last))

    async def _run(self, executor: ThreadPoolExecutor, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)
