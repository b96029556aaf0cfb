"""A server that is absent, slow, silent or killed: programs do not notice, and every record arrives once."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from tests.support.daemon_home import HANGS_S
from tests.support.record_requests import digest
from tests.support.team import PUBLISHER, READER

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.postgres import Postgres
    from tests.support.tcp_proxy import TcpProxy
    from tests.support.team import Member, TeamDatabase

pytestmark = pytest.mark.team

LIMIT_S, LATE_S = 5, 15.0
"""The limit of an exchange, and the time by which a proxy answers late."""
_INSERT = b"INTO pygraphd.measurement"


def _expect_published_once(shared: TeamDatabase, *names: str) -> None:
    assert shared.published() == [(graph, PUBLISHER) for graph in sorted(map(digest, names))]


def test_a_server_that_comes_later(
    postgres: Postgres, shared: TeamDatabase, member: Callable[[str], Member]
) -> None:
    postgres.stop()
    home = member(shared.url(PUBLISHER))
    home.start()
    home.record("a", "b")
    assert len(home.lookup("a", "b", "c")) == 2
    home.wait_for_problem("onnection")
    assert "records queued" in home.pygraphd("status").stdout
    assert (home.team["queued"], home.stats["team_published"]) == (2, 0)

    postgres.start()
    home.wait_until_published()

    _expect_published_once(shared, "a", "b")
    assert home.stats["team_published"] == 2
    assert home.team["problem"] == ""


def test_a_silent_server_holds_up_nobody(
    shared: TeamDatabase, proxy: TcpProxy, member: Callable[[str], Member]
) -> None:
    """Nothing answers, so whatever waited for the server would wait until its limit, and each lookup would add a wait of its own."""
    proxy.be_silent()
    home = member(shared.url(PUBLISHER, proxy.port))
    home.give_up_soon()
    home.start()
    home.wait_until(lambda: proxy.accepted > 0)
    failed = home.stats["team_failed"]
    for number in range(30):
        assert home.lookup(f"missing{number}") == []
        home.record(f"found{number}")
    # Many lookups went by within one attempt to connect.
    assert home.stats["team_failed"] < failed + 10
    assert home.team["queued"] == 30
    home.wait_for_problem("timeout")

    assert home.pygraphd("stop").returncode == 0
    assert home.processes[0].wait(HANGS_S) == 0, "killed by its own alarm"

    proxy.be_well()
    home.start()
    home.wait_until_published()
    _expect_published_once(shared, *home.names)


def test_a_server_that_falls_silent_in_the_middle(
    shared: TeamDatabase, proxy: TcpProxy, member: Callable[[str], Member]
) -> None:
    home = member(shared.url(PUBLISHER, proxy.port))
    home.give_up_soon()
    home.start()
    home.record("a")
    home.wait_until_published()

    proxy.be_silent()
    home.record("b")
    home.wait_for_problem("no answer within")
    assert home.lookup("missing") == []
    assert home.team["queued"] == 1

    proxy.be_well()
    home.wait_until_published()
    _expect_published_once(shared, "a", "b")


def test_answers_that_come_after_the_limit_are_no_answers(
    shared: TeamDatabase, proxy: TcpProxy, member: Callable[[str], Member]
) -> None:
    """What was written is done, though nobody has heard of it in time. Lookups and records do not wait for the server."""
    home = member(shared.url(PUBLISHER, proxy.port))
    home.variables["TEAM_LIMIT_S"] = str(LIMIT_S)
    home.start()
    home.record("a")
    home.wait_until_published()

    proxy.delay_s = LATE_S
    home.record("b")
    home.wait_for_problem("no answer within")
    failed = home.stats["team_failed"]
    for number in range(10):
        assert home.lookup(f"missing{number}") == []
        home.record(f"found{number}")
    assert home.team["queued"] == 11
    # Each takes the limit, so few fit into 20 requests that do not wait.
    assert home.stats["team_failed"] <= failed + 3

    proxy.be_well()
    home.wait_until_published()
    _expect_published_once(shared, "a", "b", *(f"found{number}" for number in range(10)))
    assert home.team["problem"] == ""


def test_a_slow_server_is_waited_for(
    shared: TeamDatabase, proxy: TcpProxy, member: Callable[[str], Member]
) -> None:
    one = member(shared.url(PUBLISHER))
    one.start()
    one.record("a")
    one.wait_until_published()

    proxy.delay_s = 0.05
    other = member(shared.url(READER, proxy.port))
    other.start()
    assert len(other.find("a")) == 1

    assert other.stats["team_failed"] == 0


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_write_that_is_cut_off(
    shared: TeamDatabase, proxy: TcpProxy, member: Callable[[str], Member], where: str
) -> None:
    """In its middle, where all of it is undone, and at its end, where it may be done although nobody has heard of it."""
    cut = proxy.cut_before if where == "before" else proxy.cut_after
    home = member(shared.url(PUBLISHER, proxy.port))
    home.variables["TEAM_LINGER_S"] = "600"  # connections are counted: none is closed because nobody needs it
    home.start()
    for number, patterns in enumerate(([_INSERT], [_INSERT, b"COMMIT"])):
        done = cut(*patterns)
        home.record(f"{number}a", f"{number}b")
        assert done.wait(HANGS_S)
        home.wait_until_published()

    _expect_published_once(shared, *home.names)
    assert proxy.accepted == 3
    # What was there already was not counted once more.
    assert home.stats["team_published"] == (4 if where == "before" else 2)


def test_everything_is_killed_in_turn(
    postgres: Postgres, shared: TeamDatabase, member: Callable[[str], Member]
) -> None:
    home = member(shared.url(PUBLISHER))
    pid = home.start()
    for number in range(6):
        home.record(*(f"{number}.{each}" for each in range(40)))
        if number % 3 == 0:
            postgres.kill_backends(shared.name)
        elif number % 3 == 1:
            postgres.kill()
            postgres.start()
        else:
            os.kill(pid, signal.SIGKILL)
            home.processes[-1].wait()
            pid = home.start()
    home.wait_until_published()

    _expect_published_once(shared, *home.names)
    assert len(home.lookup(*home.names)) == 240


@pytest.mark.parametrize("is_team_known", [True, False])
def test_more_than_the_queue_holds_is_published_by_daemons_that_are_killed(
    postgres: Postgres, shared: TeamDatabase, member: Callable[[str], Member], is_team_known: bool
) -> None:
    """Whether there was no room in the queue, or no team."""

    def wait_for_published(least: int) -> None:
        home.wait_until(lambda: len(shared.published()) >= least)

    home = member(shared.url(PUBLISHER) if is_team_known else "")
    home.variables |= {"TEAM_MOST": "130"}
    pid = home.start()
    if is_team_known:
        home.wait_until(lambda: home.team["answered_at"] is not None)
        postgres.stop()
    for number in range(6):
        home.record(*(f"{number}.{each}" for each in range(100)))
    if is_team_known:
        home.wait_until(lambda: home.team["unpublished"] > 0)
        assert "of the cache to be published after" in home.pygraphd("status").stdout
        assert (home.team["queued"], home.team["dropped"]) == (130, 0)
        postgres.start()
    home.variables |= {"PYGRAPHD_TEAM_URL": shared.url(PUBLISHER)}
    for number in range(1, 4):
        os.kill(pid, signal.SIGKILL)
        home.processes[-1].wait()
        pid = home.start()
        wait_for_published(100 * number)
        assert home.lookup(f"{number}.0")
    home.wait_until_published()

    _expect_published_once(shared, *home.names)


def test_what_waited_in_the_spool_is_published(shared: TeamDatabase, member: Callable[[str], Member]) -> None:
    home = member(shared.url(PUBLISHER))
    home.variables["PYGRAPHD_HOUSEKEEPING"] = "0.2"
    body = home.body("a")
    home.put_in_spool("one.json", body)
    home.start()
    home.wait_until(lambda: len(home.lookup("a")) == 1)
    home.wait_until_published()
    # A program that has waited too long for an answer leaves what was stored in the spool, too.
    home.put_in_spool("two.json", body)
    home.record("b")
    home.wait_until(lambda: not any(home.locations.spool.iterdir()))
    home.wait_until_published()

    _expect_published_once(shared, "a", "b")


def test_two_daemons_publish_one_measurement_at_once(
    postgres: Postgres, shared: TeamDatabase, member: Callable[[str], Member]
) -> None:
    names = [str(number) for number in range(60)]
    homes = [member(shared.url(PUBLISHER)) for _ in range(2)]
    postgres.stop()
    for home, order in zip(homes, (names, names[::-1]), strict=True):
        home.start()
        home.record(*order)
    postgres.start()
    for home in homes:
        home.wait_until_published()

    _expect_published_once(shared, *names)
    assert sum(home.stats["team_published"] for home in homes) == len(names)


def test_another_server_is_named_while_one_is_silent(
    shared: TeamDatabase, proxy: TcpProxy, member: Callable[[str], Member]
) -> None:
    """SIGHUP ends the wait for the old one, and what waited for it goes to the new one; without one it stays."""
    proxy.be_silent()
    home = member("")
    home.give_up_soon()
    settings = home.path / "config.toml"
    settings.write_text(f'team_url = "{shared.url(PUBLISHER, proxy.port)}"')
    pid = home.start()
    home.wait_until(lambda: proxy.accepted > 0)
    home.record("a")

    settings.write_text("")
    os.kill(pid, signal.SIGHUP)
    home.wait_until(lambda: home.stats["team"] is None)
    home.record("b")
    assert home.lookup("missing") == []
    settings.write_text(f'team_url = "{shared.url(PUBLISHER)}"')
    os.kill(pid, signal.SIGHUP)
    home.wait_until(lambda: home.stats["team"] is not None)
    home.record("c")
    home.wait_until_published()

    _expect_published_once(shared, "a", "c")
