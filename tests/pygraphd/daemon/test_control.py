"""What a command says of a request that a daemon did not serve, by the answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon import control
from pygraphd.daemon.pruning import PruneRequest
from pygraphd.errors import CommandError, DatabaseError, Exit
from tests.support.answering import Answering

if TYPE_CHECKING:
    from pathlib import Path


def _error(folder: Path, status: str, told: object) -> CommandError:
    """Return the error of a prune that a daemon answers so."""
    body = json.dumps(told).encode()
    answer = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)
    folder.chmod(0o700)
    with (
        Answering(folder / "socket", lambda _: answer),
        pytest.raises(CommandError) as caught,
    ):
        control.prune(folder / "socket", PruneRequest(gpu="H200"))
    return caught.value


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("503 Service Unavailable", {"error": "cache.db: why; what to do", "cause": "database"}),
        ("507 Insufficient Storage", {"error": "cache.db: why; what to do", "cause": "database"}),
        ("507 Insufficient Storage", {"error": "cache.db: why; what to do"}),
    ],
)
def test_a_database_that_is_the_cause_is_named_as_without_a_daemon(
    tmp_path: Path, status: str, told: dict[str, str]
) -> None:
    error = _error(tmp_path, status, told)
    assert (type(error), str(error), error.exit_code) == (
        DatabaseError,
        "cache.db: why; what to do",
        Exit.USAGE,
    )


@pytest.mark.parametrize(
    ("status", "told", "said"),
    [
        ("503 Service Unavailable", {"error": "too many connections of this user"}, "try again"),
        ("500 Internal Server Error", {"error": "an error in pygraphd"}, "see: pygraphd logs"),
        ("400 Bad Request", {"error": "older_than_s: unknown"}, "run: pygraphd restart"),
        ("404 Not Found", {"error": "Not Found"}, "run: pygraphd restart"),
        ("403 Forbidden", {"error": "another user"}, "see: pygraphd status"),
        ("418 I'm a teapot", ["no", "object"], "see: pygraphd status"),
        ("503 Service Unavailable", {"cause": ["database"]}, "try again"),
    ],
)
def test_any_other_refusal_has_a_remedy_too(tmp_path: Path, status: str, told: object, said: str) -> None:
    error = _error(tmp_path, status, told)
    why = told.get("error", "no reason given") if isinstance(told, dict) else "no reason given"
    assert str(error) == f"the daemon refused /v1/prune: {why}; {said}"
    assert error.exit_code is Exit.ERROR


def test_so_has_a_daemon_that_does_not_answer(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(CommandError, match=r"did not answer /v1/prune: .*; see: pygraphd status$"):
        control.prune(tmp_path / "socket", PruneRequest(gpu="H200"))


def test_a_refusal_of_a_megabyte_is_not_shown_as_a_whole(tmp_path: Path) -> None:
    assert len(str(_error(tmp_path, "500 Internal Server Error", {"error": "x" * 2**20}))) < 3000
