"""The worker's steps one by one, on a clock that stands still, with a real server."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.statistics import Counters
from pygraphd.daemon.store import Store
from pygraphd.daemon.team import tables
from pygraphd.daemon.team import worker as module
from pygraphd.daemon.team.older import LocalCache
from pygraphd.daemon.team.queue import MAX_QUEUED, Queue, publications
from pygraphd.daemon.team.wanted import Wanted
from pygraphd.daemon.team.worker import LINGER_S, LONGEST_PAUSE_S, Worker
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.team_url import TeamUrl
from tests.support.record_requests import ENVIRONMENT, digest, record_request
from tests.support.team import PUBLISHER, READER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pygraphd.daemon.team.queue import Publication, Unpublished
    from pygraphd.schema.portable import Portable
    from tests.support.postgres import Postgres
    from tests.support.team import TeamDatabase

pytestmark = pytest.mark.team


class CountedCache(LocalCache):
    """Notes what was asked for, and fails when it is told to."""

    def __init__(self, database: Path) -> None:
        super().__init__(database)
        self.found: list[int] = []
        """The number of publications in each page."""
        self.counts = 0
        self.fault: Exception | None = None

    def count(self, part: Unpublished) -> int:
        self.counts += 1
        return super().count(part)

    def page(self, part: Unpublished) -> tuple[list[Publication], str | None]:
        if self.fault is not None:
            raise self.fault
        found, place = super().page(part)
        self.found.append(len(found))
        return found, place


class Steps:
    """A worker that is not started, and what it is made of."""

    def __init__(self, url: str, queue_file: Path, most: int) -> None:
        self.now = 1000.0
        self.store = Store(queue_file.with_suffix(".cache"))
        self.cache = CountedCache(queue_file.with_suffix(".cache"))
        self.queue, self.wanted = Queue(queue_file, most), Wanted(self._clock)
        self.counters = Counters()
        self.delivered: list[Portable] = []
        self.worker = self.make_worker(url)

    def make_worker(self, url: str) -> Worker:
        return Worker(
            TeamUrl(url),
            self.queue,
            self.wanted,
            self.delivered.extend,
            self._count,
            self.cache,
            self._clock,
        )

    def _clock(self) -> float:
        return self.now

    def _count(self, counted: Counters) -> None:
        self.counters += counted

    def put(self, *names: str) -> None:
        self.queue.put(publications(record_request(names), 7, 1.0))

    def record(self, *names: str, at: float) -> None:
        """Record as a daemon with a team does."""
        request = record_request(names, policy=POLICY_VERSION)
        self.queue.put(publications(request, 7, at))
        self.store.record(request, 7, at)

    def record_without_team(self, *names: str, at: float) -> None:
        self.store.record(record_request(names, policy=POLICY_VERSION), 7, at)

    def until_idle(self) -> float | None:
        """Take steps until nothing is due at once; return the pause that the worker asks for."""
        for _ in range(100):
            if (pause_s := self.worker.step()) != 0.0:
                return pause_s
        raise AssertionError("there is always more to do")


@pytest.fixture
def steps(shared: TeamDatabase, tmp_path: Path) -> Iterator[Callable[..., Steps]]:
    """Return a maker of workers that exchange as a role, whose queues hold `most` records."""
    made: list[Steps] = []

    def make(role: str, most: int = MAX_QUEUED) -> Steps:
        made.append(Steps(shared.url(role), tmp_path / f"{len(made)}.db", most))
        return made[-1]

    yield make
    for each in made:
        each.worker.close()
        each.queue.close()
        each.store.close()


def test_all_is_published_and_the_connection_closed_after_a_while(
    postgres: Postgres, shared: TeamDatabase, steps: Callable[..., Steps]
) -> None:
    one = steps(PUBLISHER)
    one.put(*map(str, range(150)))
    assert one.until_idle() == LINGER_S
    assert (len(one.queue), one.counters.team_published, len(shared.published())) == (0, 150, 150)

    sessions = "SELECT count(*) FROM pg_stat_activity WHERE usename = %s"
    assert postgres.execute("postgres", sessions, PUBLISHER) == [(1,)]
    one.now += LINGER_S
    assert one.until_idle() is None
    while postgres.execute("postgres", sessions, PUBLISHER) != [(0,)]:
        time.sleep(0.02)  # the server's process ends some time after its connection


def test_what_was_there_before_is_published_once_and_crowds_nothing_out(
    shared: TeamDatabase, steps: Callable[..., Steps]
) -> None:
    one = steps(PUBLISHER, 128)
    one.record_without_team(*map(str, range(300)), at=1.0)
    one.put(*(f"new {n}" for n in range(100)))
    one.worker.step()
    assert (one.cache.found, one.worker.state().unpublished) == ([], 300)
    one.until_idle()
    assert (len(one.queue), one.worker.state().unpublished, len(shared.published())) == (0, 0, 400)
    assert (max(one.cache.found), sum(one.cache.found), one.cache.counts) == (64, 300, 1)

    one.cache.found.clear()
    again = one.make_worker(shared.url(PUBLISHER))
    while again.step() == 0.0:
        pass
    again.close()
    assert one.cache.found == []


def test_a_reader_does_not_fill_its_queue_with_what_was_there_before(steps: Callable[..., Steps]) -> None:
    one = steps(READER)
    one.record_without_team("a", at=1.0)
    one.until_idle()
    assert (len(one.queue), one.cache.found, one.worker.state().unpublished) == (0, [], 1)
    assert one.queue.unpublished is not None


def test_what_the_queue_had_no_room_for_is_published_of_the_cache(
    postgres: Postgres, shared: TeamDatabase, steps: Callable[..., Steps]
) -> None:
    """Not what was measured before, which was published, nor what was measured without a team afterwards."""
    one = steps(PUBLISHER, 128)
    one.until_idle()
    now = time.time()
    one.record("before", at=now)
    one.until_idle()
    postgres.stop()
    for number in range(4):
        one.record(*(f"{number}.{each}" for each in range(100)), at=now + 1 + number)
    one.record_without_team("without", at=now + 9)
    one.worker.step()
    assert (len(one.queue), one.queue.dropped, one.worker.state().unpublished) == (128, 0, 300)

    postgres.start()
    one.now += LONGEST_PAUSE_S
    one.until_idle()

    names = ["before", *(f"{number}.{each}" for number in range(4) for each in range(100))]
    assert shared.published() == [(graph, PUBLISHER) for graph in sorted(map(digest, names))]
    assert (one.counters.team_published, sum(one.cache.found)) == (401, 300)
    assert (one.queue.unpublished, one.worker.state().unpublished) == (None, 0)


def test_the_next_daemon_goes_on_where_one_was_killed(
    shared: TeamDatabase, steps: Callable[..., Steps], tmp_path: Path
) -> None:
    one = steps(PUBLISHER)
    one.record_without_team(*map(str, range(300)), at=1.0)
    for _ in range(3):
        one.worker.step()
    assert one.cache.found == [64, 64, 64]
    one.worker.close()
    one.queue.close()

    one.queue = Queue(tmp_path / "0.db")
    one.worker = one.make_worker(shared.url(PUBLISHER))
    one.until_idle()
    assert (sum(one.cache.found), one.counters.team_published, len(shared.published())) == (300, 300, 300)


def test_a_cache_that_cannot_be_read_holds_up_no_record(
    shared: TeamDatabase, steps: Callable[..., Steps], caplog: pytest.LogCaptureFixture
) -> None:
    one = steps(PUBLISHER)
    one.record_without_team("older", at=1.0)
    one.cache.fault = OverflowError("nobody foresaw it")
    one.put("a")
    pause_s = one.until_idle()
    one.now += LONGEST_PAUSE_S
    one.put("b")
    one.until_idle()
    assert pause_s is not None
    assert (len(shared.published()), one.worker.state().unpublished) == (2, 1)
    assert caplog.text.count("nobody foresaw it") == 1

    one.cache.fault = None
    one.now += LONGEST_PAUSE_S
    one.until_idle()
    assert (len(shared.published()), one.worker.state().unpublished) == (3, 0)


def test_only_what_the_team_knows_is_delivered(steps: Callable[..., Steps]) -> None:
    one, other = steps(PUBLISHER), steps(READER)
    one.put("a")
    one.until_idle()
    other.wanted.add(ENVIRONMENT.digest(), [digest("a"), digest("b")])
    other.until_idle()
    [entry] = other.delivered
    assert (entry.record, entry.environment) == (record_request(["a"]).records[0], ENVIRONMENT)
    assert (other.counters.team_asked, other.counters.team_found, len(other.wanted)) == (2, 1, 0)


def test_a_connection_that_went_away_unused_is_no_failure(
    postgres: Postgres, shared: TeamDatabase, steps: Callable[..., Steps]
) -> None:
    one = steps(PUBLISHER)
    one.put("a")
    one.until_idle()
    postgres.kill_backends(shared.name)
    postgres.stop()
    postgres.start()
    one.put("b")
    assert one.until_idle() == LINGER_S
    assert (one.counters.team_failed, one.worker.state().problem, len(shared.published())) == (0, "", 2)


def test_pauses_grow_while_the_server_is_away_and_nothing_is_asked_meanwhile(
    postgres: Postgres, steps: Callable[..., Steps]
) -> None:
    one = steps(PUBLISHER)
    postgres.stop()
    one.put("a")
    pauses: list[float] = []
    for failures in range(1, 13):
        pause_s = one.worker.step()
        assert pause_s is not None
        pauses.append(pause_s)
        assert one.worker.step() == pause_s
        assert one.counters.team_failed == failures
        one.now += pause_s
    assert pauses[0] <= 1.0
    assert LONGEST_PAUSE_S / 2 <= pauses[-1] <= LONGEST_PAUSE_S
    assert not one.worker.can_answer
    postgres.start()
    one.until_idle()
    assert (one.worker.can_answer, one.worker.state().is_reached, len(one.queue)) == (True, True, 0)


def test_tables_of_an_older_version_are_left_alone(
    shared: TeamDatabase, steps: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VERSIONS", (*tables.VERSIONS, "9999"))
    one = steps(PUBLISHER)
    one.put("a")
    one.worker.step()
    problem = one.worker.state().problem
    assert "older than this pygraphd; its owner runs: pygraphd team init" in problem
    assert (len(one.queue), shared.published()) == (1, [])


def test_a_record_that_the_server_refuses_keeps_no_other_back(
    shared: TeamDatabase, steps: Callable[..., Steps]
) -> None:
    one = steps(PUBLISHER)
    shared.server.psql(
        shared.name,
        f"ALTER TABLE pygraphd.graph ADD CHECK (digest <> '{digest('b')}');",
    )
    one.put("a", "b", "c")
    one.until_idle()
    assert {graph for graph, _ in shared.published()} == {digest("a"), digest("c")}
    assert (len(one.queue), one.worker.state().dropped) == (0, 1)


def test_a_queue_that_cannot_be_shortened_is_not_published_again_and_again(
    shared: TeamDatabase, steps: Callable[..., Steps], tmp_path: Path
) -> None:
    one = steps(PUBLISHER)
    one.put("a")
    with contextlib.closing(sqlite3.connect(tmp_path / "0.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        pause_s = one.worker.step()
        assert pause_s is not None
        assert pause_s > 0
        assert "locked" in one.worker.state().queue_problem
    assert len(one.queue) == 1
    one.now += LONGEST_PAUSE_S
    one.until_idle()
    assert (len(one.queue), one.counters.team_published, len(shared.published())) == (0, 1, 1)
    assert one.worker.state().queue_problem == ""
