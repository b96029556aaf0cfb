"""Whatever a daemon answers, of another version or forged, commands end in order and print text only."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import threading
from typing import TYPE_CHECKING

import pytest

from pygraphd.cli import main
from pygraphd.daemon.store import Store
from pygraphd.schema import messages
from pygraphd.schema.locations import locate
from pygraphd.schema.messages import API_VERSION, Ping
from pygraphd.schema.version import VERSION

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


class _Daemon:
    """Answers pings as a daemon does, and everything else with one body and status."""

    def __init__(self, path: Path) -> None:
        self.body, self.status = b"", 200
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):  # who only looks who is there hangs up at once
                is_ping = b"/v1/ping" in connection.recv(1 << 16)
                status, body = (200, PING) if is_ping else (self.status, self.body)
                head = b"HTTP/1.1 %d x\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (
                    status,
                    len(body),
                )
                connection.sendall(head + body)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[_Daemon]:
    monkeypatch.setenv("PYGRAPHD_HOME", str(tmp_path))
    locate().database.touch()
    opened = _Daemon(locate().socket)
    yield opened
    opened.close()


@pytest.mark.parametrize("words", COMMANDS)
def test_no_answer_crashes_a_command(daemon: _Daemon, capsys: pytest.CaptureFixture[str], words: str) -> None:
    for answer in ANSWERS:
        for daemon.status in (200, 500):
            daemon.body = answer.encode()
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
