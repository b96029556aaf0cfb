"""Requests that a client sends without waiting for answers: each gets its own, in order, also once the client has closed its half."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon.connections import Connections, Limits, Listener, Request, Service
from pygraphd.daemon.http import Response

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LONG = Limits(connections=3, idle_s=3600.0, request_s=3600.0)
HANGS_S = 300.0


def _post(body: bytes, *fields: bytes) -> bytes:
    lines = [b"POST /echo HTTP/1.1", b"Content-Length: %d" % len(body), *fields]
    return b"\r\n".join([*lines, b"", body])


def _echo(*, at_once: Callable[[Request], bool], times: int = 1) -> Service:
    """Return a service that answers with the body, `times` over: some requests at once, the others later."""

    async def later(request: Request) -> Response:
        await asyncio.sleep(0)
        return Response(request.body * times)

    return Service(
        lambda *_head: None,
        lambda request: Response(request.body * times) if at_once(request) else None,
        later,
        lambda: None,
    )


SERVICES = {
    "at once": _echo(at_once=lambda _: True),
    "later": _echo(at_once=lambda _: False),
    "both": _echo(at_once=lambda request: request.body[-1] % 2 == 0),
}


def _run(
    home: Path,
    service: Service,
    use: Callable[[socket.socket], list[tuple[int, bytes]]],
    limits: Limits = LONG,
) -> list[tuple[int, bytes]]:
    """Return what `use` does, on a thread, with a connection to a listener, which must have no connection left after it."""

    async def run() -> list[tuple[int, bytes]]:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(home / "x.sock"))
        listener = Listener(service, Connections(limits), 5.0)
        await listener.listen(bound)
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.settimeout(HANGS_S)
                client.connect(str(home / "x.sock"))
                answers = await asyncio.to_thread(use, client)
                async with asyncio.timeout(HANGS_S):
                    while listener.open:
                        await asyncio.sleep(0.01)
            return answers
        finally:
            await listener.close()

    return asyncio.run(run())


def _answers(client: socket.socket, most: int | None = None) -> list[tuple[int, bytes]]:
    """Return status and body of the answers up to the end of the connection, or of so many."""
    found: list[tuple[int, bytes]] = []
    with client.makefile("rb") as stream:
        while (most is None or len(found) < most) and (line := stream.readline()):
            length = 0
            while (field := stream.readline()) != b"\r\n":
                name, _, value = field.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            found.append((int(line.split()[1]), stream.read(length)))
    return found


def _half_closed(*parts: bytes) -> Callable[[socket.socket], list[tuple[int, bytes]]]:
    def use(client: socket.socket) -> list[tuple[int, bytes]]:
        def send() -> None:
            client.sendall(b"".join(parts))
            client.shutdown(socket.SHUT_WR)

        # On another thread: the daemon reads no further while its answers are not taken.
        sender = threading.Thread(target=send)
        sender.start()
        answers = _answers(client)
        sender.join()
        return answers

    return use


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("size", [1, 20_000, 100_000])
def test_all_requests_before_a_half_close_are_answered(tmp_path: Path, service: str, size: int) -> None:
    """Of any size: some come in one piece, others only when those before have been served."""
    bodies = [b"x" * size + b"%d" % number for number in range(9)]
    answers = _run(tmp_path, SERVICES[service], _half_closed(*map(_post, bodies)))
    assert answers == [(200, body) for body in bodies]


@pytest.mark.parametrize("service", SERVICES)
@pytest.mark.parametrize("rest", [b"POST /echo HT", _post(b"12345")[:-1], _post(b"12345")[:-5]])
def test_a_request_that_is_cut_off_is_refused_after_the_others(
    tmp_path: Path, service: str, rest: bytes
) -> None:
    *answers, last = _run(tmp_path, SERVICES[service], _half_closed(_post(b"1"), _post(b"2"), rest))
    assert answers == [(200, b"1"), (200, b"2")]
    assert last == (400, b'{"error": "the request ended early"}')


@pytest.mark.parametrize("service", SERVICES)
def test_nothing_is_served_after_a_request_that_is_the_last(tmp_path: Path, service: str) -> None:
    parts = (_post(b"1"), _post(b"2", b"Connection: close"), _post(b"3"))
    assert _run(tmp_path, SERVICES[service], _half_closed(*parts)) == [(200, b"1"), (200, b"2")]


def test_answers_that_are_taken_late_are_all_there(tmp_path: Path) -> None:
    """The next request is served once the answer before it has been taken, for which the client has some time."""
    service = _echo(at_once=lambda _: True, times=2**20)
    answers = _run(tmp_path, service, _half_closed(*(_post(b"%d" % number) for number in range(4))))
    assert answers == [(200, b"%d" % number * 2**20) for number in range(4)]


def test_who_takes_no_answer_after_a_half_close_is_not_waited_for(tmp_path: Path) -> None:
    service = _echo(at_once=lambda _: True, times=2**20)

    def use(client: socket.socket) -> list[tuple[int, bytes]]:
        client.sendall(_post(b"1") * 4)
        client.shutdown(socket.SHUT_WR)
        return []

    _run(
        tmp_path, service, use, Limits(request_s=0.1, idle_s=3600.0)
    )  # which ends when no connection is left


@pytest.mark.parametrize("service", SERVICES)
def test_a_connection_goes_on_after_many_requests(tmp_path: Path, service: str) -> None:
    """Reading stops while many wait, and must not stop for good when the last of them has been served."""
    bodies = [b"x" * 9_000 + b"%d" % number for number in range(9)]

    def use(client: socket.socket) -> list[tuple[int, bytes]]:
        client.sendall(b"".join(map(_post, bodies)))
        answers = _answers(client, len(bodies))
        client.sendall(_post(b"last", b"Connection: close"))
        return answers + _answers(client)

    expected = [(200, body) for body in (*bodies, b"last")]
    assert _run(tmp_path, SERVICES[service], use) == expected


def test_a_half_close_while_a_request_is_served_drops_none_behind_it(tmp_path: Path) -> None:
    begun, closed = asyncio.Event(), asyncio.Event()

    async def wait(request: Request) -> Response:
        begun.set()
        await closed.wait()
        return Response(request.body)

    async def run() -> list[tuple[int, bytes]]:
        bound = socket.socket(socket.AF_UNIX)
        bound.bind(str(tmp_path / "x.sock"))
        service = Service(lambda *_head: None, lambda _: None, wait, lambda: None)
        listener = Listener(service, Connections(LONG), 5.0)
        await listener.listen(bound)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(HANGS_S)
            await asyncio.to_thread(client.connect, str(tmp_path / "x.sock"))
            client.sendall(_post(b"1") + _post(b"2"))
            await begun.wait()
            client.sendall(_post(b"3"))
            client.shutdown(socket.SHUT_WR)
            (connection,) = listener.open
            while not connection._has_ended:
                await asyncio.sleep(0)
            closed.set()
            answers = await asyncio.to_thread(_answers, client)
        await listener.close()
        return answers

    assert asyncio.run(run()) == [(200, b"1"), (200, b"2"), (200, b"3")]
