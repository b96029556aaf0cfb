"""`python -m benchmarks lookup`: how long a client waits for its graphs' decisions, over a real socket to a real daemon."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.daemon import Daemon
from benchmarks.environment import describe_host
from benchmarks.errors import BenchmarkError
from benchmarks.figures import percentile
from benchmarks.records import SCHEMA, check_writable, write_json
from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.schema.keys import Environment
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import (
    LOOKUP_PATH,
    MAX_GRAPHS,
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
    RecordAnswer,
    RecordRequest,
    decode,
    encode,
)
from pygraphd.schema.reasons import Reason, ReasonCode

_ENTRIES = 10_000
_WARM_UP = 50
_FILLING_S = 60.0
_ENVIRONMENT = Environment(
    "NVIDIA H200", "9.0", 132, 143771, "none", "2.11.0", "3.6.0", "13.0", "580.159.04", "91900"
)
"""Made up, and nothing depends on it: only its size is like a real one's."""


def measure_lookup(graphs: int, requests: int, out: Path) -> list[str]:
    """Time lookups of `graphs` known graphs, one after the other; returns lines for people, writes all to `out`."""
    check_writable(out)
    with (
        tempfile.TemporaryDirectory(prefix="pygraph-bench-") as folder,
        Daemon(Path(folder) / "home") as daemon,
    ):
        socket = locate({"PYGRAPHD_HOME": str(daemon.home)}).socket
        _fill(socket)
        # Other entries every time, over the whole database.
        starts = [number * graphs % (_ENTRIES - graphs) for number in range(-_WARM_UP, requests)]
        times = [_lookup_us(Transport(socket), graphs, first) for first in starts]
    timed = times[_WARM_UP:]
    record = {
        "graphs": graphs,
        "entries": _ENTRIES,
        "requests": len(timed),
        "p50_us": round(percentile(timed, 50), 1),
        "p99_us": round(percentile(timed, 99), 1),
        "max_us": round(max(timed), 1),
    }
    write_json(out, {"schema": SCHEMA, "environment": describe_host(), "records": [record]})
    return [f"{name:15} {value}" for name, value in record.items()]


def _fill(socket: Path) -> None:
    transport = Transport(socket, total_s=_FILLING_S)
    for first in range(0, _ENTRIES, MAX_GRAPHS):
        records = tuple(_entry(number) for number in range(first, min(first + MAX_GRAPHS, _ENTRIES)))
        request = RecordRequest(_ENVIRONMENT, Origin("benchmark", "0"), records)
        answer = decode(RecordAnswer, _ask(transport, RECORD_PATH, encode(request)))
        if answer.stored != len(records):
            raise BenchmarkError(f"the daemon stored {answer.stored} of {len(records)} records")
    print(f"{_ENTRIES} entries stored", file=sys.stderr, flush=True)


def _entry(number: int) -> Record:
    graph = Graph(_digest(number), Kind.FORWARD, partition=0, partitions=1, operators=100)
    decision = Decision(Deployment.KERNELS, Reason(ReasonCode.NO_GAIN), policy=1)
    measurements = tuple(
        Measurement(deployment, 12, 100.0, 1.0, 90.0, 100.0, 0.5)
        for deployment in (Deployment.KERNELS, Deployment.GRAPH)
    )
    return Record(graph, decision, measurements)


def _digest(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


def _lookup_us(transport: Transport, graphs: int, first: int) -> float:
    digests = tuple(_digest(number) for number in range(first, first + graphs))
    started = time.perf_counter()
    request = LookupRequest(_ENVIRONMENT.digest(), digests)
    answer = decode(LookupAnswer, _ask(transport, LOOKUP_PATH, encode(request)))
    elapsed = time.perf_counter() - started
    if {entry.graph for entry in answer.entries} != set(digests):
        raise BenchmarkError(f"the daemon knew {len(answer.entries)} of {graphs} graphs that were stored")
    return elapsed * 1e6


def _ask(transport: Transport, target: str, body: bytes) -> bytes:
    try:
        return transport.request("POST", target, body)
    except TransportError as error:
        raise BenchmarkError(f"{target}: {error}") from error
