"""Rights, versions and tables that are not as they should be: `status` says what is wrong, and all is caught up once that is mended."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, LiteralString

import psycopg
import pytest

from pygraphd.daemon.team.tables import VERSIONS
from tests.support.record_requests import digest
from tests.support.team import PUBLISHER, READER, STRANGER

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.postgres import Postgres
    from tests.support.team import Member, TeamDatabase

pytestmark = pytest.mark.team


@dataclass(frozen=True)
class Fault:
    """What breaks a team's database for its publisher, what mends it, and a part of what `status` says meanwhile."""

    breaking: LiteralString
    mending: LiteralString
    told: str


FAULTS = {
    "may only read": Fault(
        "REVOKE INSERT ON pygraphd.measurement FROM team_publisher",
        "GRANT INSERT ON pygraphd.measurement TO team_publisher",
        "may only read",
    ),
    "may not even read": Fault(
        "REVOKE SELECT ON pygraphd.decision FROM team_publisher",
        "GRANT SELECT ON pygraphd.decision TO team_publisher",
        "permission denied for table decision",
    ),
    "may not enter the schema": Fault(
        "REVOKE USAGE ON SCHEMA pygraphd FROM team_publisher",
        "GRANT USAGE ON SCHEMA pygraphd TO team_publisher",
        "permission denied for schema pygraphd",
    ),
    "is read-only, as a standby is": Fault(
        "ALTER ROLE team_publisher SET default_transaction_read_only = on",
        "ALTER ROLE team_publisher RESET default_transaction_read_only",
        "read-only transaction",
    ),
    "wants another password": Fault(
        "ALTER ROLE team_publisher PASSWORD 'changed'",
        "ALTER ROLE team_publisher PASSWORD 'rehsilbup_maet'",
        "password authentication failed",
    ),
    "takes no more connections": Fault(
        "ALTER ROLE team_publisher CONNECTION LIMIT 0",
        "ALTER ROLE team_publisher CONNECTION LIMIT -1",
        "too many connections",
    ),
    "is of a newer version": Fault(
        "UPDATE pygraphd.alembic_version SET version_num = '9999'",
        "UPDATE pygraphd.alembic_version SET version_num = '0002'",
        "upgrade pygraphd",
    ),
    "has lost a column": Fault(
        "ALTER TABLE pygraphd.decision RENAME COLUMN against TO aginst",
        "ALTER TABLE pygraphd.decision RENAME COLUMN aginst TO against",
        "pygraphd team init",
    ),
    "has another schema": Fault(
        "ALTER SCHEMA pygraphd RENAME TO other",
        "ALTER SCHEMA other RENAME TO pygraphd",
        "pygraphd team init",
    ),
}


def test_each_fault_is_told_and_caught_up_with(
    postgres: Postgres, shared: TeamDatabase, member: Callable[[str], Member]
) -> None:
    home = member(shared.url(PUBLISHER))
    home.start()
    for name, fault in FAULTS.items():
        shared.rows(fault.breaking)
        try:
            postgres.hang_up(shared.name)
            home.record(name)
            home.lookup(f"{name}, missing")
            home.wait_for_problem(fault.told)
            assert home.team["queued"] == 1, name
        finally:
            shared.rows(fault.mending)
        home.wait_until_published()
        home.wait_until(lambda: home.team["wanted"] == 0)
        home.wait_until(lambda: (home.team["problem"], home.team["why_not_published"]) == ("", ""))
        assert home.team["dropped"] == 0, name

    assert shared.published() == [(graph, PUBLISHER) for graph in sorted(map(digest, FAULTS))]
    assert home.stats["team_published"] == len(FAULTS)
    assert PUBLISHER[::-1] not in home.said()


def test_tables_that_are_locked_are_waited_for(shared: TeamDatabase, member: Callable[[str], Member]) -> None:
    """As during a migration: the limit on the server ends the wait there, too, so that no waiting statements pile up."""
    home = member(shared.url(PUBLISHER))
    home.give_up_soon()
    home.start()
    home.wait_until(lambda: home.team["answered_at"] is not None)
    address = shared.server.administrators_url(shared.name).replace("+psycopg", "")
    with contextlib.closing(psycopg.connect(address)) as other:
        other.execute("LOCK TABLE pygraphd.decision IN ACCESS EXCLUSIVE MODE")
        home.record("a")
        home.wait_until(lambda: bool(home.team["problem"]))
        assert home.lookup("missing") == []
    home.wait_until_published()
    assert shared.published() == [(digest("a"), PUBLISHER)]


def test_tables_that_are_missing_or_older_are_left_to_their_owner(
    postgres: Postgres, database: str, member: Callable[[str], Member], shared: TeamDatabase
) -> None:
    """No daemon makes or migrates tables, even where it could: of thousands, all would."""
    postgres.admit(database, PUBLISHER)
    postgres.psql(database, f"GRANT CREATE ON DATABASE {database} TO {PUBLISHER};")
    empty, newer = member(postgres.url(database, PUBLISHER)), member(shared.url(PUBLISHER))
    newer.variables["TEAM_IS_OLDER"] = "1"
    for home in (empty, newer):
        home.start()
        home.record("a")
        home.wait_for_problem("its owner runs: pygraphd team init")
        assert (home.team["queued"], len(home.lookup("a"))) == (1, 1)
    assert "older than this pygraphd" in newer.team["problem"]
    assert postgres.execute(database, "SELECT count(*) FROM pg_namespace WHERE nspname = 'pygraphd'") == [
        (0,)
    ]
    assert shared.rows("SELECT version_num FROM pygraphd.alembic_version") == [(VERSIONS[-1],)]


def test_a_reader_finds_and_a_stranger_goes_without(
    shared: TeamDatabase, member: Callable[[str], Member]
) -> None:
    one, reader, stranger = (member(shared.url(role)) for role in (PUBLISHER, READER, STRANGER))
    one.start()
    one.record("a")
    one.wait_until_published()
    for other in (reader, stranger):
        other.start()
        other.record("own")

    [entry] = reader.find("a")
    assert entry["host"] == f"team:{PUBLISHER}@here"
    assert (reader.team["queued"], reader.team["why_not_published"]) == (1, "the role may only read")
    assert len(stranger.lookup("a", "own")) == 1
    stranger.wait_for_problem("permission denied")
    assert (stranger.team["queued"], stranger.stats["team_hits"]) == (1, 0)
    assert shared.published() == [(digest("a"), PUBLISHER)]
    assert reader.stats["team_hits"] == 1
