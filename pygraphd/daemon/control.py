"""Requests of a command to a running daemon, over its socket, with the standard library alone.

Unlike the client's transport, a command may wait for seconds, and raises an error that says why it failed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from typing import TYPE_CHECKING, TypeVar

from pygraphd.daemon.exchange import ImportAnswer
from pygraphd.daemon.peer import Peer, peer_of
from pygraphd.daemon.pruning import PruneAnswer, PruneRequest
from pygraphd.daemon.rederiving import RederiveAnswer, RederiveRequest
from pygraphd.errors import CommandError, DatabaseError
from pygraphd.remedies import for_access
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.messages import DATABASE_CAUSE, IMPORT_PATH, REDERIVE_PATH, Ping, decode
from pygraphd.schema.ownership import StrangerError, connect

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pygraphd.schema.portable import ImportRequest

_T = TypeVar("_T")
_PING_TIMEOUT_S = 1.0
_MAX_REASON = 200
_MAX_LINE = 2000
"""Characters shown of a refusal, which has a path and a remedy: what listens may send megabytes."""
_WRITING_TIMEOUT_S = 300.0
_LONG_TIMEOUT_S = 6 * 3600.0
"""For what goes through all entries: a million of them take half an hour beside many lookups."""


_REMEDIES: Mapping[int, str] = {
    http.HTTPStatus.BAD_REQUEST: "run: pygraphd restart",
    http.HTTPStatus.NOT_FOUND: "run: pygraphd restart",
    http.HTTPStatus.METHOD_NOT_ALLOWED: "run: pygraphd restart",
    http.HTTPStatus.INTERNAL_SERVER_ERROR: "see: pygraphd logs",
    http.HTTPStatus.SERVICE_UNAVAILABLE: "try again",
}
"""What a person can do about a refusal. Requests that a daemon does not understand are those for one of another version."""


class _Connection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("pygraphd", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        # With the checks that programs make: a command must not obey a stranger's daemon either.
        self.sock = connect(self._path, self.timeout or _PING_TIMEOUT_S)


def ping(path: Path, timeout_s: float = _PING_TIMEOUT_S) -> Ping | None:
    """Return the daemon's answer; None if nothing listens on the socket, or what listens does not answer in time or not validly."""
    try:
        status, body = _ask(path, "GET", "/v1/ping", timeout_s=timeout_s)
        return decode(Ping, body) if status == http.HTTPStatus.OK else None
    # HTTPException is no OSError: it comes of a peer that speaks no HTTP, or hangs up within an answer.
    except (OSError, http.client.HTTPException, InvalidMessageError):
        return None


def why_untrusted(path: Path) -> str | None:
    """Return why a socket is not trusted: its folder is not private, or a process of another user listens. None if it is trusted."""
    try:
        connect(path, _PING_TIMEOUT_S).close()
    except StrangerError as error:
        return str(error)
    # Nobody listens, or the socket may not be connected to: the callers look into that.
    except OSError:
        pass
    return None


def why_no_answer(path: Path) -> str | None:
    """Return why a live daemon cannot be asked: the socket may not be connected to, or it answers with a refusal. None if that is not why."""
    try:
        status, body = _ask(path, "GET", "/v1/ping")
    # `why_untrusted` tells of that, with the remedy.
    except StrangerError:
        return None
    except PermissionError as error:
        return f"{path} cannot be connected to: {error.strerror}; {for_access(path)}"
    except (OSError, http.client.HTTPException):
        return None
    if status == http.HTTPStatus.OK:
        return "it answers now: try again"
    return f"it answers with status {status} ({_error_text(body)[:_MAX_REASON]}): try again later"


def listener(path: Path) -> Peer | None:
    """Return the process that listens on a socket, in our namespaces, or None."""
    try:
        with connect(path, _PING_TIMEOUT_S) as connection:
            return peer_of(connection)
    except OSError:
        return None


def stats(path: Path) -> dict[str, object]:
    """Return the daemon's counters; raises CommandError if it does not answer."""
    try:
        answer = json.loads(_ask_successfully(path, "GET", "/v1/stats", b"", _PING_TIMEOUT_S))
    # RecursionError is no ValueError: json raises it for arrays that are nested deeply.
    except (ValueError, RecursionError) as error:
        raise CommandError(f"the daemon's answer to /v1/stats is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise CommandError("the daemon's answer to /v1/stats is not understood")
    return answer


def zero_statistics(path: Path) -> None:
    """Have the daemon begin its statistics anew; raises CommandError if it cannot."""
    _ask_successfully(path, "POST", "/v1/stats/zero", b"", _WRITING_TIMEOUT_S)


def prune(path: Path, request: PruneRequest) -> PruneAnswer:
    """Have the daemon delete entries; raises CommandError if it cannot."""
    body = json.dumps(request.as_json()).encode()
    return _answer(PruneAnswer, path, "/v1/prune", body, _LONG_TIMEOUT_S)


def rederive(path: Path, request: RederiveRequest) -> RederiveAnswer:
    """Have the daemon derive decisions anew; raises CommandError if it cannot."""
    body = json.dumps(request.as_json()).encode()
    return _answer(RederiveAnswer, path, REDERIVE_PATH, body, _LONG_TIMEOUT_S)


def add_imported(path: Path, request: ImportRequest) -> ImportAnswer:
    """Have the daemon store imported entries; raises CommandError if it cannot."""
    body = json.dumps(request.as_json()).encode()
    return _answer(ImportAnswer, path, IMPORT_PATH, body)


def _answer(
    kind: type[_T], path: Path, target: str, body: bytes, timeout_s: float = _WRITING_TIMEOUT_S
) -> _T:
    answer = _ask_successfully(path, "POST", target, body, timeout_s)
    try:
        return decode(kind, answer)
    except InvalidMessageError as error:
        raise CommandError(f"the daemon's answer to {target} is not understood: {error}") from error


def _ask_successfully(path: Path, method: str, target: str, body: bytes, timeout_s: float) -> bytes:
    try:
        status, answer = _ask(path, method, target, body, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        raise CommandError(f"the daemon did not answer {target}: {error}; see: pygraphd status") from error
    if status != http.HTTPStatus.OK:
        raise _refusal(target, status, answer)
    return answer


def _refusal(target: str, status: int, answer: bytes) -> CommandError:
    """Return the error for an answer that is no success: where the database is the cause, the one of a command without a daemon."""
    why = _error_text(answer)[:_MAX_LINE]
    # Older daemons name no cause, and answer so for a full disk alone.
    if status == http.HTTPStatus.INSUFFICIENT_STORAGE or _told(answer).get("cause") == DATABASE_CAUSE:
        return DatabaseError(why)
    remedy = _REMEDIES.get(status, "see: pygraphd status")
    return CommandError(f"the daemon refused {target}: {why}; {remedy}")


def _ask(
    path: Path, method: str, target: str, body: bytes = b"", timeout_s: float = _PING_TIMEOUT_S
) -> tuple[int, bytes]:
    connection = _Connection(path, timeout_s)
    try:
        connection.request(method, target, body or None)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _error_text(answer: bytes) -> str:
    return str(_told(answer).get("error", "no reason given"))


def _told(answer: bytes) -> dict[str, object]:
    """Return the fields of an error; none if it is not one of a daemon's."""
    # RecursionError is no ValueError: json raises it for arrays that are nested deeply.
    with contextlib.suppress(ValueError, RecursionError):
        told = json.loads(answer)
        return told if isinstance(told, dict) else {}
    return {}
