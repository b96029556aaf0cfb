"""`python -m benchmarks lookup`: how long clients wait for their graphs' decisions, over a real socket to a real daemon."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.daemon import Daemon
from benchmarks.environment import describe_host
from benchmarks.errors import BenchmarkError
from benchmarks.figures import percentile
from benchmarks.large_cache import KNOWN, OLD, OLD_SHARE, digest, made_home
from benchmarks.lookup_load import Load, run_load
from benchmarks.records import SCHEMA, check_writable, write_json
from benchmarks.watching import CoresWatch, Watched
from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.schema.messages import LOOKUP_PATH, LookupAnswer, LookupRequest, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pygraphd.schema.locations import Locations

_WARM_UP = 50


@dataclass(frozen=True, slots=True)
class Plan:
    """A daemon with `entries` entries is asked `requests` times for `graphs` graphs by one client, and then under `load`.

    `prune`: one entry in five is pruned meanwhile.
    """

    graphs: int
    requests: int
    entries: int
    load: Load | None
    prune: bool


def measure_lookup(plan: Plan, out: Path) -> list[str]:
    """Time lookups; return lines for people, write all to `out`."""
    check_writable(out)
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-") as folder:
        old = plan.entries // OLD_SHARE
        locations = made_home(Path(folder), plan.entries, old)
        with Daemon(locations.cache):
            records = [_alone(plan, locations, plan.entries - old)]
            if plan.load is not None:
                records.append(_loaded(plan, plan.load, locations, plan.entries - old))
    write_json(out, {"schema": SCHEMA, "environment": describe_host(), "records": records})
    return [f"{name:15} {value}" for record in records for name, value in record.items()]


def _alone(plan: Plan, locations: Locations, known: int) -> dict[str, Any]:
    # Other entries every time, over the whole database.
    starts = [number * plan.graphs % (known - plan.graphs) for number in range(-_WARM_UP, plan.requests)]
    transport, daemon = Transport(locations.socket), Watched.daemon(locations)
    for first in starts[:_WARM_UP]:
        _lookup_us(transport, plan.graphs, first)
    used_s = daemon.main_cpu_s
    times = [_lookup_us(transport, plan.graphs, first) for first in starts[_WARM_UP:]]
    cpu_us = round((daemon.main_cpu_s - used_s) * 1e6 / len(times), 1)
    facts = {"clients": 1, "graphs": plan.graphs, "entries": plan.entries, "requests": len(times)}
    return {**facts, "cpu_us": cpu_us, **_latencies(times)}


def _loaded(plan: Plan, load: Load, locations: Locations, known: int) -> dict[str, Any]:
    daemon = Watched.daemon(locations)
    used_s, watch = daemon.main_cpu_s, CoresWatch(daemon)
    with _pruning(locations) if plan.prune else contextlib.nullcontext() as prune:
        outcome = run_load(locations.socket, load, known)
        used_s, cores = daemon.main_cpu_s - used_s, watch.cores()
        is_pruning = prune is not None and prune.poll() is None
    requests = len(outcome.times_us) + len(outcome.unanswered)
    return {
        "clients": load.clients,
        "graphs": load.graphs,
        "entries": plan.entries,
        "requests": requests,
        "asked_per_s": load.rate,
        "sent_per_s": round(requests / outcome.seconds, 1),
        "unanswered": len(outcome.unanswered),
        "reasons": sorted(set(outcome.unanswered)),
        "pruned_all_the_time": is_pruning,
        "cpu_us": round(used_s * 1e6 / requests, 1) if requests else None,
        "cores": dataclasses.asdict(cores),
        **_latencies(outcome.times_us),
    }


def _latencies(times_us: Sequence[float]) -> dict[str, float | None]:
    figures = {"p50_us": 50, "p90_us": 90, "p99_us": 99, "max_us": 100}
    return {
        name: round(percentile(times_us, percent), 1) if times_us else None
        for name, percent in figures.items()
    }


@contextlib.contextmanager
def _pruning(locations: Locations) -> Iterator[subprocess.Popen[bytes]]:
    """Have the daemon prune within the block; what is left then stays."""
    code = (
        "import sys; from pathlib import Path; from pygraphd.daemon import control; "
        "from pygraphd.daemon.pruning import PruneRequest; "
        "control.prune(Path(sys.argv[1]), PruneRequest(gpu=sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(locations.socket), OLD.gpu]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def _lookup_us(transport: Transport, graphs: int, first: int) -> float:
    digests = tuple(digest(number) for number in range(first, first + graphs))
    started = time.perf_counter()
    request = LookupRequest(KNOWN.digest(), digests)
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
