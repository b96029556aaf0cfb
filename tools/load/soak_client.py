"""A client of the soak: looks up, leases and records at a steady rate with a program's deadlines, and ends as programs do.

What it sees goes line by line into a pipe that all clients share: `KIND MICROSECONDS`, or `KIND ! REASON` where no answer came.
"""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks.large_cache import KNOWN, OLD, digest
from pygraphd.client.decisions import spool
from pygraphd.client.decisions.transport import Transport, TransportError
from pygraphd.schema import ownership
from pygraphd.schema.messages import (
    LEASE_PATH,
    LOOKUP_PATH,
    RECORD_PATH,
    Decision,
    Deployment,
    Graph,
    Kind,
    LeaseAnswer,
    LeaseRequest,
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

if TYPE_CHECKING:
    from pygraphd.schema.locations import Locations

LOOKUP, LEASE, RECORD = "lookup", "lease", "record"
GRAPHS = 20
"""Graphs in a lookup."""
_MEASURED = 3
_MEASURING_SHARE = 0.1
_PRUNED_SHARE = 0.3
_KILLED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Life:
    """A client's place in the load: it does something each `interval_s`, first at `begin` (monotonic), and ends at `end`.

    It asks for entries 0 to `known`, and measures graphs of a space twice as large. `seed` decides what it does.
    """

    seed: int
    begin: float
    end: float
    interval_s: float
    known: int


class Client:
    """One life, in a process of its own."""

    def __init__(self, locations: Locations, life: Life, report: int) -> None:
        self._locations = locations
        self._life = life
        self._report = report
        self._numbers = random.Random(life.seed)
        # With the deadlines of a program, which the defaults are.
        self._transport = Transport(locations.socket)

    def run(self) -> None:
        """Live; one life in four is cut off by SIGKILL in the midst of a request."""
        due = self._life.begin
        while due < self._life.end:
            time.sleep(max(due - time.monotonic(), 0.0))
            # From the time that was due, and not from now: late answers must not lower the rate.
            due += self._life.interval_s * (2 if self._do_something() else 1)
        if self._numbers.random() < _KILLED_SHARE:
            self._break_off()

    def _do_something(self) -> bool:
        """Look up, or lease and record; return whether it was the latter, which is two requests."""
        if self._numbers.random() >= _MEASURING_SHARE:
            self._ask(LOOKUP, LOOKUP_PATH, encode(LookupRequest(KNOWN.digest(), self._graphs(GRAPHS))))
            return False
        environment = OLD if self._numbers.random() < _PRUNED_SHARE else KNOWN
        request = LeaseRequest(environment.digest(), f"soak-{os.getpid()}", self._graphs(_MEASURED, space=2))
        answer = self._ask(LEASE, LEASE_PATH, encode(request))
        if answer is not None and (granted := decode(LeaseAnswer, answer).granted):
            records = tuple(record_of(graph, self._numbers) for graph in granted)
            body = encode(RecordRequest(environment, Origin("soak", "0"), records))
            if self._ask(RECORD, RECORD_PATH, body) is None:
                spool.leave(self._locations.spool, body)
        return True

    def _graphs(self, count: int, space: int = 1) -> tuple[str, ...]:
        return tuple(digest(self._numbers.randrange(self._life.known * space)) for _ in range(count))

    def _ask(self, kind: str, path: str, body: bytes) -> bytes | None:
        started = time.perf_counter()
        try:
            answer = self._transport.request("POST", path, body)
        except TransportError as error:
            self._say(f"{kind} ! {error}")
            return None
        self._say(f"{kind} {(time.perf_counter() - started) * 1e6:.1f}")
        return answer

    def _say(self, line: str) -> None:
        # One write of less than PIPE_BUF: lines of several processes do not mix, and none is cut off by a kill.
        os.write(self._report, f"{line[:200]}\n".encode())

    def _break_off(self) -> None:
        with ownership.connect(self._locations.socket, 1.0) as connection:
            # Fewer bytes than announced, so that the daemon is waiting for the rest when the client dies.
            connection.sendall(b"POST %s HTTP/1.1\r\nContent-Length: 9\r\n\r\n{" % LOOKUP_PATH.encode())
            os.kill(os.getpid(), signal.SIGKILL)


def record_of(graph: str, numbers: random.Random) -> Record:
    """Return what a program records of a graph (digest), with measurements of its own."""
    host_us = numbers.uniform(50.0, 150.0)
    kernels = Measurement(Deployment.KERNELS, 12, host_us, 1.0, host_us, 40.0, 0.5, 1.0, 1.0)
    measurements = (kernels, dataclasses.replace(kernels, deployment=Deployment.GRAPH))
    decision = Decision(Deployment.KERNELS, Reason(ReasonCode.NO_GAIN), POLICY_VERSION, calls=24)
    return Record(Graph(graph, Kind.FORWARD, 0, 1, 100), decision, measurements)
