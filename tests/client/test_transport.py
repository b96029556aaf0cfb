"""The transport answers or raises its one error, within its deadline, whatever sits at the other end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraphd.client.transport import MAX_ANSWER_BYTES, Transport, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def server(path: Path, serve: Callable[[socket.socket], None]) -> Iterator[Transport]:
    """Serve one connection on a real socket; what goes wrong in there is the peer's business."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def run() -> None:
            connection, _ = listener.accept()
            with connection:
                try:
                    connection.recv(65536)
                    serve(connection)
                except OSError:
                    pass

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield Transport(path)
        thread.join(timeout=10)
    path.unlink()


def drip(connection: socket.socket) -> None:
    for _ in range(100):
        connection.sendall(b"H")
        time.sleep(0.02)


def test_a_good_answer(tmp_path: Path) -> None:
    with server(tmp_path / "s", lambda c: c.sendall(OK)) as transport:
        assert transport.request("POST", "/v2/lookup", b"{}") == b"{}"


def test_a_chunked_answer(tmp_path: Path) -> None:
    data = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    with server(tmp_path / "s", lambda c: c.sendall(data)) as transport:
        assert transport.request("GET", "/v1/ping") == b"{}"


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (lambda c: c.sendall(b"garbage\r\n\r\n"), "not HTTP"),
        (lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}"), "not HTTP"),
        (lambda c: c.sendall(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}"), "status 500"),
        (lambda c: None, "not HTTP"),
        (lambda c: time.sleep(0.6), "no answer in time"),
        (drip, "no answer in time"),
        (lambda c: c.sendall(b"x" * (MAX_ANSWER_BYTES + 1)), "answer too large|no answer in time"),
    ],
    ids=["garbage", "short", "status", "closed", "silent", "slow", "huge"],
)
def test_a_bad_answer_is_one_error_within_the_deadline(
    tmp_path: Path, serve: Callable[[socket.socket], None], reason: str
) -> None:
    with server(tmp_path / "s", serve) as transport:
        began = time.monotonic()
        with pytest.raises(TransportError, match=reason) as caught:
            transport.request("POST", "/v2/lookup", b"{}")

        assert time.monotonic() - began < 0.5
        assert not caught.value.absent


def test_nobody_there_costs_nothing_and_says_so(tmp_path: Path) -> None:
    took = []
    for _ in range(5):
        began = time.monotonic()
        with pytest.raises(TransportError, match="no daemon") as caught:
            Transport(tmp_path / "s").request("GET", "/v1/ping")
        took.append(time.monotonic() - began)
        assert caught.value.absent

    assert min(took) < 0.05  # any one may be interrupted by other work of the machine


def test_a_stale_socket_is_nobody(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))

    with pytest.raises(TransportError, match="no daemon"):
        Transport(tmp_path / "s").request("GET", "/v1/ping")


def test_a_full_backlog_is_an_error_in_time(tmp_path: Path) -> None:
    """What a stopped daemon looks like in the end: connections are taken until the kernel's queue is full."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen(0)
        began = time.monotonic()
        for _ in range(4):
            with pytest.raises(TransportError):
                Transport(tmp_path / "s", total_s=0.1).request("GET", "/v1/ping")

        assert time.monotonic() - began < 1


def test_a_path_too_long_for_a_socket_is_an_error() -> None:
    with pytest.raises(TransportError):
        Transport(Path("/tmp") / ("x" * 200)).request("GET", "/v1/ping")


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_are_an_error_or_a_body(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("t") / "s"
    answer = b"HTTP/1.1 200 OK\r\n" + data
    with server(path, lambda c: c.sendall(answer)) as transport, contextlib.suppress(TransportError):
        assert isinstance(transport.request("GET", "/"), bytes)
