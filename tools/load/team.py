"""`python -m tools.load team`: many daemons on one PostgreSQL server, which first publish records and then ask for each other's."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.daemon import Daemon, without_product
from benchmarks.environment import describe_host
from benchmarks.errors import BenchmarkError
from benchmarks.large_cache import KNOWN, digest
from benchmarks.processes import run_fresh
from benchmarks.records import SCHEMA, check_writable, write_json
from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.daemon import control
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import (
    LOOKUP_PATH,
    RECORD_PATH,
    Decision,
    Deployment,
    Graph,
    Kind,
    LookupAnswer,
    LookupRequest,
    Measurement,
    Origin,
    Record,
    RecordRequest,
    decode,
    encode,
)
from pygraphd.schema.policy import POLICY_VERSION
from pygraphd.schema.reasons import Reason, ReasonCode
from tools.load.team_server import Server, Watch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

MODULE = 20
"""Graphs in one request, as of one compiled module."""
_STARTED_AT_ONCE = 4
_ASKING = 8
_INIT_S = 60.0
_END_S = 600.0
_LOOK_S = 0.05
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`daemons` daemon processes on the database at `url`; each records `graphs` graphs, and asks for those of its neighbour."""

    daemons: int
    graphs: int
    url: str


def measure_team(plan: Plan, out: Path) -> list[str]:
    """Publish and ask; return lines for people, write all to `out`."""
    check_writable(out)
    server = Server(plan.url)
    with contextlib.closing(server), tempfile.TemporaryDirectory(prefix="pygraph-bench-") as folder:
        # An earlier run has left the same graphs: they would be known before any daemon has published them.
        if server.is_used():
            raise BenchmarkError("--url: records are there already; name an empty database")
        _make_tables(plan.url, Path(folder))
        homes = _homes(plan, Path(folder))
        with _running(homes):
            print(f"{plan.daemons} daemons run", file=sys.stderr, flush=True)
            sockets = [locate({"PYGRAPHD_HOME": str(home)}).socket for home in homes]
            record = _measured(plan, server, sockets)
            environment = describe_host() | {
                f"postgres_{name}": text for name, text in server.settings().items()
            }
    write_json(out, {"schema": SCHEMA, "environment": environment, "records": [record]})
    return [f"{name:24} {value}" for name, value in record.items()]


def _measured(plan: Plan, server: Server, sockets: Sequence[Path]) -> dict[str, Any]:
    total = plan.daemons * plan.graphs
    published = _timed(plan, server, lambda: _publish(plan, server, sockets))
    tables = server.tables()
    asked = _timed(plan, server, lambda: _ask(plan, sockets))
    _expect_known(plan, sockets)
    failed = sum(_counter(socket, "team_failed") for socket in sockets)
    return {
        "daemons": plan.daemons,
        "graphs": plan.graphs,
        **{f"publish_{name}": value for name, value in _figures(published, total).items()},
        **{f"ask_{name}": value for name, value in _figures(asked, total).items()},
        "tables": tables,
        "bytes_of_a_record": round(sum(each["bytes"] for each in tables.values()) / total),
        "failed": failed,
    }


@dataclass(frozen=True, slots=True)
class _Phase:
    """How long a phase took, the processor time that the server used in it, and the most connections at a time."""

    seconds: float
    processor_s: float | None
    connections: int


def _timed(plan: Plan, server: Server, act: Callable[[], None]) -> _Phase:
    with Watch(plan.url) as watch:
        started, used = time.monotonic(), server.processor_s()
        act()
        seconds, used_then = time.monotonic() - started, server.processor_s()
    spent = None if used is None or used_then is None else used_then - used
    return _Phase(seconds, spent, watch.most)


def _figures(phase: _Phase, total: int) -> dict[str, float | None]:
    spent = phase.processor_s
    return {
        "seconds": round(phase.seconds, 2),
        "per_s": round(total / phase.seconds, 1),
        "server_us": None if spent is None else round(spent / total * 1e6, 1),
        "connections": phase.connections,
    }


def _publish(plan: Plan, server: Server, sockets: Sequence[Path]) -> None:
    """Have all daemons record their graphs, and wait until the server has all."""
    _for_each(sockets, lambda number: _record(sockets[number], plan, number))
    # A daemon answers when it has stored the records itself, and publishes them in the background.
    _wait_until(lambda: server.published() == plan.daemons * plan.graphs)


def _record(socket: Path, plan: Plan, number: int) -> None:
    for graphs in _modules(plan, number):
        records = tuple(map(_record_of, graphs))
        request = RecordRequest(KNOWN, Origin(f"host{number}", "0"), records)
        _request(socket, RECORD_PATH, encode(request))


def _ask(plan: Plan, sockets: Sequence[Path]) -> None:
    """Have all daemons be asked for their neighbours' graphs, which they do not know, and wait until the team was asked for all."""
    _for_each(sockets, lambda number: _look_up(sockets[number], plan, number))
    total = plan.daemons * plan.graphs
    _wait_until(lambda: sum(_counter(socket, "team_found") for socket in sockets) == total)


def _look_up(socket: Path, plan: Plan, number: int) -> int:
    """Look up the neighbour's graphs; return the number of those that are known."""
    known = 0
    for graphs in _modules(plan, (number + 1) % plan.daemons):
        body = encode(LookupRequest(KNOWN.digest(), tuple(map(digest, graphs))))
        known += len(decode(LookupAnswer, _request(socket, LOOKUP_PATH, body)).entries)
    return known


def _expect_known(plan: Plan, sockets: Sequence[Path]) -> None:
    for number, socket in enumerate(sockets):
        if (known := _look_up(socket, plan, number)) != plan.graphs:
            raise BenchmarkError(f"daemon {number} knows {known} of {plan.graphs} graphs of its neighbour")


def _modules(plan: Plan, number: int) -> list[range]:
    first = number * plan.graphs
    every = range(first, first + plan.graphs)
    return [every[start : start + MODULE] for start in range(0, plan.graphs, MODULE)]


def _record_of(number: int) -> Record:
    measurements = tuple(
        Measurement(deployment, 12, cost_us + number / 1e3, 1.0, 90.0, 80.0, 0.5, 0.5, 0.25)
        for deployment, cost_us in ((Deployment.KERNELS, 100.0), (Deployment.GRAPH, 60.0))
    )
    decision = Decision(
        Deployment.GRAPH,
        Reason(ReasonCode.SAVES_HOST_TIME),
        POLICY_VERSION,
        calls=24,
        against=Reason(ReasonCode.TAKES_MORE_HOST_TIME),
    )
    return Record(Graph(digest(number), Kind.FORWARD, 0, 1, 100), decision, measurements)


# --- daemons ---------------------------------------------------------------------------------------


def _make_tables(url: str, folder: Path) -> None:
    environ = {**without_product(os.environ), "PYGRAPHD_HOME": str(folder), "PYGRAPHD_TEAM_URL": url}
    made = run_fresh(["-P", "-m", "pygraphd", "team", "init"], environ, _INIT_S, folder=folder)
    if made.error:
        raise BenchmarkError(f"pygraphd team init: {made.error}")


def _homes(plan: Plan, folder: Path) -> list[Path]:
    homes = [folder / str(number) for number in range(plan.daemons)]
    for home in homes:
        home.mkdir(mode=0o700)
        # In the file, since `Daemon` leaves out all variables of PyGraph.
        (home / "config.toml").write_text(f'team_url = "{plan.url}"\n')
    return homes


@contextlib.contextmanager
def _running(homes: Sequence[Path]) -> Iterator[None]:
    daemons = [Daemon(home) for home in homes]
    with ThreadPoolExecutor(_STARTED_AT_ONCE) as pool:
        try:
            list(pool.map(Daemon.__enter__, daemons))
            yield
        finally:
            list(pool.map(Daemon.__exit__, daemons))


def _for_each(sockets: Sequence[Path], act: Callable[[int], object]) -> None:
    with ThreadPoolExecutor(_ASKING) as pool:
        list(pool.map(act, range(len(sockets))))


def _request(socket: Path, target: str, body: bytes) -> bytes:
    try:
        return Transport(socket, _ANSWER_S, _ANSWER_S).request("POST", target, body)
    except TransportError as error:
        raise BenchmarkError(f"{target}: {error}") from error


def _counter(socket: Path, name: str) -> int:
    count = control.stats(socket)[name]
    assert isinstance(count, int)
    return count


def _wait_until(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _END_S
    while not is_done():
        if time.monotonic() > deadline:
            raise BenchmarkError(
                f"not done after {_END_S:.0f} s; `pygraphd status` of the daemons would say why"
            )
        time.sleep(_LOOK_S)
