"""The thread that talks to a team's database: asks for graphs that programs miss, and publishes their measurements.

No request waits for it. A failure is logged once, and the call is tried again after a pause; records stay in the queue meanwhile.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import TYPE_CHECKING

import sqlalchemy as sa

from pygraphd.daemon.statistics import Counters
from pygraphd.daemon.team import fetching, publishing
from pygraphd.daemon.team.backoff import Backoff
from pygraphd.daemon.team.connecting import Database, Fault, TeamError
from pygraphd.daemon.team.fetching import Fetched
from pygraphd.daemon.team.state import TeamState
from pygraphd.daemon.team.tables import SCHEMA, VERSION_TABLE, VERSIONS, metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.daemon.team.older import LocalCache
    from pygraphd.daemon.team.queue import Publication, Queue
    from pygraphd.daemon.team.wanted import Batch, Wanted
    from pygraphd.schema.portable import Portable
    from pygraphd.team_url import TeamUrl

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
"""The pauses between tries while the database cannot be used."""
_RIGHTS_PAUSE_S = 5.0, 600.0
"""The pauses between tries to publish while the role may only read, and to read the cache after a fault."""
LINGER_S = 5.0
"""How long a connection is kept that nobody needs: thousands of daemons share one server, which has hundreds."""
COUNT_S = 60.0
"""How long a count of what is to be published of the cache stays, while more is left to it: a count passes over all entries."""
_CLOSE_S = 1.0
_READS_ONLY = "the role may only read"

_log = logging.getLogger(__name__)


class Worker:
    """One thread for one database, between `start` and `close`.

    `deliver` stores the team's records, and `count` adds to the daemon's statistics; both are called on the thread.
    What of `cache` was not published is, whenever the queue is nearly empty.
    """

    def __init__(
        self,
        url: TeamUrl,
        queue: Queue,
        wanted: Wanted,
        deliver: Callable[[Sequence[Portable]], None],
        count: Callable[[Counters], None],
        cache: LocalCache,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = url
        self._queue = queue
        self._wanted = wanted
        self._deliver = deliver
        self._count = count
        self._clock = clock
        self._cache = cache
        queue.note_team(time.time())
        self._left = 0
        self._count_due = 0.0
        self._counted: tuple[float, float] | None = None
        """The times of the part of the cache in which `left` entries are to be published."""
        self._database: Database | None = None
        self._pauses = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, clock)
        self._publishing_pauses, self._cache_pauses = (Backoff(*_RIGHTS_PAUSE_S, clock) for _ in range(2))
        self._why_not_published = ""
        self._problem = ""
        self._failing_since: float | None = None
        self._answered_at: float | None = None
        self._used = 0.0
        self._turn = threading.Condition()
        self._is_woken = False
        self._close_by = math.inf
        # daemon=True: one that hangs in the network must not keep the process from its end.
        self._thread = threading.Thread(target=self._run, name="team", daemon=True)

    def start(self) -> None:
        """Start the thread; it connects once, so that `status` can say at once whether that is possible."""
        self._thread.start()

    def wake(self) -> None:
        """Have the thread look for work; for any thread."""
        with self._turn:
            self._is_woken = True
            self._turn.notify()

    def close(self) -> None:
        """Publish what waits if that takes less than a second, and end the thread; what is left stays in the queue."""
        with self._turn:
            self._close_by = time.monotonic() + _CLOSE_S
            self._turn.notify()
        if not self._thread.is_alive():
            return
        self._thread.join(_CLOSE_S)
        if (database := self._database) is not None:
            database.hang_up()
        self._thread.join(_CLOSE_S)

    @property
    def can_answer(self) -> bool:
        """Whether the database answered when it was last asked, or has not been asked yet."""
        return not self._pauses.has_failed

    def state(self) -> TeamState:
        """Return the state; for any thread."""
        return TeamState(
            url=str(self.url),
            answered_at=self._answered_at,
            failing_since=self._failing_since,
            problem=self._problem,
            retry_s=self._pauses.wait_s,
            why_not_published=self._why_not_published,
            queued=len(self._queue),
            unpublished=self._left,
            wanted=len(self._wanted),
            dropped=self._queue.dropped,
            queue_problem=_printable(self._queue.problem or self._queue.note or ""),
        )

    def step(self) -> float | None:
        """Do all work that is due; return the seconds until more may be due, None: not before it is woken."""
        if (pause_s := self._pauses.wait_s) > 0:
            return pause_s
        was_open = self._database is not None and self._database.is_open
        try:
            is_done = self._exchange()
        except TeamError as error:
            if was_open and error.fault is Fault.UNREACHABLE:
                return 0.0  # the connection may have been closed while nobody used it
            self._note_failure(error)
            return self._pauses.wait_s
        if not is_done:
            return 0.0
        return self._linger()

    def _run(self) -> None:
        while True:
            try:
                pause_s = self.step()
            except Exception:  # noqa: BLE001 - the daemon must not lose its team for one row that nobody foresaw
                _log.exception("team")
                self._note_failure(TeamError(Fault.UNREACHABLE, "an error in pygraphd; its log says more"))
                pause_s = self._pauses.wait_s
            with self._turn:
                if not self._is_woken and not self._is_closing:
                    self._turn.wait(pause_s)
                has_more, self._is_woken = self._is_woken or pause_s == 0.0, False
                if self._is_closing and not (has_more and time.monotonic() < self._close_by):
                    break
        if self._database is not None:
            self._database.close()

    @property
    def _is_closing(self) -> bool:
        return self._close_by < math.inf

    def _exchange(self) -> bool:
        """Fetch all that is wanted, publish a batch; return whether nothing is left to do. Raises TeamError."""
        if self._database is None:
            self._database = Database(self.url)
        database = self._database
        self._count_older()
        has_work = bool(len(self._wanted) or self._may_publish() or self._may_queue_older())
        # Else it connects although nothing is to be done, so that `status` tells the present state.
        if not has_work and self._answered_at is not None and not self._problem:
            return True
        # At each new connection: the owner may have migrated the tables, or changed the rights, meanwhile.
        if not database.is_open:
            self._check(database)
        # Before all publishing: programs wait for answers, and nobody for what is published.
        self._fetch(database)
        if self._may_queue_older():
            self._queue_older()
        if self._may_publish():
            if batch := self._queue.first(publishing.BATCH_RECORDS):
                self._publish(database, batch)
            if self._queue.problem:  # or one batch would be published again and again
                self._publishing_pauses.failed()
        self._note_success()
        return not (self._may_publish() or self._may_queue_older() or len(self._wanted))

    def _may_publish(self) -> bool:
        return len(self._queue) > 0 and not self._publishing_pauses.wait_s

    def _may_queue_older(self) -> bool:
        # A few at a time: what is recorded now must find room in the queue, and where nothing may be published, none would leave it.
        is_due = self._queue.unpublished is not None and len(self._queue) < publishing.BATCH_RECORDS
        may_publish = not self._why_not_published and not self._publishing_pauses.wait_s
        return is_due and may_publish and not self._cache_pauses.wait_s

    def _count_older(self) -> None:
        """Count what is to be published of the cache, if that is another part than before."""
        if (part := self._queue.unpublished) is None:
            self._left, self._counted = 0, None
            return
        times = part.since, part.until
        is_recent = self._counted is not None and self._clock() < self._count_due
        if times == self._counted or self._cache_pauses.wait_s or (is_recent and not self._may_queue_older()):
            return
        try:
            self._left = self._cache.count(part)
        except Exception as error:  # noqa: BLE001 - the cache may hold what nobody foresaw, which must keep nothing else back
            self._note_cache_fault(error)
        else:
            self._counted, self._count_due = times, self._clock() + COUNT_S

    def _queue_older(self) -> None:
        if (part := self._queue.unpublished) is None:
            return
        try:
            found, place = self._cache.page(part)
        except Exception as error:  # noqa: BLE001 - as above
            self._note_cache_fault(error)
            return
        self._queue.put_older(found, part, place)
        if self._queue.problem:  # or one page would be read again and again
            self._cache_pauses.failed()
            return
        self._cache_pauses.succeeded()
        self._left = 0 if place is None else max(self._left - len(found), 0)

    def _note_cache_fault(self, error: Exception) -> None:
        if not self._cache_pauses.has_failed:
            _log.warning("team: what was not published of the cache cannot be read now: %s", error)
        self._cache_pauses.failed()

    def _check(self, database: Database) -> None:
        """Connect, and see whether the tables are of this version and what the role may do with them."""
        with database.transaction() as connection:
            version = connection.execute(_VERSION).scalar()
            if version != VERSIONS[-1]:
                raise TeamError(Fault.VERSION, _other_version(version))
            names = {"names": [table.fullname for table in metadata.sorted_tables]}
            may_insert = connection.execute(_MAY_INSERT, names).scalar()
        if not may_insert:
            self._stop_publishing(_READS_ONLY)
        # Only this reason: the rights say nothing of another, which the next publication has to lift.
        elif self._why_not_published == _READS_ONLY:
            self._publish_again()

    def _fetch(self, database: Database) -> None:
        while (batch := self._wanted.take()) is not None:
            try:
                found = _found(database, batch)
            except BaseException:
                self._wanted.put_back(batch)
                raise
            if found.entries:
                self._deliver(found.entries)
            self._wanted.answered(batch)
            self._count(
                Counters(
                    team_asked=len(batch.graphs), team_found=len(found.entries), team_invalid=found.invalid
                )
            )
            if found.invalid:
                _log.warning("team: %d records are not valid, and not used", found.invalid)

    def _publish(self, database: Database, batch: Sequence[Publication]) -> None:
        try:
            with database.transaction() as connection:
                added = publishing.publish(connection, batch)
        except TeamError as error:
            self._note_refusal(database, batch, error)
            return
        # Before the queue is shortened: who sees that nothing is left to publish finds all of it counted.
        self._count(Counters(team_published=added))
        self._queue.remove([each.id for each in batch])
        self._publish_again()

    def _note_refusal(self, database: Database, batch: Sequence[Publication], error: TeamError) -> None:
        """Go on after a batch that was not published; raises the error unless something else can be done."""
        if error.fault is Fault.RIGHTS:
            # The role's rights say more than the table at which it failed.
            self._stop_publishing(self._why_not_published or str(error))
        elif error.fault is Fault.DATA and len(batch) > 1:
            # One at a time finds the record that is refused, and lets the others go on.
            for each in batch:
                self._publish(database, [each])
        elif error.fault is Fault.DATA:
            _log.warning("team: a record is refused, and not published: %s", error)
            self._queue.drop([each.id for each in batch])
        else:
            raise error

    def _stop_publishing(self, why: str) -> None:
        if not self._why_not_published:
            _log.warning("team: nothing is published: %s", why)
        self._why_not_published = why
        self._publishing_pauses.failed()

    def _publish_again(self) -> None:
        if self._why_not_published:
            _log.info("team: records are published again")
        self._why_not_published = ""
        self._publishing_pauses.succeeded()

    def _linger(self) -> float | None:
        """Close a connection that was not used for some time; return when to look again."""
        if self._database is None or not self._database.is_open:
            return self._later_s
        left_s = self._used + LINGER_S - self._clock()
        if left_s > 0:
            return left_s
        self._database.close()
        return self._later_s

    @property
    def _later_s(self) -> float | None:
        """Seconds until what has failed here is tried again, None: nothing has."""
        waits = (each.wait_s for each in (self._publishing_pauses, self._cache_pauses) if each.wait_s)
        return min(waits, default=None)

    def _note_success(self) -> None:
        if self._problem:
            _log.info("team: %s answers again", self.url)
        elif self._answered_at is None:
            _log.info("team: %s answers", self.url)
        self._pauses.succeeded()
        self._problem, self._failing_since = "", None
        self._answered_at, self._used = time.time(), self._clock()

    def _note_failure(self, error: TeamError) -> None:
        self._pauses.failed()
        # `close` has hung up, which is no fault of the server's.
        if self._is_closing:
            return
        problem = _advice(error)
        if problem != self._problem:
            _log.warning("team: %s: %s", self.url, problem)
        if not self._problem:
            self._failing_since = time.time()
        self._problem = problem
        self._count(Counters(team_failed=1))


def _found(database: Database, batch: Batch) -> Fetched:
    """Return the team's records of a batch's graphs. One that the server cannot read keeps none of the others back."""
    try:
        with database.transaction() as connection:
            return fetching.fetch(connection, batch)
    except TeamError as error:
        if error.fault is not Fault.DATA:
            raise
        if len(batch.graphs) == 1:
            return Fetched((), invalid=1)
    first, second = (_found(database, half) for half in batch.halves)
    return Fetched(first.entries + second.entries, first.invalid + second.invalid)


def _other_version(version: object) -> str:
    if version in VERSIONS:
        return f"its tables are of version {version}, older than this pygraphd; its owner runs: pygraphd team init"
    return f"its tables are of version {version!s:.40}, which this pygraphd does not know: upgrade pygraphd"


def _advice(error: TeamError) -> str:
    if error.fault is Fault.SCHEMA:
        return f"it has no tables of pygraphd ({error}); its owner runs: pygraphd team init"
    return str(error)


def _printable(text: str) -> str:
    return "".join(each if each.isprintable() else " " for each in text)


_VERSION = sa.text(f"SELECT left(version_num, 64) FROM {SCHEMA}.{VERSION_TABLE}")
# A standby lets nobody write, whatever rights a role has.
_MAY_INSERT = sa.text(
    "SELECT NOT pg_is_in_recovery() AND bool_and(has_table_privilege(name, 'INSERT'))"
    " FROM unnest(CAST(:names AS text[])) AS name"
)
