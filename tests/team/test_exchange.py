"""Two users' daemons on one PostgreSQL database: what one measures, the other finds."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from typing import TYPE_CHECKING

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from pygraphd.daemon.team import connecting, migrating, tables
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import (
    LEASE_PATH,
    LOOKUP_PATH,
    RECORD_PATH,
    SIZES_PATH,
    Decision,
    Deployment,
    Graph,
    Kind,
    LookupRequest,
    Measurement,
    Origin,
    Record,
    RecordRequest,
    encode,
)
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.reasons import Reason, ReasonCode
from pygraphd.team_url import TeamUrl
from tests.support.daemon_home import HANGS_S, Home
from tests.support.sized_records import asked, sized_request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from tests.support.postgres import Postgres

pytestmark = pytest.mark.team

OWNER, PUBLISHER, READER = "exchange_owner", "exchange_publisher", "exchange_reader"


@pytest.fixture(scope="session")  # with `--dist worksteal` a worker may leave a module and come back
def roles(postgres_server: Postgres) -> None:
    """Make the roles of these tests."""
    for role in (OWNER, PUBLISHER, READER):
        postgres_server.make_role(role)


@pytest.fixture
def team(postgres: Postgres, database: str, roles: None) -> str:
    """Return the name of a database with tables, and with a role each to read and to publish."""
    postgres.admit(database, OWNER, PUBLISHER, READER)
    postgres.psql("postgres", f"GRANT CREATE ON DATABASE {database} TO {OWNER};")
    migrating.initialise(TeamUrl(postgres.url(database, OWNER)), [READER], [PUBLISHER])
    return database


def record(name: str) -> Record:
    graph = Graph(hashlib.sha256(name.encode()).hexdigest(), Kind.FORWARD, 0, 1, 5)
    measured = tuple(
        Measurement(deployment, 12, cost_us, 1.0, cost_us - 10.0, 80.0, 0.5, 0.5, 0.25)
        for deployment, cost_us in ((Deployment.KERNELS, 100.0), (Deployment.GRAPH, 60.0))
    )
    reason, against = Reason(ReasonCode.SAVES_HOST_TIME), Reason(ReasonCode.TAKES_MORE_HOST_TIME)
    return Record(graph, Decision(Deployment.GRAPH, reason, POLICY_VERSION, against=against), measured)


def make_request(*names: str) -> RecordRequest:
    """Return a request that records one graph for each name."""
    environment = Environment(
        "NVIDIA H200", "9.0", 132, 143771, "", "2.13.0", "3.5", "13.0", "580.1", "91400"
    )
    return RecordRequest(environment, Origin("here", "0.1.0", "job-7"), tuple(map(record, names)))


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[Callable[[str, str], Home]]:
    """Return a maker of homes, each with a running daemon that has a team."""
    made = []

    def make(name: str, team_url: str) -> Home:
        home = Home(tmp_path / name, {"PYGRAPHD_TEAM_URL": team_url})
        home.path.mkdir(mode=0o700)
        made.append(home)
        home.start()
        return home

    yield make
    for home in made:
        home.close()


def entries(home: Home, request: RecordRequest) -> list[dict[str, Any]]:
    graphs = tuple(record.graph.digest for record in request.records)
    status, answer = home.ask(
        "POST", LOOKUP_PATH, encode(LookupRequest(request.environment.digest(), graphs))
    )
    assert status == 200
    found = answer["entries"]
    assert isinstance(found, list)
    return found


def told(home: Home) -> dict[str, Any]:
    """Return what the daemon says of its team."""
    state = home.ask("GET", "/v1/stats")[1]["team"]
    assert isinstance(state, dict)
    return state


def published(postgres: Postgres, database: str) -> int:
    [(count,)] = postgres.execute(database, "SELECT count(*) FROM pygraphd.decision")
    assert isinstance(count, int)
    return count


def test_migrations_and_tables_agree(postgres: Postgres, team: str) -> None:
    with (
        connecting.Database(TeamUrl(postgres.url(team, OWNER))) as database,
        database.transaction() as opened,
    ):
        context = MigrationContext.configure(
            opened,
            opts={
                "include_schemas": True,
                "include_name": lambda name, kind, parents: kind != "schema" or name == tables.SCHEMA,
                "version_table_schema": tables.SCHEMA,
            },
        )
        assert compare_metadata(context, tables.metadata) == []
        assert migrating.stored_version(opened) == tables.VERSIONS[-1]


def test_the_sizes_of_the_team_are_found_by_their_graph(
    postgres: Postgres, team: str, homes: Callable[[str, str], Home]
) -> None:
    one, request = homes("one", postgres.url(team, PUBLISHER)), sized_request(8, 16)
    assert one.ask("POST", RECORD_PATH, encode(request))[0] == 200
    one.wait_until(lambda: published(postgres, team) == 2)

    other = homes("other", postgres.url(team, READER))
    other.wait_until(lambda: len(entries(other, request)) == 2)

    _, answer = other.ask("POST", SIZES_PATH, encode(asked()))
    assert sorted(each["sizes"] for each in answer["entries"]) == [[8], [16]]


def test_what_one_daemon_measures_another_finds(
    postgres: Postgres,
    team: str,
    homes: Callable[[str, str], Home],
) -> None:
    one = homes("one", postgres.url(team, PUBLISHER))
    request = make_request("a", "b")
    assert one.ask("POST", RECORD_PATH, encode(request))[0] == 200
    one.wait_until(lambda: published(postgres, team) == 2)

    other = homes("other", postgres.url(team, READER))
    assert entries(other, request) == []
    other.wait_until(lambda: len(entries(other, request)) == 2)

    assert {entry["host"] for entry in entries(other, request)} == {f"team:{PUBLISHER}@here"}
    rows = postgres.execute(team, "SELECT DISTINCT publisher, host, uid, job, version FROM pygraphd.decision")
    assert rows == [(PUBLISHER, "here", rows[0][2], "job-7", "0.1.0")]
    assert postgres.execute(team, "SELECT DISTINCT samples, mad_us FROM pygraphd.measurement") == [(12, 1.0)]
    other.wait_until(lambda: other.ask("GET", "/v1/stats")[1]["team_found"] > 0)  # counted after it is stored
    stats = other.ask("GET", "/v1/stats")[1]
    assert (stats["team_found"], stats["team_invalid"], stats["team_failed"]) == (2, 0, 0)
    one.wait_until(lambda: told(one)["queued"] == 0)
    assert "queued" in other.pygraphd("status").stdout


def test_a_record_is_published_once(
    postgres: Postgres,
    team: str,
    homes: Callable[[str, str], Home],
) -> None:
    home = homes("one", postgres.url(team, PUBLISHER))
    for _ in range(3):
        home.ask("POST", RECORD_PATH, encode(make_request("a")))
    home.ask("POST", RECORD_PATH, encode(make_request("b")))
    home.wait_until(lambda: published(postgres, team) == 2 and told(home)["queued"] == 0)
    assert postgres.execute(team, "SELECT count(*) FROM pygraphd.measurement") == [(4,)]
    assert home.ask("GET", "/v1/stats")[1]["team_published"] == 2


def test_a_reader_publishes_nothing_until_it_may(
    postgres: Postgres,
    team: str,
    homes: Callable[[str, str], Home],
) -> None:
    home = homes("one", postgres.url(team, READER))
    home.ask("POST", RECORD_PATH, encode(make_request("a")))
    home.wait_until(lambda: told(home)["why_not_published"] != "")
    assert told(home)["queued"] == 1
    assert "nothing is published: the role may only read; 1 record queued" in home.pygraphd("status").stdout
    migrating.initialise(TeamUrl(postgres.url(team, OWNER)), publishers=[READER])
    home.wait_until(lambda: published(postgres, team) == 1)


def test_what_is_recorded_while_the_server_is_down_is_published_later_even_by_another_daemon(
    postgres: Postgres,
    team: str,
    homes: Callable[[str, str], Home],
) -> None:
    home = homes("one", postgres.url(team, PUBLISHER))
    postgres.kill()
    home.ask("POST", RECORD_PATH, encode(make_request("a")))
    assert len(entries(home, make_request("a"))) == 1
    home.wait_until(lambda: told(home)["problem"] != "")
    said = home.pygraphd("status").stdout
    assert "not usable for" in said
    assert "1 record queued" in said
    assert home.pygraphd("restart").returncode == 0
    assert told(home)["queued"] == 1
    postgres.start()
    home.wait_until(lambda: published(postgres, team) == 1)


def test_the_password_is_shown_nowhere(
    postgres: Postgres, team: str, homes: Callable[[str, str], Home]
) -> None:
    home = homes("one", postgres.url(team, PUBLISHER).replace(PUBLISHER[::-1], "wr0ng%20word"))
    home.wait_until(lambda: told(home)["problem"] != "")
    said = [home.pygraphd("status"), home.pygraphd("status", "--json"), home.pygraphd("config", "show")]
    shown = "".join(each.stdout + each.stderr for each in said) + home.locations.log.read_text()
    shown += json.dumps(home.ask("GET", "/v1/stats")[1])
    assert "password authentication failed" in shown
    assert f"{PUBLISHER}:***@" in shown
    assert "wr0ng" not in shown


def test_a_lease_is_withheld_while_the_team_is_asked(
    postgres: Postgres,
    team: str,
    homes: Callable[[str, str], Home],
) -> None:
    home = homes("one", postgres.url(team, READER))
    home.wait_until(lambda: told(home)["answered_at"] is not None)
    request = make_request("a")
    environment, graph = request.environment.digest(), request.records[0].graph.digest
    lease = json.dumps({"environment": environment, "holder": "me", "graphs": [graph]}).encode()
    with postgres.paused():
        entries(home, request)
        assert home.ask("POST", LEASE_PATH, lease)[1]["granted"] == []
        home.wait_until(lambda: home.ask("POST", LEASE_PATH, lease)[1]["granted"] == [graph])


def test_an_unknown_version_of_the_tables_is_left_alone(
    postgres: Postgres,
    team: str,
    homes: Callable[[str, str], Home],
) -> None:
    postgres.psql(team, "UPDATE pygraphd.alembic_version SET version_num = '9999';")
    home = homes("one", postgres.url(team, PUBLISHER))
    home.ask("POST", RECORD_PATH, encode(make_request("a")))
    home.wait_until(lambda: "upgrade pygraphd" in told(home)["problem"])
    assert published(postgres, team) == 0
    assert told(home)["queued"] == 1


def test_nobody_publishes_as_another(postgres: Postgres, team: str) -> None:
    with connecting.Database(TeamUrl(postgres.url(team, PUBLISHER))) as database:
        with database.transaction() as opened:
            row = {"digest": "0", "kind": "x", "partition": 0, "partitions": 1, "operators": 1, "sizes": ""}
            opened.execute(sa.insert(tables.graph), {**row, "publisher": OWNER})
        for statement in (sa.update(tables.graph).values(kind="y"), sa.delete(tables.graph)):
            with (
                pytest.raises(connecting.TeamError, match="permission denied"),
                database.transaction() as opened,
            ):
                opened.execute(statement)
    assert postgres.execute(team, "SELECT publisher, kind FROM pygraphd.graph") == [(PUBLISHER, "x")]


def test_a_call_that_gets_no_answer_ends(postgres: Postgres, team: str) -> None:
    with connecting.Database(TeamUrl(postgres.url(team, READER)), limit_s=2.0) as database:
        with database.transaction() as opened:
            assert opened.exec_driver_sql("SELECT 1").scalar() == 1
        for _ in range(2):  # over the connection that there is, then over a new one
            with (
                postgres.paused(),
                pytest.raises(connecting.TeamError, match=r"no answer within 2 s|timeout"),
                database.transaction() as opened,
            ):
                opened.exec_driver_sql("SELECT 1")
            assert not database.is_open
        with database.transaction() as opened:
            assert opened.exec_driver_sql("SELECT 2").scalar() == 2


def test_a_daemon_that_ends_publishes_what_it_has_just_stored(
    postgres: Postgres, team: str, homes: Callable[[str, str], Home]
) -> None:
    home = homes("one", postgres.url(team, PUBLISHER))
    pid = home.processes[0].pid
    for number in range(5):
        home.ask("POST", RECORD_PATH, encode(make_request(str(number))))
    os.kill(pid, signal.SIGTERM)
    home.processes[0].wait(HANGS_S)
    assert published(postgres, team) == 5
