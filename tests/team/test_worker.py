"""The worker's steps one by one, on a clock that stands still, with a real server."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.statistics import Counters
from pygraphd.daemon.team import tables
from pygraphd.daemon.team import worker as module
from pygraphd.daemon.team.queue import Queue, publications
from pygraphd.daemon.team.wanted import Wanted
from pygraphd.daemon.team.worker import LINGER_S, LONGEST_PAUSE_S, Worker
from pygraphd.team_url import TeamUrl
from tests.support.record_requests import ENVIRONMENT, digest, record_request
from tests.support.team import PUBLISHER, READER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pygraphd.daemon.team.queue import Publication
    from pygraphd.schema.portable import Portable
    from tests.support.postgres import Postgres
    from tests.support.team import TeamDatabase

pytestmark = pytest.mark.team


class Steps:
    """A worker that is not started, and what it is made of."""

    def __init__(self, url: str, queue_file: Path) -> None:
        self.now = 1000.0
        self.queue, self.wanted = Queue(queue_file), Wanted(self._clock)
        self.counters = Counters()
        self.delivered: list[Portable] = []
        self.older: list[list[Publication]] = []
        self.asked_for_older: list[int] = []
        """The length of the queue whenever it was asked for some of these."""
        self.worker = Worker(
            TeamUrl(url),
            self.queue,
            self.wanted,
            self.delivered.extend,
            self._count,
            self._older,
            self._clock,
        )

    def _clock(self) -> float:
        return self.now

    def _count(self, counted: Counters) -> None:
        self.counters += counted

    def _older(self, _until: float) -> Iterator[list[Publication]]:
        for some in self.older:
            self.asked_for_older.append(len(self.queue))
            yield some

    def put(self, *names: str) -> None:
        self.queue.put(publications(record_request(names), 7, 1.0))

    def until_idle(self) -> float | None:
        """Take steps until nothing is due at once; return the pause that the worker asks for."""
        for _ in range(20):
            if (pause_s := self.worker.step()) != 0.0:
                return pause_s
        raise AssertionError("there is always more to do")


@pytest.fixture
def steps(shared: TeamDatabase, tmp_path: Path) -> Iterator[Callable[[str], Steps]]:
    """Return a maker of workers that exchange as a role."""
    made: list[Steps] = []

    def make(role: str) -> Steps:
        made.append(Steps(shared.url(role), tmp_path / f"{len(made)}.db"))
        return made[-1]

    yield make
    for each in made:
        each.worker.close()
        each.queue.close()


def test_all_is_published_and_the_connection_closed_after_a_while(
    postgres: Postgres, shared: TeamDatabase, steps: Callable[[str], Steps]
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
    shared: TeamDatabase, steps: Callable[[str], Steps]
) -> None:
    one = steps(PUBLISHER)
    one.older = [publications(record_request([f"{n}"]), 7, 1.0) for n in range(150)]
    one.put(*(f"new {n}" for n in range(100)))
    while one.worker.step() == 0.0:
        pass
    assert (len(one.queue), one.queue.dropped, len(shared.published())) == (0, 0, 250)
    assert max(one.asked_for_older) < 64

    one.asked_for_older.clear()
    again = Worker(one.worker.url, one.queue, one.wanted, one.delivered.extend, one._count, one._older)
    while again.step() == 0.0:
        pass
    again.close()
    assert one.asked_for_older == []


def test_a_reader_does_not_fill_its_queue_with_what_was_there_before(steps: Callable[[str], Steps]) -> None:
    one = steps(READER)
    one.older = [publications(record_request(["a"]), 7, 1.0)]
    one.until_idle()
    assert (len(one.queue), one.asked_for_older) == (0, [])
    assert one.queue.older_until(5.0) not in (None, 5.0)


def test_only_what_the_team_knows_is_delivered(steps: Callable[[str], Steps]) -> None:
    one, other = steps(PUBLISHER), steps(READER)
    one.put("a")
    one.until_idle()
    other.wanted.add(ENVIRONMENT.digest(), [digest("a"), digest("b")])
    other.until_idle()
    [entry] = other.delivered
    assert (entry.record, entry.environment) == (record_request(["a"]).records[0], ENVIRONMENT)
    assert (other.counters.team_asked, other.counters.team_found, len(other.wanted)) == (2, 1, 0)


def test_a_connection_that_went_away_unused_is_no_failure(
    postgres: Postgres, shared: TeamDatabase, steps: Callable[[str], Steps]
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
    postgres: Postgres, steps: Callable[[str], Steps]
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
    shared: TeamDatabase, steps: Callable[[str], Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "VERSIONS", (*tables.VERSIONS, "9999"))
    one = steps(PUBLISHER)
    one.put("a")
    one.worker.step()
    problem = one.worker.state().problem
    assert "older than this pygraphd; its owner runs: pygraphd team init" in problem
    assert (len(one.queue), shared.published()) == (1, [])


def test_a_record_that_the_server_refuses_keeps_no_other_back(
    shared: TeamDatabase, steps: Callable[[str], Steps]
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
    shared: TeamDatabase, steps: Callable[[str], Steps], tmp_path: Path
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
