"""The server of these tests: it can be killed at any moment and comes back with what was committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

if TYPE_CHECKING:
    from tests.support.postgres import Postgres

pytestmark = pytest.mark.team


def test_a_killed_server_comes_back(postgres: Postgres, database: str) -> None:
    postgres.execute(database, "CREATE TABLE kept (number int)")
    postgres.execute(database, "INSERT INTO kept VALUES (1)")
    postgres.execute("postgres", "CHECKPOINT")

    postgres.kill()
    with pytest.raises(psycopg.OperationalError):
        postgres.execute(database, "SELECT 1")
    postgres.start()

    assert postgres.execute(database, "SELECT number FROM kept") == [(1,)]


def test_a_role_needs_its_password(postgres: Postgres, database: str) -> None:
    postgres.execute(database, "CREATE ROLE guest LOGIN PASSWORD 'right'")
    postgres.psql(database, f"GRANT CONNECT ON DATABASE {database} TO guest")

    def connect(password: str) -> None:
        psycopg.connect(postgres.url(database, "guest", password).replace("+psycopg", "")).close()

    connect("right")
    with pytest.raises(psycopg.OperationalError, match="password"):
        connect("wrong")
