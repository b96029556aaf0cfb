"""The five commands of docs/team.md, as an administrator types them, and the load on a database made by them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, LiteralString, cast

import psycopg
import pytest

from pygraphd.daemon.team import migrating
from pygraphd.errors import CommandError
from pygraphd.team_url import TeamUrl
from tools.load.cli import main

if TYPE_CHECKING:
    from tests.support.postgres import Postgres

pytestmark = pytest.mark.team

PAGE = (Path(__file__).parents[2] / "docs/team.md").read_text()
PASSWORD = "correct horse"


def _run(postgres: Postgres, home: Path, line: str) -> None:
    words = shlex.split(line.replace("HOST", f"127.0.0.1:{postgres.port}"))
    program = [sys.executable, "-m", "pygraphd"] if words[0] == "pygraphd" else [postgres.program(words[0])]
    environ = {**os.environ, **postgres.administrator, "PYGRAPHD_HOME": str(home)}
    if words[0] == "pygraphd":
        environ["PGPASSWORD"] = PASSWORD
    # Without a terminal, passwords are asked for on standard input.
    subprocess.run(
        [*program, *words[1:]],
        env=environ,
        input=f"{PASSWORD}\n" * 2,
        text=True,
        check=True,
        start_new_session=True,
        cwd="/",
        timeout=300,
    )


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (">/dev/full", 1, "pygraphd: standard output: cannot be written: No space left on device\n"),
        ("| :", 1, ""),
        (">&-", 0, ""),
    ],
)
def test_the_tables_are_made_whatever_becomes_of_the_output(
    postgres: Postgres, database: str, tmp_path: Path, end: str, code: int, said: str
) -> None:
    command = f'"$@" {end}; exit ${{PIPESTATUS[0]}}'
    url = postgres.administrators_url(database)
    done = subprocess.run(
        [
            "/bin/bash",
            "-c",
            command,
            "bash",
            sys.executable,
            "-m",
            "pygraphd",
            "team",
            "init",
            "--team-url",
            url,
        ],
        env={**os.environ, "PYGRAPHD_HOME": str(tmp_path), "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        timeout=300,
    )

    assert (done.returncode, done.stderr) == (code, said)
    assert postgres.execute(database, "SELECT count(*) FROM pygraphd.decision") == [(0,)]


def test_five_commands_and_the_benchmark(postgres: Postgres, tmp_path: Path) -> None:
    [block] = re.findall(r"```\n(createuser.*?)```", PAGE, re.DOTALL)
    commands = block.splitlines()
    assert len(commands) == 5
    try:
        for line in commands:
            _run(postgres, tmp_path, line)
        rights = {
            role: [
                kind
                for kind in ("SELECT", "INSERT", "UPDATE", "DELETE")
                for [is_granted] in postgres.execute(
                    "pygraph", "SELECT has_table_privilege(%s, 'pygraphd.decision', %s)", role, kind
                )
                if is_granted
            ]
            for role in ("pygraph_owner", "pygraph_publisher", "pygraph_reader")
        }
        assert rights == {
            "pygraph_owner": ["SELECT", "INSERT", "UPDATE", "DELETE"],
            "pygraph_publisher": ["SELECT", "INSERT"],
            "pygraph_reader": ["SELECT"],
        }

        url = postgres.url("pygraph", "pygraph_publisher", "correct%20horse")
        out = tmp_path / "team.json"
        owners = url.replace("pygraph_publisher", "pygraph_owner")
        assert main(["team", "--url", owners, "--daemons", "2", "--graphs", "30", "--out", str(out)]) == 0
        [record] = json.loads(out.read_text())["records"]
        rows = {name: each["rows"] for name, each in record["tables"].items()}
        assert rows == {"environment": 1, "graph": 60, "decision": 60, "measurement": 120}
        assert record["failed"] == 0
        assert main(["team", "--url", owners, "--out", str(out)]) == 2, "records are there already"

        with psycopg.connect(url.replace("+psycopg", "")) as publisher:
            [deleting] = re.findall(r"`(DELETE FROM pygraphd[^`]*)`", PAGE)
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                publisher.execute(cast("LiteralString", deleting))
        postgres.psql("pygraph", f"SET ROLE pygraph_owner; {deleting};")
    finally:
        postgres.psql("postgres", "DROP DATABASE IF EXISTS pygraph WITH (FORCE);")


def test_an_encoding_that_is_not_checked_is_refused(postgres: Postgres) -> None:
    postgres.psql(
        "postgres", "CREATE DATABASE test_bytes TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C';"
    )
    with pytest.raises(CommandError, match="SQL_ASCII: make one with createdb --encoding=UTF8"):
        migrating.initialise(TeamUrl(postgres.administrators_url("test_bytes")))
