"""`/metrics` in Prometheus' text format: on the Unix socket, and on a port of 127.0.0.1 where one is asked for."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.daemon.http import Response
from pygraphd.daemon.statistics import MISSES, Counters
from pygraphd.daemon.team.state import TeamState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.daemon.connections import Listener

PATH = "/metrics"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_COUNTED = {
    "lookups": "Requests that looked up graphs.",
    "graphs": "Graphs looked up.",
    "hits": "Graphs whose decision was known and usable.",
    "shipped_hits": "Hits whose decision came with the package.",
    "records": "Decisions recorded by programs.",
    "spooled": "Decisions taken in from the spool.",
    "leases": "Leases granted to measure a graph.",
    "evicted": "Entries deleted to keep the limits of size and age.",
}
_TEAM = {
    "team_hits": "Hits whose decision came from the team.",
    "team_asked": "Graphs that the team was asked for.",
    "team_found": "Graphs that the team knew.",
    "team_invalid": "Records of the team that were not valid.",
    "team_published": "Records published to the team.",
    "team_failed": "Times that the team's database could not be used.",
}
_REQUESTS = ("invalid", "refused", "failed")


@dataclass(frozen=True, slots=True)
class State:
    """The state of the daemon that metrics show. `started`: seconds since the epoch; `entries`, `size`: None if they cannot be read."""

    version: str
    started: float
    entries: int | None
    size: int | None
    problems: int
    counters: Counters
    team: TeamState | None = None


def metrics_text(state: State) -> str:
    """Return the metrics; counters begin at 0 when the daemon starts."""
    return "".join(f"{line}\n" for line in _lines(state))


def response(state: State) -> Response:
    """Return the answer to `GET /metrics`."""
    return Response(metrics_text(state).encode(), content_type=_TYPE)


def _lines(state: State) -> Iterator[str]:
    counters = state.counters
    yield from _metric("info", "gauge", "The version of the daemon.", {f'{{version="{state.version}"}}': 1})
    yield from _metric("start_time_seconds", "gauge", "When it started.", {"": state.started})
    yield from _metric("problems", "gauge", "Problems that `pygraphd status` lists.", {"": state.problems})
    # No sample instead of 0: a database that cannot be read is not an empty one.
    if state.entries is not None:
        yield from _metric("entries", "gauge", "Entries in the database.", {"": state.entries})
    if state.size is not None:
        yield from _metric("database_bytes", "gauge", "Size of the database.", {"": state.size})
    for name, text in _COUNTED.items():
        yield from _metric(f"{name}_total", "counter", text, {"": getattr(counters, name)})
    reasons = {f'{{reason="{name}"}}': getattr(counters, name) for name in MISSES}
    yield from _metric("misses_total", "counter", "Graphs that their program has to measure.", reasons)
    results = {f'{{result="{name}"}}': getattr(counters, name) for name in _REQUESTS}
    yield from _metric("bad_requests_total", "counter", "Requests that were not served.", results)
    saved = {f'{{by="{name}"}}': getattr(counters, f"{name}_saved_s") for name in ("measuring", "recording")}
    yield from _metric("saved_seconds_total", "counter", "Host time that hits saved.", saved)
    if state.team is not None:
        yield from _team(state.team, counters)


def _team(team: TeamState, counters: Counters) -> Iterator[str]:
    reached: dict[str, float] = {"": int(team.is_reached)}
    yield from _metric(
        "team_reached", "gauge", "Whether the team's database answered when last asked.", reached
    )
    yield from _metric("team_queued", "gauge", "Records that wait to be published.", {"": team.queued})
    yield from _metric(
        "team_unpublished",
        "gauge",
        "Entries of the cache to be published after these.",
        {"": team.unpublished},
    )
    yield from _metric(
        "team_dropped_total", "counter", "Records that are never published.", {"": team.dropped}
    )
    for name, text in _TEAM.items():
        yield from _metric(f"{name}_total", "counter", text, {"": getattr(counters, name)})


def _metric(name: str, kind: str, text: str, samples: dict[str, float]) -> Iterator[str]:
    yield f"# HELP pygraphd_{name} {text}"
    yield f"# TYPE pygraphd_{name} {kind}"
    for labels, value in samples.items():
        yield f"pygraphd_{name}{labels} {value!r}"


class Port:
    """The port of 127.0.0.1 that serves `/metrics`; none before `listen`, and after `listen(0)`."""

    def __init__(self, new_listener: Callable[[], Listener]) -> None:
        self._new_listener = new_listener
        self._listener: Listener | None = None
        self._number = 0
        self.problem: str | None = None
        """Why the port that was asked for is not served; None if it is."""

    async def listen(self, number: int) -> None:
        """Serve on a port instead of the one before, 0: on none. Sets `problem` if that is not possible."""
        # Called at each SIGHUP: a port that could not be bound is tried again, one that is served stays.
        if number == self._number and self.problem is None:
            return
        await self.close()
        self._number, self.problem = number, None
        if not number:
            return
        bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # Connections of the daemon before stay in TIME_WAIT, and would keep a restart from its port.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener = self._new_listener()
        try:
            bound.bind(("127.0.0.1", number))
            await listener.listen(bound)
        except OSError as error:
            bound.close()
            await listener.close()
            self.problem = f"metrics_port: 127.0.0.1:{number} cannot be bound: {error.strerror}"
            return
        self._listener = listener

    async def close(self) -> None:
        """Serve on no port."""
        if self._listener is not None:
            await self._listener.close()
            self._listener = None
