"""`python -m benchmarks lookup`: how long clients wait for their graphs' decisions, over a real socket to a real daemon."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import random
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
from benchmarks.figures import Bound, percentile
from benchmarks.large_cache import KNOWN, OLD, OLD_SHARE, digest, made_home
from benchmarks.records import SCHEMA, check_writable, write_json
from benchmarks.watching import CoresWatch, Watched
from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.schema.messages import LOOKUP_PATH, LookupAnswer, LookupRequest, decode, encode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from multiprocessing.connection import Connection

    from pygraphd.schema.locations import Locations

_WARM_UP = 50
_BOUND_GRAPHS = 20
"""Graphs in a request up to which the bound of the latency holds."""
_BOUND_P99_MS = 10
_LEAST_SENT = 0.95
"""Share of the requests asked for below which clients were too slow to send them."""
_MISSING_EVERY = 10
_BODIES = 64
_BEGIN_S = 2.0
_END_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """How much is asked: `clients` processes, `rate` requests a second of all together, for `seconds`, of `graphs` graphs each.

    One in ten requests asks for one graph that is not known.
    """

    clients: int
    rate: int
    seconds: float
    graphs: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """The time of each answered request in microseconds, the reasons of the others, and the time until the last, in seconds."""

    times_us: list[float]
    unanswered: list[str]
    seconds: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A daemon with `entries` entries is asked `requests` times for `graphs` graphs by one client, and then under `load`.

    `prune`: one entry in five is pruned meanwhile.
    """

    graphs: int
    entries: int
    load: Load | None
    prune: bool
    requests: int = 2000


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
    content = {
        "environment": describe_host(),
        "records": records,
        "bounds": [each.as_record() for each in bounds],
    }
    write_json(out, {"schema": SCHEMA, **content})
    lines = [f"{name:15} {value}" for record in records for name, value in record.items()]
    told = [*map(str, bounds), *shortcomings(plan, records)]
    return lines + told, all(each.is_kept for each in bounds)


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
    # Beside latencies the file has processor time, which holds on a machine that is busy with other work,
    # too.
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
    # In a process of its own: the call returns when the prune is over.
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def _lookup_us(transport: Transport, graphs: int, first: int) -> float:
    digests = tuple(digest(number) for number in range(first, first + graphs))
    started = time.perf_counter()
    # Encoding and decoding are timed as well, since a program waits for them.
    request = LookupRequest(KNOWN.digest(), digests)
    answer = decode(LookupAnswer, _ask(transport, LOOKUP_PATH, encode(request)))
    elapsed = time.perf_counter() - started
    # An answer that lacks graphs is quicker, and would make the figures look good.
    if {entry.graph for entry in answer.entries} != set(digests):
        raise BenchmarkError(f"the daemon knew {len(answer.entries)} of {graphs} graphs that were stored")
    return elapsed * 1e6


def _ask(transport: Transport, target: str, body: bytes) -> bytes:
    try:
        return transport.request("POST", target, body)
    except TransportError as error:
        raise BenchmarkError(f"{target}: {error}") from error


# --- many clients at a given rate, each a process with a program's deadlines ------------------------


def run_load(socket: Path, load: Load, known: int) -> Outcome:
    """Ask for the entries 0 to `known` at random; return what all clients saw."""
    context = multiprocessing.get_context("fork")
    # CLOCK_MONOTONIC is the same for all processes of a host, so that one beginning holds for all clients.
    begin = time.monotonic() + _BEGIN_S
    ends, processes = [], []
    for client in range(load.clients):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_client, args=(socket, load, known, client, begin, theirs))
        process.start()
        # Else this process would keep the sending end open, and not see that a client has died.
        theirs.close()
        ends.append(ours)
        processes.append(process)
    times: list[float] = []
    unanswered: list[str] = []
    for end, process in zip(ends, processes, strict=True):
        if end.poll(_BEGIN_S + load.seconds + _END_S):
            some, reasons = end.recv()
            times += some
            unanswered += reasons
        else:
            unanswered.append("a client did not end")
            process.kill()
        process.join()
    return Outcome(times, unanswered, time.monotonic() - begin)


def _client(socket: Path, load: Load, known: int, number: int, begin: float, result: Connection) -> None:
    numbers = random.Random(number)
    # Encoded beforehand, as the clients share the cores with the daemon.
    bodies = [_body(numbers, load.graphs, known, is_missing=n % _MISSING_EVERY == 0) for n in range(_BODIES)]
    transport, interval = Transport(socket), load.clients / load.rate
    times: list[float] = []
    unanswered: list[str] = []
    for turn in range(int(load.seconds / interval)):
        # By the clock, and not from the last answer: late answers must not lower the rate. Clients are spread
        # over the interval.
        due = begin + (turn + number / load.clients) * interval
        time.sleep(max(due - time.monotonic(), 0.0))
        started = time.perf_counter()
        try:
            transport.request("POST", LOOKUP_PATH, bodies[turn % _BODIES])
        except TransportError as error:
            unanswered.append(str(error))
        else:
            times.append((time.perf_counter() - started) * 1e6)
    result.send((times, unanswered))


def _body(numbers: random.Random, graphs: int, known: int, *, is_missing: bool) -> bytes:
    asked = [digest(numbers.randrange(known)) for _ in range(graphs)]
    if is_missing:
        # Entries count from 0, so that this one is not stored.
        asked[-1] = digest(-1)
    return encode(LookupRequest(KNOWN.digest(), tuple(asked)))
