"""What listens in the daemon's place and answers whatever it likes: a client believes nothing of it, loses no record, and soon asks no more.

The transport's part is in `tests/client/decisions/test_transport.py`; here are answers that arrive whole.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.client.common.report import Report
from pygraphd.client.decisions.cache import MAX_DAEMON_FAILURES, Cache
from pygraphd.client.decisions.leases import Leases, PendingGraph
from pygraphd.schema.messages import (
    MAX_BODY_BYTES,
    LeaseAnswer,
    LookupAnswer,
    RecordAnswer,
    RecordRequest,
    decode,
)
from tests.support.answering import Answering
from tests.support.cache_case import DECISION, ENVIRONMENT, GRAPH, RECORD, places

if TYPE_CHECKING:
    from pathlib import Path

    from pygraphd.schema.locations import Locations

__all__ = ["places"]  # a fixture

pytestmark = [pytest.mark.daemon, pytest.mark.usefixtures("patient")]

ENTRY: dict[str, Any] = {
    "graph": GRAPH,
    "decision": json.loads(json.dumps(dataclasses.asdict(DECISION))),
    "uid": 0,
    "host": "host",
    "cost_us": 10.0,
    "measured_at": 1e9,
    "host_us": 9.0,
    "span_us": 8.0,
}
SOUND = {
    "environment": ENVIRONMENT.digest(),
    "version": "9.9",
    "entries": [ENTRY],
    "stored": 1,
    "granted": [GRAPH],
    "seconds": 60.0,
}
"""The answer to a lookup, a record and a request for a lease in one: unknown fields are ignored."""


def http(body: bytes, fields: bytes = b"", status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n%s\r\n%s" % (status, len(body), fields, body)


def told(value: object) -> bytes:
    return http(json.dumps(value).encode())


def all_with(**parts: object) -> bytes:
    """Return an answer that is sound but for some of its parts, whatever was asked."""
    return told(SOUND | parts)


def entry_with(**parts: object) -> bytes:
    """Return an answer that is wrong for a lookup, a record and a lease, and for the lookup in its entry."""
    return all_with(entries=[ENTRY | parts], stored=-1, seconds=-1)


def decision_with(**parts: object) -> bytes:
    return entry_with(decision=ENTRY["decision"] | parts)


VALUES: tuple[Any, ...] = (None, True, 0, 1.5, "entries", [], {}, float("nan"))
GZIPPED = gzip.compress(json.dumps(SOUND).encode())
HOSTILE = {
    # no JSON, or not only that
    "empty": http(b""),
    "text": http(b"OK"),
    "page": http(b"<html><body>It works!</body></html>", b"Content-Type: text/html\r\n"),
    "zeros": http(bytes(100_000)),
    "not utf-8": http(json.dumps(SOUND).encode().replace(b"9.9", b"\xff\xfe")),
    "cut off": http(json.dumps(SOUND).encode()[:-1]),
    "two at once": http(json.dumps(SOUND).encode() * 2),
    "gzip": http(GZIPPED, b"Content-Encoding: gzip\r\n"),
    "gzip cut off": http(GZIPPED[:-9], b"Content-Encoding: gzip\r\n"),
    "deep": http(b"[" * 200_000),
    "deep objects": http(b'{"entries":' * 100_000),
    "many digits": http(b'{"stored": ' + b"9" * 100_000 + b"}"),
    "larger than a body": http(b" " * (MAX_BODY_BYTES + 1) + json.dumps(SOUND).encode()),
    # JSON of another kind
    **{f"only {value!r:.9}": told(value) for value in (*VALUES, [SOUND])},
    **{f"each {value!r:.9}": told(dict.fromkeys(SOUND, value)) for value in VALUES},
    # the right shape, with values that cannot be
    "environment in upper case": all_with(environment=ENVIRONMENT.digest().upper()),
    "escape codes": all_with(version="\x1b]0;x\x07"),
    "long version": all_with(version="9" * 100_000),
    "no version": told({name: value for name, value in SOUND.items() if name != "version"}),
    "too many": all_with(entries=[ENTRY] * 1025, granted=[GRAPH] * 1025, stored=1025),
    "entries as object": all_with(entries={GRAPH: ENTRY}, granted={GRAPH: 1}, stored="1"),
    "not a number": entry_with(cost_us=float("nan")),
    "infinite": entry_with(span_us=float("inf")),
    "negative": entry_with(host_us=-1),
    "an hour and more": entry_with(cost_us=1e300),
    "text for a number": entry_with(cost_us="10"),
    "far future": entry_with(measured_at=1e15),
    "true for a uid": entry_with(uid=True),
    "a path for a graph": entry_with(graph="../../../etc/passwd"),
    "escape codes in the host": entry_with(host="\x1b[31m"),
    "no decision": entry_with(decision=None),
    "version 2 of the messages": decision_with(deployment="TREES", reason="it is fastest"),
    "version 9 of the messages": decision_with(deployment={"name": "GRAPH", "streams": 4}),
    "unknown deployment": decision_with(deployment="__import__('os')"),
    "text for a reason": decision_with(reason="fast"),
    "policy that is none": decision_with(policy=-1),
    "final by text": decision_with(final="yes"),
    # other ends of a request
    "moved": http(b"", b"Location: http://example.org/\r\n", b"301 Moved Permanently"),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "partial": http(json.dumps(SOUND).encode(), status=b"206 Partial Content"),
    "switching": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n",
    "teapot": http(json.dumps(SOUND).encode(), status=b"418 I'm a teapot"),
    "overloaded": http(b'{"error": "\x1b[2J"}', status=b"503 \x1b[2J"),
}


def serving(path: Path, answer: bytes) -> Answering:
    """Return a server that gives the same answer to each request."""
    return Answering(path, lambda _: answer)


def test_these_are_more_than_twenty_two() -> None:
    assert len(HOSTILE) >= 22
    assert len(set(HOSTILE.values())) == len(HOSTILE)


def test_what_the_hostile_ones_are_made_of_is_sound() -> None:
    body = json.dumps(SOUND).encode()
    assert {entry.graph for entry in decode(LookupAnswer, body).entries} == {GRAPH}
    assert decode(RecordAnswer, body).stored == 1
    assert decode(LeaseAnswer, body).granted == (GRAPH,)


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_server_is_not_believed(places: Locations, kind: str) -> None:
    report = Report()
    cache = Cache(places, "host", report)
    with serving(places.socket, HOSTILE[kind]) as server:
        assert cache.lookup(ENVIRONMENT, [GRAPH, "b" * 64]) == {}
        assert cache.lease(ENVIRONMENT, [GRAPH]) is None
        cache.record(ENVIRONMENT, [RECORD])
        known = cache.lookup(ENVIRONMENT, [GRAPH])

        assert len(server.requests) == MAX_DAEMON_FAILURES
    assert list(known) == [GRAPH]  # what it has found out itself
    assert all(reason.isprintable() for reason in report.failures)
    assert sum(report.failures.values()) == MAX_DAEMON_FAILURES
    assert (report.counts["recorded"], report.counts["spooled"]) == (0, 1)
    (file,) = places.spool.iterdir()
    assert decode(RecordRequest, file.read_bytes()).records == (RECORD,)


def test_a_server_that_answers_for_another_environment_is_not_believed(places: Locations) -> None:
    cache = Cache(places, "host", report := Report())
    with serving(places.socket, all_with(environment="d" * 64)):
        assert cache.lookup(ENVIRONMENT, [GRAPH]) == {}
        assert cache.lease(ENVIRONMENT, [GRAPH]) is None
        cache.record(ENVIRONMENT, [RECORD])
    assert report.failures == {"daemon: answered for another environment": MAX_DAEMON_FAILURES}
    assert (report.counts["recorded"], report.counts["spooled"]) == (0, 1)


def test_a_server_that_refuses_renewals_is_not_asked_for_ever(places: Locations) -> None:
    now, sound = [0.0], [told(SOUND)] * 2  # for the lease and the lookup
    with Answering(places.socket, lambda _: sound.pop() if sound else HOSTILE["empty"]) as server:
        leases = Leases(Cache(places, "host", report := Report()), lambda _entry: False, lambda: now[0])
        leases.add(pending := PendingGraph(RECORD.graph, ENVIRONMENT))
        leases.acquire(pending)
        for _ in range(10):
            now[0] += 3600.0
            leases.renew(pending)

        assert len(server.requests) == 2 + MAX_DAEMON_FAILURES
    assert sum(report.failures.values()) == MAX_DAEMON_FAILURES
