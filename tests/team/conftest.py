"""A PostgreSQL server for all tests of the team tier; databases and daemons for each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.team import migrating
from pygraphd.team_url import TeamUrl
from tests.support import postgres as support
from tests.support.postgres import Postgres
from tests.support.repository import load_package
from tests.support.tcp_proxy import TcpProxy
from tests.support.team import OTHER, PUBLISHER, QUICK, READER, STRANGER, Member, TeamDatabase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

load_package("benchmarks")
load_package("tools")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Postgres]:
    """Return a PostgreSQL server that serves all tests of this process."""
    programs = support.installed()
    if programs is None:
        reason = "no PostgreSQL: neither initdb in PATH nor /usr/lib/postgresql/*/bin (Debian: apt-get install postgresql)"
        if os.environ.get(support.REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)
    with Postgres(programs) as server:
        yield server


@pytest.fixture
def postgres(postgres_server: Postgres) -> Iterator[Postgres]:
    """Return the server, running; the databases that a test makes in it are dropped at its end."""
    yield postgres_server
    if not postgres_server.is_running:
        postgres_server.start()
    postgres_server.drop_databases()


@pytest.fixture
def database(postgres: Postgres) -> str:
    """Return the name of an empty database."""
    return postgres.make_database()


@pytest.fixture(scope="session")
def team_template(postgres_server: Postgres) -> str:
    """Return the name of a database with a team's tables, of which others are copied."""
    for role in (READER, PUBLISHER, OTHER, STRANGER):
        postgres_server.make_role(role)
    name = postgres_server.make_database()
    url = TeamUrl(postgres_server.administrators_url(name))
    migrating.initialise(url, readers=[READER], publishers=[PUBLISHER, OTHER])
    postgres_server.keep_as_template(name)
    return name


@pytest.fixture
def shared(postgres: Postgres, team_template: str) -> TeamDatabase:
    """Return a team's database: its tables are empty."""
    name = postgres.make_database(team_template)
    postgres.admit(name, READER, PUBLISHER, OTHER, STRANGER)
    return TeamDatabase(postgres, name)


@pytest.fixture
def proxy(postgres: Postgres) -> Iterator[TcpProxy]:
    """Return a proxy before the server."""
    with TcpProxy(postgres.port) as opened:
        yield opened


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Callable[[str], Member]]:
    """Return a maker of members, each with a home of its own and without a running daemon."""
    made: list[Member] = []

    def make(url: str) -> Member:
        home = Member(tmp_path / f"member{len(made)}", {"PYGRAPHD_TEAM_URL": url, "PYTHONPATH": str(QUICK)})
        home.path.mkdir(mode=0o700)
        made.append(home)
        return home

    yield make
    for home in made:
        home.close()
