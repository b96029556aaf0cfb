"""A PostgreSQL server for all tests of the team tier, and an empty database for each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support import postgres as support
from tests.support.postgres import Postgres

if TYPE_CHECKING:
    from collections.abc import Iterator


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
