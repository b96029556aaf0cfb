"""Whatever a daemon answers, of another version or forged, commands end in order and print text only."""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli import main
from pygraphd.daemon.store import Store
from pygraphd.schema import messages
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import API_VERSION, Ping
from pygraphd.schema.version import VERSION
from tests.support.answering import Answering

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PING = messages.encode(Ping("pygraphd", VERSION, API_VERSION, 2**31, ()))
COMMANDS = (
    "status",
    "status --json",
    "stats",
    "stats --json",
    "cache prune --gpu x",
    "cache rederive",
    "stop",
)
_VALUES: tuple[object, ...] = (
    "\x1b[31m",
    1e308,
    -1,
    10**400,
    True,
    None,
    [["\x1b"]],
    {"value": {}, "origin": ["\x1b"]},
    {},
)
_NAMES = (
    "entries",
    "uptime_s",
    "settings",
    "problems",
    "processes",
    "team",
    "lookups",
    "hits",
    "since",
    "since_ever",
    "policy",
    "error",
)
ANSWERS = (
    *(json.dumps(dict.fromkeys(_NAMES, value)) for value in _VALUES),
    json.dumps(
        {
            "settings": {
                "lease": {"value": float("inf"), "origin": "\x1b"},
                "log": {"value": "\x1b"},
                "\x1b": 1,
            }
        }
    ),
    json.dumps(
        {"uptime_s": float("nan"), "entries": 1e999, "since_ever": {"since": float("inf"), "hits": 1e999}}
    ),
    "[" * 100_000,
    "[]",
    "\x1b",
)


class _Daemon(Answering):
    """Answers pings as a daemon does, and everything else with one body and status."""

    def __init__(self, path: Path) -> None:
        self.body, self.status = b"", 200
        super().__init__(path, self._answer_to)

    def _answer_to(self, request: bytes) -> bytes:
        status, body = (200, PING) if b"/v1/ping" in request else (self.status, self.body)
        head = b"HTTP/1.1 %d x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
        return head % (status, len(body)) + body


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Daemon]:
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path))
    locate().database.touch()
    opened = _Daemon(locate().socket)
    yield opened
    opened.close()


@pytest.mark.parametrize("words", COMMANDS)
def test_no_answer_crashes_a_command(daemon: _Daemon, capsys: pytest.CaptureFixture[str], words: str) -> None:
    for number, answer in enumerate(ANSWERS, COMMANDS.index(words)):  # all answers, each with both statuses
        daemon.status, daemon.body = (200, 500)[number % 2], answer.encode()
        with pytest.raises(SystemExit) as ended:
            main(words.split())
        said = "".join(capsys.readouterr())

        assert ended.value.code in {0, 1}, answer[:100]
        assert said.replace("\n", "").isprintable(), answer[:100]


def test_statistics_that_are_no_numbers_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path))
    with Store(locate().database) as store:
        store.zero_statistics()
    with sqlite3.connect(locate().database) as connection:
        connection.execute(
            "INSERT OR REPLACE INTO statistic (name, value) VALUES ('hits', 9e999), ('graphs', -1)"
        )
    connection.close()

    with pytest.raises(SystemExit) as ended:
        main(["stats"])
    assert ended.value.code == 0
    assert "counted for" in capsys.readouterr().out
