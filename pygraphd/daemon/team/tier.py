"""The team tier's interface for the daemon: takes missing graphs and new records, and never makes a program wait.

Without a URL it does nothing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from pygraphd.daemon.team.older import LocalCache
from pygraphd.daemon.team.queue import Queue, publications
from pygraphd.daemon.team.wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pygraphd.daemon.statistics import Counters
    from pygraphd.daemon.team.state import TeamState
    from pygraphd.daemon.team.worker import Worker
    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import RecordRequest
    from pygraphd.schema.portable import Portable
    from pygraphd.team_url import TeamUrl

AWAITED_S = 0.4
"""How long a lease is withheld for a graph that the team is being asked for: less than the half second after which its program asks again."""


class Team:
    """The queue, the graphs that are wanted, and the worker of the present URL. Any thread may call it."""

    def __init__(
        self,
        locations: Locations,
        deliver: Callable[[Sequence[Portable]], None],
        count: Callable[[Counters], None],
    ) -> None:
        self._queue_file = locations.team_queue
        self._cache = LocalCache(locations.database)
        self._deliver = deliver
        self._count = count
        self._wanted = Wanted()
        self._lock = threading.Lock()
        self._queue: Queue | None = None
        self._worker: Worker | None = None

    def use(self, url: TeamUrl) -> None:
        """Exchange with this database from now on, instead of the one before; empty: with none."""
        with self._lock:
            # The queue stays open: another team gets what waits.
            if self._worker is not None and self._worker.url != url:
                self._worker.close()
                self._worker = None
            if url and self._worker is None:
                # Imported here: a daemon without a team needs no dialect of PostgreSQL.
                from pygraphd.daemon.team.worker import Worker

                if self._queue is None:
                    self._queue = Queue(self._queue_file)
                self._worker = Worker(url, self._queue, self._wanted, self._deliver, self._count, self._cache)
                self._worker.start()

    def close(self) -> None:
        """Exchange with none, for good; queued records stay in their file."""
        with self._lock:
            worker, self._worker = self._worker, None
            queue, self._queue = self._queue, None
            if worker is not None:
                worker.close()
            if queue is not None:
                queue.close()

    @property
    def is_used(self) -> bool:
        """Whether there is a team."""
        return self._worker is not None

    def want(self, environment: str, graphs: Iterable[str]) -> None:
        """Have the team asked for graphs that are not known here; returns at once."""
        # Without the lock, which `use` holds while a worker ends: no lookup waits for that.
        if (worker := self._worker) is not None and self._wanted.add(environment, graphs):
            worker.wake()

    def is_awaited(self, environment: str, graph: str) -> bool:
        """Return whether the team's answer for a graph may come any moment."""
        worker = self._worker
        return (
            # While the server does not answer, leases are granted at once.
            worker is not None
            and worker.can_answer
            and self._wanted.is_awaited(environment, graph, AWAITED_S)
        )

    def queue(self, request: RecordRequest, uid: int, at: float) -> None:
        """Queue the publications of a request, before it is stored as measured at `at`. Raises nothing."""
        worker, queue = self._worker, self._queue
        if worker is not None and queue is not None:
            queue.put(publications(request, uid, at))
            worker.wake()

    def state(self) -> TeamState | None:
        """Return the state, None without a team."""
        return None if (worker := self._worker) is None else worker.state()
