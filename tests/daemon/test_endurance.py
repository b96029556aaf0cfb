"""What the daemon has withstood: kills in the midst of records, many starts at once, mutated requests."""

from __future__ import annotations

import functools
import http.client
import json
import os
import random
import signal
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from pygraphd.schema import ownership
from pygraphd.schema.messages import LookupRequest, RecordRequest, encode
from tests.support.daemon_home import HANGS_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.daemon_home import Home

pytestmark = [pytest.mark.daemon, pytest.mark.slow]

KILLS = 8
WRITERS = 4
STARTS = 50
REQUESTS = 300


class _Writer(threading.Thread):
    """Records one graph after another while it may; `acknowledged` has the names of those that the daemon has stored."""

    def __init__(self, home: Home, make_request: Callable[..., RecordRequest], prefix: str) -> None:
        super().__init__()
        self._home = home
        self._make_request = make_request
        self._prefix = prefix
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.acknowledged: list[str] = []

    def run(self) -> None:
        number = 0
        while self.may_go_on.is_set():
            name, number = f"{self._prefix}.{number}", number + 1
            try:
                status, answer = self._home.ask("POST", "/v3/record", encode(self._make_request(name)))
            except (OSError, http.client.HTTPException, ValueError):
                continue  # no daemon at this moment, or one that was killed: nothing was promised
            if (status, answer.get("stored")) == (200, 1):
                self.acknowledged.append(name)


def _have_stored(writers: list[_Writer], enough: int) -> bool:
    return sum(len(writer.acknowledged) for writer in writers) > enough


def test_no_acknowledged_record_is_lost_when_the_daemon_is_killed(
    home: Home, make_request: Callable[..., RecordRequest]
) -> None:
    acknowledged: set[str] = set()
    for round_ in range(KILLS):
        pid = home.start()
        writers = [_Writer(home, make_request, f"{round_}.{n}") for n in range(WRITERS)]
        for writer in writers:
            writer.start()
        enough = 5 + 10 * round_  # so that the kill comes at different moments
        home.wait_until(functools.partial(_have_stored, writers, enough))
        os.kill(pid, signal.SIGKILL)
        home.processes[-1].wait()
        for writer in writers:
            writer.may_go_on.clear()
            writer.join()
            acknowledged.update(writer.acknowledged)
    home.start()
    names = sorted(acknowledged)
    for first in range(0, len(names), 500):
        request = make_request(*names[first : first + 500])
        graphs = tuple(record.graph.digest for record in request.records)
        body = encode(LookupRequest(request.environment.digest(), graphs))
        _, answer = home.ask("POST", "/v3/lookup", body)
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
    request = make_request("a")
    record = encode(request)
    lookup = encode(LookupRequest(request.environment.digest(), (request.records[0].graph.digest,)))
    whole = [
        b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        % (path, len(body), body)
        for path, body in (
            (b"/v3/record", record),
            (b"/v3/lookup", lookup),
            (b"/v1/prune", b'{"gpu": "none"}'),
        )
    ]
    numbers = random.Random(7)
    for _ in range(REQUESTS):
        answer = _answer(home, _mutated(numbers, numbers.choice(whole)))
        if answer:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.split()[1] != b"500"
            json.loads(body)
    assert home.processes[0].poll() is None
    assert b"Traceback" not in home.locations.log.read_bytes()
    assert home.ask("POST", "/v3/record", record)[0] == 200
    assert home.ask("POST", "/v3/lookup", lookup)[1]["entries"]


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
