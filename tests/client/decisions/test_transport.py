"""The transport answers or raises its one error, within its deadline, whatever sits at the other end."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pygraphd.client.decisions.transport import (
    CONNECT_S,
    MAX_ANSWER_BYTES,
    TOTAL_S,
    Transport,
    TransportError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG_S = 60.0
"""A deadline that does not run out, so that whoever waits for it hangs."""
SHORT_S = 0.1
"""One that does, while the peer has not done all that it will."""
NOT_IN_TIME = "no answer in time"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@contextmanager
def server(
    path: Path, serve: Callable[[socket.socket], None], total_s: float = LONG_S
) -> Iterator[Transport]:
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
        yield Transport(path, LONG_S, total_s)
        thread.join(LONG_S)
    path.unlink()


def silent(connection: socket.socket) -> None:
    connection.recv(1)  # until nobody listens any more


def drip(connection: socket.socket) -> None:
    while True:  # until then
        connection.sendall(b"H")
        time.sleep(0.02)


def all_but_one_byte(connection: socket.socket) -> None:
    connection.sendall(OK[:-1])
    silent(connection)


def test_a_good_answer(tmp_path: Path) -> None:
    with server(tmp_path / "s", lambda c: c.sendall(OK)) as transport:
        assert transport.request("POST", "/v2/lookup", b"{}") == b"{}"


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (lambda c: c.sendall(b"garbage\r\n\r\n"), "not HTTP"),
        (lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}"), "not HTTP"),
        (lambda c: c.sendall(b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}"), "status 500"),
        (lambda c: None, "not HTTP"),
        (silent, NOT_IN_TIME),
        (drip, NOT_IN_TIME),
        (lambda c: c.sendall(b"x" * (MAX_ANSWER_BYTES + 1)), "answer too large"),
        (lambda c: c.shutdown(socket.SHUT_RDWR), "not HTTP"),
        (lambda c: c.shutdown(socket.SHUT_RD), "not HTTP"),
        (all_but_one_byte, NOT_IN_TIME),
    ],
    ids=[
        "garbage",
        "short",
        "status",
        "closed",
        "silent",
        "slow",
        "huge",
        "shut",
        "half closed",
        "one byte short",
    ],
)
def test_a_bad_answer_is_one_error_within_the_deadline(
    tmp_path: Path, serve: Callable[[socket.socket], None], reason: str
) -> None:
    total_s = SHORT_S if reason == NOT_IN_TIME else LONG_S
    with (
        server(tmp_path / "s", serve, total_s) as transport,
        pytest.raises(TransportError, match=reason) as caught,
    ):
        transport.request("POST", "/v2/lookup", b"{}")

    assert not caught.value.absent


def test_a_program_waits_for_a_quarter_of_a_second() -> None:
    """And a twentieth for a connection; where the tests' clients wait longer, that is said."""
    assert (CONNECT_S, TOTAL_S) == (0.05, 0.25)
    assert Transport.__init__.__defaults__ == (CONNECT_S, TOTAL_S)


LENGTHS = (b"-1", b"9" * 30, b"0x2", b"2, 2", b"", b"+2", b"2_0", b"\xb2", b"1e9", b"3", b"1", b"nan")
CHUNKS = (
    b"f" * 15,
    b"f" * 16,
    b"f" * 40,
    b"-2",
    b"0x2",
    b"",
    b"2;" + b"x" * 70_000,
    b"zz",
    b"7fffffffffffffff",
)
HOSTILE = (
    *(b"HTTP/1.1 200 OK\r\nContent-Length: %s\r\n\r\n{}" % each for each in LENGTHS),
    *(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%s\r\n{}\r\n0\r\n\r\n" % each
        for each in CHUNKS
    ),
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 600_000,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 160_000,
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 600_000,
    b"HTTP/1.1 200 OK\r\nA: " + b"b" * 4_000_000,
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 99999999999999999999 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 -200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/9.9 200 OK\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1\r\n\r\n",
    b"\r\n" * 2_000_000,
    b"\x00" * 1_000_000,
    b"\x16\x03\x01" + bytes(range(256)),
)


@pytest.mark.parametrize("answer", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_answer_is_one_error(tmp_path: Path, answer: bytes) -> None:
    with (
        server(tmp_path / "s", lambda c: c.sendall(answer)) as transport,
        pytest.raises(TransportError, match=r"not HTTP|status|answer too large"),
    ):
        transport.request("POST", "/v1/lookup", b"{}")


def test_a_peer_that_hangs_up_while_it_is_asked_ends_no_program(tmp_path: Path) -> None:
    """Nor does SIGPIPE, which a program may have taken as it comes."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        program = (
            "import signal, sys; signal.signal(signal.SIGPIPE, signal.SIG_DFL)\n"
            "from pathlib import Path; from pygraphd.client.decisions.transport import Transport, TransportError\n"
            "try: Transport(Path(sys.argv[1]), total_s=60).request('POST', '/', bytes(1 << 24))\n"
            "except TransportError as error: print(error)"
        )
        asking = subprocess.Popen([sys.executable, "-c", program, tmp_path / "s"], stdout=subprocess.PIPE)
        connection, _ = listener.accept()
        connection.recv(1000)
        connection.close()
        said, _ = asking.communicate(timeout=LONG_S)

    assert (asking.returncode, said[:18]) == (0, b"connection failed:")


@pytest.mark.parametrize("path", ["\0", "s\0s", "\udcff" * 60, "x" * 5000, "."], ids=range(5))
def test_a_path_that_is_none_is_the_same_error(path: str) -> None:
    with pytest.raises(TransportError):
        Transport(Path(path)).request("GET", "/v1/ping")


def test_nobody_there_is_not_waited_for_and_is_said(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="no daemon") as caught:
        Transport(tmp_path / "s", LONG_S, LONG_S).request("GET", "/v1/ping")

    assert caught.value.absent


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
        for _ in range(4):
            with pytest.raises(TransportError):
                Transport(tmp_path / "s", SHORT_S, SHORT_S).request("GET", "/v1/ping")


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
