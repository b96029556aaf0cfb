"""`python -m tools.load redis`: lookups and records a second of the daemon and of Redis, in turn, over a Unix socket each.

Both are asked by as many processes, each of which sends its next request when it has the answer to the one before. Redis holds the same
bytes for an entry as the daemon's answer has, and for a record those of the request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.daemon import Daemon
from benchmarks.environment import describe_host
from benchmarks.errors import BenchmarkError
from benchmarks.figures import percentile
from benchmarks.large_cache import KNOWN, digest, made_home
from benchmarks.records import SCHEMA, check_writable, write_json
from benchmarks.watching import Watched
from pygraphd.client.decisions.transport import Transport
from pygraphd.schema.messages import (
    LOOKUP_PATH,
    RECORD_PATH,
    LookupRequest,
    Origin,
    RecordRequest,
    encode,
)
from tools.load.redis_server import RedisClient, RedisServer, encoded
from tools.load.soak_client import record_of

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from pygraphd.schema.locations import Locations

_GRAPHS = 20
_BODIES = 64
# Far longer than a program waits: at full load, a late answer is to be counted and not given up.
_PATIENCE_S = 30.0
Ask = Callable[[], object]
"""Sends a client's next request, and returns when its answer is there."""
Maker = Callable[[int], Ask]
"""Returns what a client, by its number, does again and again; called in the client's process."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`clients` ask each server for `seconds`, `rounds` times in turn; both hold `entries` entries at first."""

    clients: int = 8
    seconds: float = 5.0
    rounds: int = 3
    entries: int = 10_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One server under one kind of load: requests a second, latencies in microseconds, and the server's processor time a request."""

    per_s: float
    p50_us: float
    p99_us: float
    cpu_us: float


def measure_beside_redis(plan: Plan, out: Path) -> list[str]:
    """Measure both, write all to `out`, return lines for people. Raises BenchmarkError without a Redis server."""
    check_writable(out)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pygraph-bench-")))
        redis = stack.enter_context(RedisServer(folder))
        locations = made_home(folder, plan.entries, 0)
        stack.enter_context(Daemon(locations.cache))
        _fill_redis(redis, locations, plan.entries)
        ours, theirs = Watched.daemon(locations), Watched(redis.pid)
        # A program asks the daemon over a new connection each time. Redis is asked over one that stays, as
        # its clients do, and in the daemon's way, too.
        makers: dict[tuple[str, str], tuple[Watched, Maker]] = {
            ("pygraphd", "lookup"): (ours, partial(_our_lookups, locations, plan.entries)),
            ("Redis", "lookup"): (theirs, partial(_their_lookups, redis.socket, plan.entries)),
            ("Redis, a connection each", "lookup"): (theirs, partial(_their_single_lookups, redis.socket, plan.entries)),
            ("pygraphd", "record"): (ours, partial(_our_records, locations)),
            ("Redis", "record"): (theirs, partial(_their_records, redis.socket)),
        }  # fmt: skip
        turns: dict[tuple[str, str], list[Turn]] = {each: [] for each in makers}
        for number in range(plan.rounds):
            # All within each round, so that a drift of the machine does not fall on one of them.
            for each, (server, maker) in makers.items():
                turns[each].append(_take_turn(plan, server, maker))
                print(f"round {number + 1}: {', '.join(each)}", file=sys.stderr, flush=True)
        records = [_record(plan, *each, of_each) for each, of_each in turns.items()]
        environment = {**describe_host(), "redis": redis.version}
    write_json(out, {"schema": SCHEMA, "environment": environment, "records": records})
    return [
        f"{each['request']:7} {each['server']:25} {each['per_s']:8.0f}/s, {each['cpu_us']:6.0f} us of its processor a request"
        for each in records
    ]


def _record(plan: Plan, server: str, request: str, turns: list[Turn]) -> dict[str, Any]:
    medians = {
        each.name: round(statistics.median(getattr(turn, each.name) for turn in turns), 1)
        for each in dataclasses.fields(Turn)
    }
    rates = [round(turn.per_s, 1) for turn in turns]
    return {"server": server, "request": request, "clients": plan.clients, **medians, "rounds_per_s": rates}


def _take_turn(plan: Plan, server: Watched, maker: Maker) -> Turn:
    context = multiprocessing.get_context("fork")
    results: SimpleQueue[list[float]] = context.SimpleQueue()
    # CLOCK_MONOTONIC is the same for all processes of a host, so that all clients begin and end at once.
    begin = time.monotonic() + 0.5
    processes = [
        context.Process(target=_client, args=(maker, number, begin, begin + plan.seconds, results))
        for number in range(plan.clients)
    ]
    used_s = server.cpu_s
    for process in processes:
        process.start()
    # Before the joins: a child with more results than a pipe holds cannot end before they are read.
    times_us = [each for _ in processes for each in results.get()]
    for process in processes:
        process.join()
    if not times_us:
        raise BenchmarkError("no request was answered")
    return Turn(
        len(times_us) / plan.seconds,
        percentile(times_us, 50),
        percentile(times_us, 99),
        (server.cpu_s - used_s) * 1e6 / len(times_us),
    )


def _client(maker: Maker, number: int, begin: float, end: float, results: SimpleQueue[list[float]]) -> None:
    times: list[float] = []
    try:
        ask = maker(number)
        time.sleep(max(begin - time.monotonic(), 0.0))
        while time.monotonic() < end:
            started = time.perf_counter()
            ask()
            times.append((time.perf_counter() - started) * 1e6)
    finally:
        # Whatever has happened, as the parent waits for a result of each client.
        results.put(times)


def _graphs(numbers: random.Random, entries: int) -> list[str]:
    return [digest(numbers.randrange(entries)) for _ in range(_GRAPHS)]


def _our_lookups(locations: Locations, entries: int, number: int) -> Ask:
    numbers = random.Random(number)
    transport = Transport(locations.socket, _PATIENCE_S, _PATIENCE_S)
    # Encoded beforehand, as the commands for Redis are: the time of a request is to be the server's.
    bodies = [encode(LookupRequest(KNOWN.digest(), tuple(_graphs(numbers, entries)))) for _ in range(_BODIES)]
    return lambda: transport.request("POST", LOOKUP_PATH, numbers.choice(bodies))


def _their_lookups(socket: Path, entries: int, number: int) -> Ask:
    numbers, commands = _mgets(entries, number)
    client = RedisClient(socket)
    return lambda: client.request(numbers.choice(commands), 1)


def _their_single_lookups(socket: Path, entries: int, number: int) -> Ask:
    numbers, commands = _mgets(entries, number)

    def ask() -> None:
        client = RedisClient(socket)
        client.request(numbers.choice(commands), 1)
        client.close()

    return ask


def _mgets(entries: int, number: int) -> tuple[random.Random, list[bytes]]:
    numbers = random.Random(number)
    return numbers, [
        encoded(b"MGET", *(graph.encode() for graph in _graphs(numbers, entries))) for _ in range(_BODIES)
    ]


def _our_records(locations: Locations, number: int) -> Ask:
    numbers = random.Random(number)
    transport = Transport(locations.socket, _PATIENCE_S, _PATIENCE_S)
    return lambda: transport.request("POST", RECORD_PATH, encode(_new_record(numbers)))


def _their_records(socket: Path, number: int) -> Ask:
    numbers, client = random.Random(number), RedisClient(socket)

    def ask() -> None:
        request = _new_record(numbers)
        (record,) = request.records
        graph, body = record.graph.digest.encode(), encode(request)
        # The decision, and a list of measurements that is kept as short as the daemon's.
        commands = (
            encoded(b"HSET", b"decision:" + graph, b"record", body),
            encoded(b"LPUSH", b"measurements:" + graph, body),
            encoded(b"LTRIM", b"measurements:" + graph, b"0", b"31"),
        )
        client.request(b"".join(commands), len(commands))

    return ask


def _new_record(numbers: random.Random) -> RecordRequest:
    # Of so many numbers that none comes twice: each record is of a new graph.
    return RecordRequest(
        KNOWN, Origin("benchmark", "0"), (record_of(digest(numbers.getrandbits(64)), numbers),)
    )


def _fill_redis(redis: RedisServer, locations: Locations, entries: int) -> None:
    """Store as many keys as the daemon has entries, each with the bytes that an answer of the daemon has for it."""
    transport = Transport(locations.socket, _PATIENCE_S, _PATIENCE_S)
    answer = transport.request("POST", LOOKUP_PATH, encode(LookupRequest(KNOWN.digest(), (digest(0),))))
    value = json.dumps(json.loads(answer)["entries"][0], separators=(",", ":")).encode()
    client = RedisClient(redis.socket)
    for number in range(entries):
        client.request(encoded(b"SET", digest(number).encode(), value), 1)
    client.close()
