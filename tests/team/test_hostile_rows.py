"""A publisher who means harm: rows of any content mislead nobody, hide no row of another's, and replace none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, LiteralString

import psycopg
import pytest
from psycopg import sql

from pygraphd.daemon.team import connecting, fetching
from pygraphd.daemon.team.wanted import Batch
from pygraphd.team_url import TeamUrl
from tests.support.record_requests import ENVIRONMENT, digest
from tests.support.team import OTHER, PUBLISHER, QUICK, READER, Member, TeamDatabase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.support.postgres import Postgres

pytestmark = pytest.mark.team

LONG = 100_000
FLOOD = 500
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
_Change = tuple[LiteralString, str, Any]
"""Table, column, and the value that is put into it."""
INVALID: tuple[_Change, ...] = (
    ("decision", "deployment", "ROCKET"),
    ("decision", "detail", "x" * LONG),
    ("decision", "detail", ESCAPE),
    ("decision", "against_detail", ESCAPE),
    ("decision", "host", ESCAPE),
    ("decision", "version", "x" * LONG),
    ("decision", "policy", -1),
    ("decision", "policy", 2**62),
    ("decision", "calls", -1),
    ("decision", "measured_at", float("nan")),
    ("decision", "measured_at", float("inf")),
    ("decision", "measured_at", None),
    ("measurement", "samples", 0),
    ("measurement", "samples", 2**62),
    ("measurement", "median_us", float("nan")),
    ("measurement", "median_us", float("-inf")),
    ("measurement", "median_us", -1.0),
    ("measurement", "busy", 2.0),
    ("graph", "kind", "sideways"),
    ("graph", "partition", 7),
    ("graph", "operators", -1),
    ("graph", "sizes", "1,two,3"),
    ("graph", "sizes", "1," * LONG),
)
USABLE: tuple[_Change, ...] = (
    ("decision", "reason", "because"),  # a newer version may have such a reason
    ("decision", "reason", "x" * LONG),
    ("decision", "job", ESCAPE),  # which nobody reads
)
NAMES = [str(number) for number in range(len(INVALID) + len(USABLE))]
_COPIED = {"environment": "id", "graph": "digest", "decision": "graph", "measurement": "decision"}


def _copy(connection: psycopg.Connection, graph: str, changed: Mapping[str, Mapping[str, Any]]) -> None:
    """Insert a copy of a graph's published rows as the role that is connected, with some values changed."""
    [(id_, environment)] = connection.execute(
        "SELECT id, environment FROM pygraphd.decision WHERE graph = %s AND publisher = %s",
        (graph, PUBLISHER),
    ).fetchall()
    keys = {"environment": environment, "graph": graph, "decision": graph, "measurement": id_}
    for table, key in _COPIED.items():
        name = sql.Identifier("pygraphd", table)
        found = sql.SQL("SELECT * FROM {} WHERE {} = %s AND publisher = %s").format(name, sql.Identifier(key))
        cursor = connection.execute(found, (keys[table], PUBLISHER))
        assert cursor.description is not None
        columns = [each.name for each in cursor.description]
        for row in cursor.fetchall():
            values = {**dict(zip(columns, row, strict=True)), **changed.get(table, {})}
            insert = sql.SQL("INSERT INTO {} ({}) VALUES ({}) ON CONFLICT DO NOTHING").format(
                name,
                sql.SQL(", ").join(map(sql.Identifier, values)),
                sql.SQL(", ").join(sql.Placeholder() * len(values)),
            )
            connection.execute(insert, list(values.values()))


def _connect(shared: TeamDatabase, role: str) -> psycopg.Connection:
    return psycopg.connect(shared.url(role).replace("+psycopg", ""))


@pytest.fixture(scope="module")
def published_template(
    postgres_server: Postgres, team_template: str, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Return the name of a team's database to which one member has published all names."""
    name = postgres_server.make_database(team_template)
    postgres_server.admit(name, PUBLISHER)
    one = Member(
        tmp_path_factory.mktemp("one"),
        {
            "PYGRAPHD_TEAM_URL": TeamDatabase(postgres_server, name).url(PUBLISHER),
            "PYTHONPATH": str(QUICK),
        },
    )
    one.path.chmod(0o700)
    try:
        one.start()
        one.record(*NAMES)
        one.wait_until_published()
    finally:
        one.close()
    postgres_server.hang_up(name)
    postgres_server.keep_as_template(name)
    return name


@pytest.fixture
def shared(postgres: Postgres, published_template: str) -> TeamDatabase:
    """Return a team's database to which one member has published all names."""
    name = postgres.make_database(published_template)
    postgres.admit(name, READER, PUBLISHER, OTHER)
    return TeamDatabase(postgres, name)


def test_rows_that_are_not_valid_hide_none_that_are(
    shared: TeamDatabase, member: Callable[[str], Member]
) -> None:
    with _connect(shared, OTHER) as hostile:
        for name, (table, column, value) in zip(NAMES, INVALID + USABLE, strict=True):
            _copy(hostile, digest(name), {table: {column: value}})
    assert len(shared.rows("SELECT FROM pygraphd.decision")) == 2 * len(NAMES)

    home = member(shared.url(READER))
    home.start()
    entries = home.find(*NAMES)

    usable = {digest(name) for name in NAMES[len(INVALID) :]}
    assert {entry["graph"] for entry in entries if entry["host"] != f"team:{PUBLISHER}@here"} == usable
    assert home.stats["team_invalid"] == len(INVALID)
    assert (home.stats["team_found"], home.stats["team_failed"]) == (len(NAMES), 0)
    shown = home.said() + home.pygraphd("cache", "inspect").stdout
    assert "\x1b" not in shown
    assert "x" * 1000 not in shown


def test_a_row_that_the_server_cannot_read(shared: TeamDatabase, member: Callable[[str], Member]) -> None:
    """As one on a damaged page: it stops neither the answers for other graphs, nor what is to be published."""
    shared.server.psql(
        shared.name,
        f"ALTER TABLE pygraphd.decision ENABLE ROW LEVEL SECURITY;"
        f"CREATE POLICY broken ON pygraphd.decision USING (1 / (graph <> '{digest(NAMES[3])}')::int = 1);",
    )
    home = member(shared.url(READER))
    home.start()

    assert home.lookup(*NAMES) == []
    home.wait_until(lambda: home.stats["team_asked"] == len(NAMES))
    # Counted before the next lookup, which has the team asked for that row once more.
    assert (home.stats["team_invalid"], home.stats["team_failed"]) == (1, 0)
    assert len(home.lookup(*NAMES)) == len(NAMES) - 1


def test_factors_that_do_not_fit_their_key(shared: TeamDatabase, member: Callable[[str], Member]) -> None:
    """A timing of another GPU's under this GPU's key, by the one who comes first with that key, too."""
    with _connect(shared, OTHER) as hostile:
        _copy(hostile, digest(NAMES[0]), {"environment": {"gpu": "NVIDIA T4"}})

    home = member(shared.url(READER))
    home.start()
    [entry] = home.find(NAMES[0])

    assert entry["host"] == f"team:{PUBLISHER}@here"
    assert home.stats["team_invalid"] == 1
    assert "T4" not in home.pygraphd("cache", "inspect").stdout


def test_nobody_changes_or_signs_what_is_another_s(shared: TeamDatabase) -> None:
    before = shared.rows("SELECT * FROM pygraphd.decision")
    forbidden: tuple[LiteralString, ...] = (
        "UPDATE pygraphd.decision SET deployment = 'GRAPH'",
        "UPDATE pygraphd.environment SET gpu = 'T4'",
        "DELETE FROM pygraphd.measurement",
        "TRUNCATE pygraphd.decision CASCADE",
        "INSERT INTO pygraphd.graph SELECT * FROM pygraphd.graph ON CONFLICT (digest, publisher) DO UPDATE SET kind = 'x'",
        "UPDATE pygraphd.alembic_version SET version_num = '9999'",
        "DROP TABLE pygraphd.measurement",
        "ALTER TABLE pygraphd.decision DISABLE TRIGGER ALL",
        "CREATE TABLE pygraphd.mine (number int)",
        "CREATE OR REPLACE FUNCTION pygraphd.sign() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        "SET session_replication_role = replica",
        "SET ROLE team_publisher",
    )
    with _connect(shared, OTHER) as hostile:
        hostile.autocommit = True
        for statement in forbidden:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                hostile.execute(statement)
        _copy(
            hostile,
            digest(NAMES[0]),
            {"decision": {"publisher": PUBLISHER, "published_at": 1e12, "host": "evil"}},
        )
    assert shared.rows("SELECT * FROM pygraphd.decision WHERE publisher = %s", PUBLISHER) == before
    [(host, at)] = shared.rows("SELECT host, published_at FROM pygraphd.decision WHERE publisher = %s", OTHER)
    assert (host, at < 1e12) == ("evil", True)


def test_a_flood_of_rows_costs_nobody_else(shared: TeamDatabase) -> None:
    """However many rows one publisher adds to one graph, few are read, and another's is found beside them."""
    with _connect(shared, OTHER) as hostile:
        for number in range(FLOOD):
            _copy(
                hostile,
                digest(NAMES[0]),
                {"decision": {"id": str(number), "calls": -1}, "measurement": {"decision": str(number)}},
            )
    shared.rows("ANALYZE")

    with connecting.Database(TeamUrl(shared.url(READER))) as database, database.transaction() as opened:
        found = fetching.fetch(opened, Batch(ENVIRONMENT.digest(), (digest(NAMES[0]),)))
        read: int = opened.exec_driver_sql(
            "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables WHERE relname = 'decision'"
        ).scalar_one()

    assert [entry.origin.host for entry in found.entries] == [f"team:{PUBLISHER}@here"]
    assert found.invalid == fetching.RECORDS_OF_ONE
    assert read <= 2 * fetching.RECORDS_OF_ONE
