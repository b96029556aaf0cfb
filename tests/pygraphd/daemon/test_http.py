from __future__ import annotations

import pytest

from pygraphd.daemon.http import MAX_HEAD_BYTES, Head, RefusedError, check_beginning, parse_head


def test_a_head_is_read() -> None:
    head = b"POST /v3/lookup?x=1 HTTP/1.1\r\nHost: x\r\nCONTENT-length:  12 \r\nExpect: 100-Continue"
    assert parse_head(head) == Head("POST", "/v3/lookup", 12, keep_alive=True, expects=True)


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [("1.1", "Close", False), ("1.1", "x , close", False), ("1.0", "x", False), ("1.0", "Keep-Alive", True)],
)
def test_the_client_says_whether_its_connection_stays(
    version: str, connection: str, keep_alive: bool
) -> None:
    head = parse_head(f"GET / HTTP/{version}\r\nConnection: {connection}".encode())
    assert head.keep_alive is keep_alive


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/2.0", 400),
        (b"GET http://elsewhere/ HTTP/1.1", 400),
        (b"GET / HTTP/1.1\r\nno field", 400),
        (b"GET / HTTP/1.1\r\nName : x", 400),
        (b"GET / HTTP/1.1\r\nName: x\n continued", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: -1", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked", 411),
        (b"POST / HTTP/1.1\r\nContent-Encoding: gzip", 415),
    ],
)
def test_a_head_that_could_be_read_in_two_ways_is_refused(head: bytes, status: int) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_head(head)
    assert caught.value.status == status


def test_what_cannot_become_a_head_is_refused_at_once() -> None:
    for beginning in (b"", b"P", b"POST", b"GET /v1"):
        check_beginning(beginning)
    for beginning in (b"\0", b"get /", b"GET\r\n", b"GET " + b"x" * MAX_HEAD_BYTES):
        with pytest.raises(RefusedError):
            check_beginning(beginning)
