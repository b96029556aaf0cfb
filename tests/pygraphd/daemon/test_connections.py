"""The daemon's handlers on a real socket, with small limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import time
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from pygraphd.config import load_config
from pygraphd.daemon import connections
from pygraphd.daemon.cache import Cache
from pygraphd.daemon.connections import (
    Connections,
    Limits,
    Listener,
    Request,
    Service,
)
from pygraphd.daemon.http import Response
from pygraphd.daemon.leases import Leases
from pygraphd.daemon.server import Server
from pygraphd.daemon.serving import limits_of_process
from pygraphd.daemon.store import Store
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import RecordRequest, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

T = TypeVar("T")
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
PING = b"GET /v1/ping HTTP/1.1\r\nHost: x\r\n\r\n"
LONG = Limits(connections=3, idle_s=3600.0, request_s=3600.0)


def _serving(
    home: Path, limits: Limits, use: Callable[[Callable[[], Awaitable[Streams]]], Awaitable[T]]
) -> T:
    """Run `use` with a maker of connections to a server on a socket in `home`."""

    async def run() -> T:
        locations = locate({"PYGRAPHD_HOME": str(home)})
        cache = Cache(locations, Store(locations.database), Leases(60.0))
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(locations.socket))
        listener = Server(cache, load_config({}, {}), limits).listener()
        await listener.listen(bound)
        opened: list[Streams] = []

        async def connect() -> Streams:
            opened.append(await asyncio.open_unix_connection(str(locations.socket)))
            return opened[-1]

        try:
            return await use(connect)
        finally:
            for _, writer in opened:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            await listener.close()
            await cache.close()

    return asyncio.run(run())


async def _asked(streams: Streams, request: bytes) -> tuple[int, Any]:
    """Return status and JSON of the answer to one request."""
    reader, writer = streams
    writer.write(request)
    return await _answer(reader)


async def _answer(reader: asyncio.StreamReader) -> tuple[int, Any]:
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ") for line in head.split(b"\r\n")[1:] if line)
    assert fields[b"content-type"] == b"application/json"
    return int(head.split()[1]), json.loads(await reader.readexactly(int(fields[b"content-length"])))


def test_idle_connections_make_room_for_new_ones(tmp_path: Path) -> None:
    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        idle = [await connect() for _ in range(3)]
        assert (await _asked(idle[0], PING))[0] == 200  # so it is not the one that has been idle longest
        others = [await connect() for _ in range(2)]
        assert [(await _asked(each, PING))[0] for each in others] == [200, 200]
        assert await idle[1][0].read() == b""
        assert await idle[2][0].read() == b""
        assert (await _asked(idle[0], PING))[0] == 200

    _serving(tmp_path, LONG, use)


def test_connections_in_use_are_not_ended_for_new_ones(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = b'{"older_than_s": 1}'
    head = b"POST /v1/prune HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        busy = [await connect() for _ in range(3)]
        for each in busy:
            # The answer shows that the first request is done; the second has begun by then.
            each[1].write(PING + head)
            assert (await _answer(each[0]))[0] == 200
        for _ in range(3):
            status, refused = await _asked(await connect(), b"POST /v1/prune HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (status, refused) == (503, {"error": "too many connections of this user"})
        # One line, or who connects often pushes all else out of the log.
        assert caplog.text.count("no more are served") == 1
        assert [(await _asked(each, body))[0] for each in busy] == [200] * 3

    _serving(tmp_path, LONG, use)


def test_pings_are_answered_beyond_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `status` and `stop` would have a daemon that is busy killed."""
    monkeypatch.setattr(connections, "_RESERVE", 2)

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        for each in [await connect() for _ in range(3)]:
            each[1].write(PING + b"POST /v3/record HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx")
            assert (await _answer(each[0]))[0] == 200
        for _ in range(3):
            ping = await connect()
            assert (await _asked(ping, PING))[0] == 200
            assert await ping[0].read() == b""
            assert (await _asked(await connect(), PING.replace(b"ping", b"stats")))[0] == 200
        silent = [await connect() for _ in range(2)]
        assert (await _answer((await connect())[0]))[0] == 503  # at once, as the reserve is taken, too
        assert [await each[0].read() for each in silent] == [b"", b""]
        assert (await _asked(await connect(), PING))[0] == 200

    _serving(tmp_path, LONG, use)


def test_an_idle_connection_ends(tmp_path: Path) -> None:
    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        silent, slow = await connect(), await connect()
        slow[1].write(PING[:20])
        assert await silent[0].read() == b""
        assert await slow[0].read() == b""

    _serving(tmp_path, Limits(idle_s=0.1), use)


def test_a_body_that_does_not_come_ends_the_request(tmp_path: Path) -> None:
    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        status, answer = await _asked(
            await connect(), b"POST /v3/record HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nx"
        )
        assert (status, answer["error"]) == (408, "the body did not come within 0.1 s")

    _serving(tmp_path, Limits(request_s=0.1), use)


@pytest.mark.parametrize(
    ("request_", "status", "text"),
    [
        (PING, 200, ""),
        (b"POST /v1/prune HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", 400, "give older_than_s"),
        (b"POST /v1/prune HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{", 400, "ended early"),
        (b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{", 404, "Not Found"),
    ],
)
def test_half_closed_requests_get_their_answer(
    tmp_path: Path, request_: bytes, status: int, text: str
) -> None:
    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(request_)
        writer.write_eof()
        answered, answer = await _answer(reader)
        assert answered == status
        assert text in answer.get("error", "")
        assert await reader.read() == b""  # nobody waits for another request

    _serving(tmp_path, LONG, use)


def test_a_half_close_while_the_body_is_awaited_ends_the_request(tmp_path: Path) -> None:
    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(PING + b"POST /v1/prune HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{")
        assert (await _answer(reader))[0] == 200
        await _asked(await connect(), PING)
        writer.write_eof()
        assert await _answer(reader) == (400, {"error": "the request ended early"})

    _serving(tmp_path, LONG, use)


def test_a_request_whose_client_is_gone_is_not_served(
    tmp_path: Path, make_request: Callable[..., RecordRequest]
) -> None:
    body = encode(make_request("a"))
    request = b"POST /v3/record HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        with socket.socket(socket.AF_UNIX) as impatient:
            impatient.connect(str(tmp_path / "pygraphd.sock"))
            impatient.sendall(request)
        assert (await _asked(await connect(), PING.replace(b"ping", b"stats")))[1]["records"] == 0
        assert (await _asked(await connect(), request))[0] == 200

    _serving(tmp_path, LONG, use)


@pytest.mark.parametrize("garbage", [b"\x00" * 100, b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\xff: \r\n\r\n"])
def test_malformed_requests_are_answered_like_others(tmp_path: Path, garbage: bytes) -> None:
    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        status, answer = await _asked(await connect(), garbage)
        assert (status, set(answer)) == (400, {"error"})
        assert answer["error"]
        stats = await _asked(await connect(), PING.replace(b"ping", b"stats"))
        assert stats[1]["invalid"] == 1

    _serving(tmp_path, LONG, use)


@pytest.mark.parametrize(
    ("field", "status"), [(b"Content-Encoding: gzip", 415), (b"Transfer-Encoding: chunked", 411)]
)
def test_a_body_in_another_form_is_refused(tmp_path: Path, field: bytes, status: int) -> None:
    head = b"POST /v1/prune HTTP/1.1\r\nHost: x\r\n%s\r\nContent-Length: 19\r\n\r\n" % field

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        answered, answer = await _asked(await connect(), head + b'{"older_than_s": 1}')
        assert answered == status
        assert "send the body as it is" in answer["error"]

    _serving(tmp_path, LONG, use)


def test_a_client_that_waits_to_be_told_sends_its_body(tmp_path: Path) -> None:
    head = b"POST /v1/prune HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 19\r\n\r\n"

    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        reader, writer = await connect()
        writer.write(head)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert (await _asked((reader, writer), b'{"older_than_s": 1}'))[0] == 200

    _serving(tmp_path, LONG, use)


def test_who_takes_no_answers_is_served_no_further(tmp_path: Path) -> None:
    async def use(connect: Callable[[], Awaitable[Streams]]) -> None:
        with socket.socket(socket.AF_UNIX) as greedy:
            greedy.connect(str(tmp_path / "pygraphd.sock"))
            greedy.settimeout(1.0)
            with pytest.raises(TimeoutError):
                await asyncio.to_thread(greedy.sendall, PING * 100_000)
        assert (await _asked(await connect(), PING))[0] == 200

    _serving(tmp_path, LONG, use)


def _asked_of(service: Service, home: Path, use: Callable[[socket.socket], T]) -> T:
    """Run `use` on a thread with a connection to a listener for `service`."""

    async def run() -> T:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(home / "x.sock"))
        listener = Listener(service, Connections(LONG), 5.0)
        await listener.listen(bound)
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(60.0)
                return await asyncio.to_thread(use, client)
        finally:
            await listener.close()

    return asyncio.run(run())


def _service(body: bytes) -> Service:
    async def never(_request: Request) -> Response:
        raise AssertionError("all are answered at once")

    return Service(lambda *_head: None, lambda _request: Response(body), never, lambda: None)


def _exchange(client: socket.socket) -> bytes:
    client.sendall(b"GET / HTTP/1.1\r\nConnection: close\r\n\r\n")
    return b"".join(iter(lambda: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")[2]


def test_an_answer_that_a_socket_does_not_take_at_once_arrives_whole(tmp_path: Path) -> None:
    body = b"x" * 2**21

    def use(client: socket.socket) -> bytes:
        client.connect(str(tmp_path / "x.sock"))
        return _exchange(client)

    assert _asked_of(_service(body), tmp_path, use) == body


def test_without_a_descriptor_a_connection_waits_for_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def use(client: socket.socket) -> bytes:
        resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno(), hard))
        try:
            client.connect(str(tmp_path / "x.sock"))
            while not caplog.records:
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return _exchange(client)

    assert _asked_of(_service(b"late"), tmp_path, use) == b"late"
    assert "no connection can be accepted for now" in caplog.text


def test_the_limit_fits_into_the_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert limits_of_process().connections * 2 < resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
