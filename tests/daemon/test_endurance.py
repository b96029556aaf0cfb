"""What the daemon has withstood: kills in the midst of records, many starts at once, mutated requests, connections without number."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import http.client
import json
import os
import random
import resource
import signal
import socket
import sqlite3
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pygraphd.daemon import connections, control
from pygraphd.schema import ownership
from pygraphd.schema.messages import (
    IMPORT_PATH,
    LEASE_PATH,
    LOOKUP_PATH,
    RECORD_PATH,
    REDERIVE_PATH,
    LeaseRequest,
    LookupRequest,
    RecordRequest,
    encode,
)
from pygraphd.schema.portable import ImportRequest, Portable
from tests.support.daemon_home import HANGS_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.daemon_home import Home

pytestmark = [pytest.mark.daemon, pytest.mark.slow]

KILLS = 8
SIZES = (1, 10, 25, 50)
"""Records in each message of a client; there is one client for each size."""
RECORDS = 6_093
STARTS = 50
REQUESTS = 1_000
CONNECTIONS = connections.Limits().connections
EXCESS = 200


class _Writer(threading.Thread):
    """Records some graphs a message while it may; `acknowledged` has the names of those that the daemon has stored."""

    def __init__(
        self, home: Home, make_request: Callable[..., RecordRequest], prefix: str, size: int
    ) -> None:
        super().__init__()
        self._home = home
        self._make_request = make_request
        self._prefix = prefix
        self._size = size
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.acknowledged: list[str] = []

    def run(self) -> None:
        number = 0
        while self.may_go_on.is_set():
            names = [f"{self._prefix}.{number + index}" for index in range(self._size)]
            number += self._size
            try:
                status, answer = self._home.ask("POST", RECORD_PATH, encode(self._make_request(*names)))
            except (OSError, http.client.HTTPException, ValueError):
                continue  # no daemon at this moment, or one that was killed: nothing was promised
            if (status, answer.get("stored")) == (200, self._size):
                self.acknowledged += names


def _have_stored(writers: list[_Writer], enough: int) -> bool:
    return sum(len(writer.acknowledged) for writer in writers) > enough


def test_no_acknowledged_record_is_lost_when_the_daemon_is_killed(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    acknowledged: set[str] = set()
    for round_ in range(KILLS):
        pid = home.start()
        writers = [_Writer(home, make_request, f"{round_}.{size}", size) for size in SIZES]
        for writer in writers:
            writer.start()
        enough = (2 * round_ + 1) * RECORDS // KILLS**2  # so that the kill comes at different moments
        home.wait_until(functools.partial(_have_stored, writers, enough))
        os.kill(pid, signal.SIGKILL)
        home.processes[-1].wait()
        for writer in writers:
            writer.may_go_on.clear()
            writer.join()
            acknowledged.update(writer.acknowledged)
    assert len(acknowledged) >= RECORDS
    home.start()
    names = sorted(acknowledged)
    for first in range(0, len(names), 500):
        request = make_request(*names[first : first + 500])
        graphs = tuple(record.graph.digest for record in request.records)
        body = encode(LookupRequest(request.environment.digest(), graphs))
        _, answer = home.ask("POST", LOOKUP_PATH, body)
        assert {entry["graph"] for entry in answer["entries"]} == set(graphs)
    assert home.status()["problems"] == []


def test_of_fifty_starts_one_becomes_the_daemon(home: Home) -> None:
    processes = [home.spawn() for _ in range(STARTS)]
    home.wait_until(lambda: sum(process.poll() is None for process in processes) == 1)
    (alive,) = [process for process in processes if process.poll() is None]
    assert home.status()["pid"] == alive.pid
    ended = [process for process in processes if process is not alive]
    assert [process.communicate() for process in ended] == [(b"", b"")] * (STARTS - 1)
    assert {process.returncode for process in ended} == {0}


def test_mutated_requests_are_answered_or_hung_up_on(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    home.start()
    whole = [
        b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        % (path.encode(), len(body), body)
        for path, body in _bodies(make_request("a")).items()
    ]
    numbers = random.Random(7)
    for _ in range(REQUESTS):
        answer = _answer(home, _mutated(numbers, numbers.choice(whole)))
        if answer:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.split()[1] != b"500"
            json.loads(body)
    _assert_sound(home, make_request("a"))


def test_messages_with_values_of_other_kinds_are_answered(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    """Sound requests on connections that are kept, so that each gets as far as its message lets it."""
    home.start()
    bodies = [(path, json.loads(body)) for path, body in _bodies(make_request("a", "b")).items()]
    numbers = random.Random(7)
    statuses: collections.Counter[int] = collections.Counter()
    connection = _keeping(home)
    for _ in range(REQUESTS):
        path, value = numbers.choice(bodies)
        connection.request("POST", path, json.dumps(_twisted(numbers, value)))
        response = connection.getresponse()
        answer = json.loads(response.read())
        statuses[response.status] += 1
        assert response.status in {200, 400}, answer
        if response.will_close:
            connection.close()
            connection = _keeping(home)
    connection.close()
    assert statuses[200] + statuses[400] == REQUESTS
    assert min(statuses.values()) > REQUESTS // 20  # some are taken, some are refused
    _assert_sound(home, make_request("c"))


def _bodies(request: RecordRequest) -> dict[str, bytes]:
    """Return a sound body for each path that takes one."""
    environment = request.environment.digest()
    graphs = tuple(record.graph.digest for record in request.records)
    entries = tuple(
        Portable(request.environment, request.origin, record, measured_at=1e9) for record in request.records
    )
    return {
        RECORD_PATH: encode(request),
        LOOKUP_PATH: encode(LookupRequest(environment, graphs)),
        LEASE_PATH: encode(LeaseRequest(environment, "me", graphs)),
        IMPORT_PATH: json.dumps(ImportRequest(entries).as_json()).encode(),
        REDERIVE_PATH: b'{"dry_run": true}',
        "/v1/prune": b'{"gpu": "none", "dry_run": true}',
    }


def _assert_sound(home: Home, request: RecordRequest) -> None:
    """Assert that the daemon lives, serves, has met no fault of its own, and that its database is whole."""
    assert home.processes[0].poll() is None
    assert b"Traceback" not in b"".join(file.read_bytes() for file in home.path.glob("pygraphd.log*"))
    bodies = _bodies(request)
    assert home.ask("POST", RECORD_PATH, bodies[RECORD_PATH])[0] == 200
    assert home.ask("POST", LOOKUP_PATH, bodies[LOOKUP_PATH])[1]["entries"]
    assert home.status()["problems"] == []
    with contextlib.closing(sqlite3.connect(home.locations.database)) as connection:
        assert connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]


def _keeping(home: Home) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("pygraphd")
    connection.sock = ownership.connect(home.locations.socket, HANGS_S)
    return connection


OTHERS: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**63, 10**4000, 0.5, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", "x", "\x00", "\x1b[2J", "\ud800", "\U0001f600" * 300, "0" * 64, "GRAPH", "a" * 100_000),
    *([], {}, [[]], [None] * 2000, json.loads("[" * 500 + "]" * 500)),
)


def _twisted(numbers: random.Random, value: Any) -> Any:
    """Return a JSON value in which one part, anywhere, has become something else, twice, or nothing."""
    if isinstance(value, dict | list) and value and numbers.random() < 0.9:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = numbers.choice(keys)
        twisted: Any = copy.copy(value)
        match numbers.randrange(8):
            case 0:
                del twisted[key]
            case 1 if isinstance(twisted, list):
                twisted.append(twisted[key])
            case 1:
                twisted[f"{key}x"] = twisted[key]
            case _:
                twisted[key] = _twisted(numbers, twisted[key])
        return twisted
    return numbers.choice(OTHERS)


def _mutated(numbers: random.Random, request: bytes) -> bytes:
    data = bytearray(request)
    for _ in range(numbers.randint(1, 6)):
        place = numbers.randrange(len(data))
        match numbers.randrange(3):
            case 0:
                data[place] = numbers.randrange(256)
            case 1:
                del data[place : place + numbers.randint(1, 9)]
            case _:
                data[place:place] = numbers.randbytes(numbers.randint(1, 9))
    return bytes(data)


def _answer(home: Home, data: bytes) -> bytes:
    with ownership.connect(home.locations.socket, HANGS_S) as connection:
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)  # else a request that has become longer would be waited for
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except ConnectionError:
            return b""


def test_more_idle_connections_than_the_limit_harm_nobody(
    home: Home, make_request: Callable[..., RecordRequest], descriptors: None
) -> None:
    pid = home.start()
    bodies = _bodies(make_request("a"))
    assert home.ask("POST", RECORD_PATH, bodies[RECORD_PATH])[0] == 200
    with contextlib.ExitStack() as stack:
        idle: list[socket.socket] = []
        while len(idle) < CONNECTIONS + EXCESS:
            try:
                idle.append(stack.enter_context(ownership.connect(home.locations.socket, HANGS_S)))
            except BlockingIOError:  # the kernel's queue is full: the daemon has not taken the last 512 yet
                home.wait_until(lambda: control.ping(home.locations.socket) is not None)
        home.wait_until(lambda: control.ping(home.locations.socket) is not None)
        # Each has come after all of them, so they have been dealt with.
        answers = [home.ask("POST", LOOKUP_PATH, bodies[LOOKUP_PATH]) for _ in range(20)]
        assert [(status, len(answer["entries"])) for status, answer in answers] == [(200, 1)] * 20
        held = list(Path(f"/proc/{pid}/fd").iterdir())
        assert len(held) < CONNECTIONS + EXCESS
        assert [each.recv(1) for each in idle[:EXCESS]] == [b""] * EXCESS  # those that were idle longest
        assert home.status()["problems"] == []
    _assert_sound(home, make_request("b"))


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Allow this process, and the daemon that it starts, as many open files as the test opens."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096  # as many as the daemon asks for
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(
            f"no process may open more than {hard} files here, and the daemon serves fewer connections"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
