"""The server and the network of these tests: killed, cut off, and back with what was committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.support.tcp_proxy import TcpProxy

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
    postgres.make_role("guest")
    postgres.admit(database, "guest")

    def connect(password: str) -> None:
        psycopg.connect(postgres.url(database, "guest", password).replace("+psycopg", "")).close()

    connect("tseug")
    with pytest.raises(psycopg.OperationalError, match="password"):
        connect("wrong")


def test_a_commit_gets_lost_before_the_server_or_after_it(postgres: Postgres, database: str) -> None:
    postgres.make_role("writer")
    postgres.execute("postgres", "ALTER ROLE writer SUPERUSER")
    postgres.execute(database, "CREATE TABLE kept (number int)")

    with TcpProxy(postgres.port) as proxy:
        url = postgres.url(database, "writer", port=proxy.port).replace("+psycopg", "")

        def insert(number: int) -> None:
            with psycopg.connect(url) as connection:
                connection.execute("INSERT INTO kept VALUES (%s)", (number,))

        for number, cut in enumerate((proxy.cut_before, proxy.cut_after)):
            done = cut(b"COMMIT")
            with pytest.raises(psycopg.OperationalError):
                insert(number)
            assert done.wait(300)
        insert(2)

    assert postgres.execute(database, "SELECT number FROM kept ORDER BY number") == [(1,), (2,)]
