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
from benchmarks.soak import Bound
from benchmarks.watching import CoresWatch, Watched
from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.schema.messages import LOOKUP_PATH, LookupAnswer, LookupRequest, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pygraphd.schema.locations import Locations

_WARM_UP = 50
_BOUND_GRAPHS = 20
"""Graphs in a request up to which the bound of the latency holds."""
_BOUND_P99_MS = 10
_LEAST_SENT = 0.95
"""Share of the requests asked for below which clients were too slow to send them."""


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


def measure_lookup(plan: Plan, out: Path) -> tuple[list[str], bool]:
    """Time lookups, and write all to `out`; return lines for people, and whether every bound was kept."""
    check_writable(out)
    with tempfile.TemporaryDirectory(prefix="pygraph-bench-") as folder:
        old = plan.entries // OLD_SHARE
        locations = made_home(Path(folder), plan.entries, old)
        with Daemon(locations.cache):
            records = [_alone(plan, locations, plan.entries - old)]
            if plan.load is not None:
                records.append(_loaded(plan, plan.load, locations, plan.entries - old))
    bounds = bounds_of(records)
    kept = [{**dataclasses.asdict(each), "is_kept": each.is_kept} for each in bounds]
    environment = describe_host()
    write_json(out, {"schema": SCHEMA, "environment": environment, "records": records, "bounds": kept})
    lines = [f"{name:15} {value}" for record in records for name, value in record.items()]
    told = [
        f"{'kept' if each.is_kept else 'BROKEN':7} {each.name}: {each.value:g} of {each.most:g}"
        for each in bounds
    ]
    return lines + told + shortcomings(plan, records), all(each.is_kept for each in bounds)


def bounds_of(records: Sequence[Mapping[str, Any]]) -> list[Bound]:
    """Return the bounds with what was seen: of the latency of each load, and of requests that were not answered."""
    bounds = []
    for record in records:
        load = f"{record['clients']} client{'s' if record['clients'] > 1 else ''}"
        if record["graphs"] <= _BOUND_GRAPHS and record["p99_us"] is not None:
            name = f"p99 of lookups of {record['graphs']} graphs by {load}, ms"
            bounds.append(Bound(name, record["p99_us"] / 1e3, _BOUND_P99_MS))
        if "unanswered" in record:
            name = f"requests of {load} not answered, at {record['asked_per_s']} a second"
            bounds.append(Bound(name, record["unanswered"], 0))
    return bounds


def shortcomings(plan: Plan, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return in what the load was less than the plan's, so that kept bounds say less."""
    texts = []
    for record in records:
        if record.get("sent_per_s", 0) < _LEAST_SENT * record.get("asked_per_s", 0):
            texts.append(f"note    only {record['sent_per_s']:g} requests a second were sent")
        if plan.prune and not record.get("pruned_all_the_time", True):
            texts.append("note    the prune ended before the requests: take more entries or fewer seconds")
    return texts


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
