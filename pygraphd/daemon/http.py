"""HTTP/1.1 as far as the daemon needs it: heads of requests to values, and answers to bytes. Knows no connections.

A body has the length that its head gives. Transfer and content encodings are refused: no client of ours uses any.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from http import HTTPStatus

MAX_HEAD_BYTES = 16_384
END_OF_HEAD = b"\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
JSON = "application/json"

_REQUEST_LINE = re.compile(rb"([A-Z]{1,16}) (/[!-~]*) HTTP/1\.([01])")
_BEGINNING = re.compile(rb"[A-Z]{1,16}(?: .*)?", re.DOTALL)
# No space before the colon and no line that is continued: a head must not be readable in two ways.
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\0\r\n]*?)[ \t]*")
# `int` alone would also take a sign, underscores and spaces.
_LENGTH = re.compile(rb"[0-9]{1,18}")
_TOKENS = re.compile(rb"[ \t]*,[ \t]*")


class RefusedError(Exception):
    """A request that cannot be served, with the status of its answer."""

    def __init__(self, status: HTTPStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request. `keep_alive`: the client may send another one on its connection. `expects`: it waits for `CONTINUE`."""

    method: str
    path: str
    length: int
    keep_alive: bool
    expects: bool


@dataclass(frozen=True, slots=True)
class Response:
    """An answer."""

    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = JSON

    def encode(self, *, keep_alive: bool) -> bytes:
        """Return its bytes; without `keep_alive` it says that the connection ends."""
        head = _head(self.status, self.content_type, keep_alive)
        return b"%s%d\r\n\r\n%s" % (head, len(self.body), self.body)


def error(status: HTTPStatus, reason: str, cause: str = "") -> Response:
    """Return an answer that is no success; `cause` is a word for programs, as the same status may have several causes."""
    told = {"error": reason, "cause": cause} if cause else {"error": reason}
    return Response(json.dumps(told).encode(), status)


@functools.lru_cache(maxsize=64)
def _head(status: HTTPStatus, content_type: str, keep_alive: bool) -> bytes:
    end = "" if keep_alive else "Connection: close\r\n"
    line = f"HTTP/1.1 {status.value} {status.phrase}\r\n{end}"
    return f"{line}Content-Type: {content_type}\r\nContent-Length: ".encode()


def check_beginning(data: bytes | bytearray) -> None:
    """Raise RefusedError if what came so far cannot become the head of a request, however it goes on."""
    if len(data) > MAX_HEAD_BYTES:
        raise RefusedError(
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"a head of over {MAX_HEAD_BYTES} bytes"
        )
    if data and _BEGINNING.fullmatch(data) is None:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "not an HTTP request")


def parse_head(data: bytes) -> Head:
    """Return the head in `data`, which lacks the empty line at its end; raises RefusedError."""
    first, *lines = data.split(b"\r\n")
    request = _REQUEST_LINE.fullmatch(first)
    if request is None:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "not an HTTP/1.1 request")
    fields = _fields(lines)
    # The end of such a body is not where Content-Length has it, and its rest would pass for the next request.
    for name in (b"transfer-encoding", b"content-encoding"):
        if fields.get(name, b"identity").lower() != b"identity":
            status = HTTPStatus.LENGTH_REQUIRED if name[0] == ord("t") else HTTPStatus.UNSUPPORTED_MEDIA_TYPE
            raise RefusedError(status, f"{name.decode()}: send the body as it is, with its Content-Length")
    length = fields.get(b"content-length", b"0")
    if _LENGTH.fullmatch(length) is None:
        raise RefusedError(HTTPStatus.BAD_REQUEST, "content-length: expected a number of bytes")
    tokens = _TOKENS.split(fields.get(b"connection", b"").lower())
    return Head(
        method=request[1].decode(),
        path=request[2].partition(b"?")[0].decode(),
        length=int(length),
        # Without the field, HTTP/1.1 keeps a connection and HTTP/1.0 ends it.
        keep_alive=b"close" not in tokens if request[3] == b"1" else b"keep-alive" in tokens,
        expects=fields.get(b"expect", b"").lower() == b"100-continue",
    )


def _fields(lines: list[bytes]) -> dict[bytes, bytes]:
    fields: dict[bytes, bytes] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"not a header field: {line[:80]!r}")
        name = field[1].lower()
        # One of two lengths is false: by the wrong one, a part of the body passes for the next request.
        if name == b"content-length" and name in fields:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "content-length: given twice")
        fields[name] = field[2]
    return fields
