"""A team's database with roles, and the daemons of its members, which give up and try again soon."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, LiteralString

from pygraphd.schema.messages import LOOKUP_PATH, RECORD_PATH, encode
from pygraphd.schema.policy import POLICY_VERSION
from tests.support.daemon_home import Home
from tests.support.postgres import Postgres
from tests.support.record_requests import lookup_body, record_request

QUICK = Path(__file__).with_name("quick_team")
READER, PUBLISHER, OTHER, STRANGER = "team_reader", "team_publisher", "team_other", "team_stranger"
"""Roles: may read, may publish, may publish too, may connect only. The password of each is its name reversed."""


@dataclass(frozen=True)
class TeamDatabase:
    """A database with a team's tables in it."""

    server: Postgres
    name: str

    def url(self, role: str, port: int | None = None) -> str:
        """Return the URL of a role, through a proxy if a port is given."""
        return self.server.url(self.name, role, port=port)

    def rows(self, statement: LiteralString, *values: object) -> list[tuple[Any, ...]]:
        """Execute a statement as the administrator; return its rows."""
        return self.server.execute(self.name, statement, *values)

    def published(self) -> list[tuple[str, str]]:
        """Return the graph and the publisher of each decision, and assert that each has its measurement."""
        rows = self.rows(
            "SELECT graph, publisher, (SELECT count(*) FROM pygraphd.measurement m"
            " WHERE m.decision = d.id AND m.publisher = d.publisher) FROM pygraphd.decision d ORDER BY graph"
        )
        assert [count for _, _, count in rows] == [1] * len(rows)
        return [(graph, publisher) for graph, publisher, _ in rows]


@dataclass
class Member(Home):
    """One member's home. Its daemon is started by `start`."""

    FOR_DAEMONS: ClassVar[frozenset[str]] = frozenset({"PYTHONPATH"})

    names: list[str] = field(default_factory=list)
    """The graphs that were recorded here, as tests name them."""

    def give_up_soon(self) -> None:
        """Have the daemon that is started next wait for its team's server for two seconds only."""
        self.variables["TEAM_LIMIT_S"] = "2"

    def record(self, *names: str) -> None:
        """Record graphs; the daemon must store them, whatever its team is like."""
        assert self.ask("POST", RECORD_PATH, self.body(*names))[0] == 200
        self.names += names

    def body(self, *names: str) -> bytes:
        """Return the body that records graphs."""
        return encode(record_request(names, policy=POLICY_VERSION))

    def lookup(self, *names: str) -> list[dict[str, Any]]:
        """Look graphs up; return the entries that are known."""
        status, answer = self.ask("POST", LOOKUP_PATH, lookup_body(*names))
        assert status == 200
        entries = answer["entries"]
        assert isinstance(entries, list)
        return entries

    def find(self, *names: str) -> list[dict[str, Any]]:
        """Look graphs up that are not known here, wait until the team has been asked for them, and return the entries that are known then."""
        before = self.stats["team_asked"]
        assert self.lookup(*names) == []
        self.wait_until(lambda: self.stats["team_asked"] == before + len(names))
        return self.lookup(*names)

    @property
    def stats(self) -> dict[str, Any]:
        """The daemon's statistics."""
        return self.ask("GET", "/v1/stats")[1]

    @property
    def team(self) -> dict[str, Any]:
        """What the daemon says of its team."""
        state = self.stats["team"]
        assert isinstance(state, dict)
        return state

    def wait_for_problem(self, part: str) -> None:
        """Wait until the daemon says of its team what holds `part`."""
        self.wait_until(lambda: part in f"{self.team['problem']} {self.team['why_not_published']}")

    def wait_until_published(self) -> None:
        """Wait until nothing is left to be published, and the exchange that published the last is over."""

        def is_published() -> bool:
            team = self.team  # asked for once: records go from one of the two to the other
            return (team["queued"], team["unpublished"], team["problem"]) == (0, 0, "")

        self.wait_until(is_published)

    def said(self) -> str:
        """Return all that commands and the log say."""
        commands = (("status",), ("status", "--json"), ("stats",), ("stats", "--json"), ("config", "show"))
        outputs = [self.pygraphd(*words) for words in commands]
        log = self.locations.log.read_text() if self.locations.log.exists() else ""
        return "\n".join([*(each.stdout + each.stderr for each in outputs), log, json.dumps(self.stats)])
