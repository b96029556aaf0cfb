"""Many clients that look up at a given rate, each a process as a program's is, with the client's own deadlines."""

from __future__ import annotations

import multiprocessing
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.large_cache import KNOWN, digest
from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.schema.messages import LOOKUP_PATH, LookupRequest, encode

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

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


def run_load(socket: Path, load: Load, known: int) -> Outcome:
    """Ask for the entries 0 to `known` at random; return what all clients saw."""
    context = multiprocessing.get_context("fork")
    begin = time.monotonic() + _BEGIN_S
    ends, processes = [], []
    for client in range(load.clients):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_client, args=(socket, load, known, client, begin, theirs))
        process.start()
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
    bodies = [_body(numbers, load.graphs, known, is_missing=n % _MISSING_EVERY == 0) for n in range(_BODIES)]
    transport, interval = Transport(socket), load.clients / load.rate
    times: list[float] = []
    unanswered: list[str] = []
    for turn in range(int(load.seconds / interval)):
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
        asked[-1] = digest(-1)
    return encode(LookupRequest(KNOWN.digest(), tuple(asked)))
