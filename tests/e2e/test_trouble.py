"""No daemon, a hung one, one that answers garbage, a home that cannot be used: the user's program must not notice.

Each run is compared with one without PyGraph: same output, same exit code, and kept waiting `MOST_TIMES` at most, each
time for as long as a question may take (`test_transport.py`). The summary must say what happened. A daemon that dies between
two runs: `test_second_run.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.support.sandbox import COMMAND_TIMEOUT_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.sandbox import Outcome, Sandbox

pytestmark = [pytest.mark.torch, pytest.mark.daemon, pytest.mark.slow]

WAITED = "daemon: no answer in time"
MOST_TIMES = 2
Answer = Callable[[socketserver.StreamRequestHandler], None]


def assert_unharmed(outcome: Outcome, brief: Outcome) -> None:
    assert (outcome.code, outcome.stdout) == (brief.code, brief.stdout), outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert outcome.counts["graphs"] > 0
    assert outcome.counts["hits"] == 0
    assert outcome.counts["failures"].get(WAITED, 0) <= MOST_TIMES


def read_request(handler: socketserver.StreamRequestHandler) -> None:
    length = 0
    while (line := handler.rfile.readline().strip()) != b"":
        if line.lower().startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    handler.rfile.read(length)


def random_bytes(handler: socketserver.StreamRequestHandler) -> None:
    handler.wfile.write(os.urandom(4096))


def server_error(handler: socketserver.StreamRequestHandler) -> None:
    read_request(handler)
    handler.wfile.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\noops")


def wrong_answer(handler: socketserver.StreamRequestHandler) -> None:
    read_request(handler)
    body = b'{"environment": "none", "entries": [{"graph": 5}]}'
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def slow_bytes(handler: socketserver.StreamRequestHandler) -> None:
    read_request(handler)
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    for _ in range(600):
        handler.wfile.write(b" ")
        time.sleep(0.1)


def huge_body(handler: socketserver.StreamRequestHandler) -> None:
    read_request(handler)
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000000\r\n\r\n")
    for _ in range(1000):
        handler.wfile.write(bytes(1_000_000))


def nothing(handler: socketserver.StreamRequestHandler) -> None:
    read_request(handler)


@contextlib.contextmanager
def impostor(path: Path, answer: Answer) -> Iterator[list[int]]:
    """Listen on the daemon's socket and give `answer` to everyone; yields a list that grows by one with each caller."""
    callers: list[int] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            callers.append(1)
            with contextlib.suppress(OSError):
                answer(self)

        def finish(self) -> None:
            with contextlib.suppress(OSError):
                super().finish()

    class Server(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        block_on_close = False

    with Server(str(path), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield callers
        finally:
            server.shutdown()
            thread.join()


def test_no_daemon(sandbox: Sandbox, brief: Outcome) -> None:
    outcome = sandbox.run("--brief", patient=False)

    assert_unharmed(outcome, brief)
    assert outcome.counts["daemon"]["version"] is None
    assert outcome.counts["failures"]["daemon: no daemon"] > 0


def test_a_team_whose_server_never_answers(sandbox: Sandbox, brief: Outcome) -> None:
    pytest.importorskip("psycopg")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql+psycopg://reader@127.0.0.1:{silent.getsockname()[1]}/team"
        environ = sandbox.environment(PYGRAPHD_TEAM_URL=url)
        started = subprocess.run([sys.executable, "-m", "pygraphd", "start"], env=environ, check=False)
        assert started.returncode == 0
        outcome = sandbox.run("--brief")

        assert_unharmed(outcome, brief)
        assert outcome.counts["failures"] == {}
        assert outcome.counts["recorded"] > 0
        silent.settimeout(COMMAND_TIMEOUT_S)
        silent.accept()[0].close()  # the daemon has asked
        sandbox.stop_daemon()


def test_hung_daemon(sandbox: Sandbox, brief: Outcome) -> None:
    os.kill(sandbox.start_daemon(), signal.SIGSTOP)

    outcome = sandbox.run("--brief", patient=False)

    assert_unharmed(outcome, brief)
    assert outcome.counts["daemon"]["version"] is None
    assert outcome.counts["failures"] == {
        "daemon: not started: no answer in time": 1,
        WAITED: 2,
    }


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (random_bytes, "daemon: "),
        (server_error, "daemon: status 500"),
        (wrong_answer, "daemon: answer not understood"),
        (slow_bytes, "daemon: no answer in time"),
        (huge_body, "daemon: "),
        (nothing, "daemon: not HTTP"),
    ],
)
def test_garbage_on_the_socket(sandbox: Sandbox, brief: Outcome, answer: Answer, said: str) -> None:
    with impostor(sandbox.locations.socket, answer) as callers:
        # The others answer or hang up, sooner or later.
        outcome = sandbox.run("--brief", patient=answer is not slow_bytes)

    assert callers
    assert_unharmed(outcome, brief)
    assert outcome.counts["daemon"]["version"] is None
    assert any(failure.startswith(said) for failure in outcome.counts["failures"]), outcome.counts["failures"]


def test_database_that_is_none(sandbox: Sandbox, brief: Outcome) -> None:
    sandbox.locations.database.write_bytes(os.urandom(8192))

    outcome = sandbox.run("--brief")

    assert_unharmed(outcome, brief)
    assert any(failure.startswith("database: ") for failure in outcome.counts["failures"])


def test_home_that_is_a_file(sandbox: Sandbox, brief: Outcome, tmp_path: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("not a folder")

    outcome = sandbox.run("--brief", PYGRAPHD_HOME=str(occupied))

    assert_unharmed(outcome, brief)
    assert any(failure.startswith("spool: ") for failure in outcome.counts["failures"])


def test_summary_that_cannot_be_written(sandbox: Sandbox, brief: Outcome, tmp_path: Path) -> None:
    outcome = sandbox.run("--brief", PYGRAPH_SUMMARY=str(tmp_path / "missing" / "summary.json"))

    assert (outcome.code, outcome.stdout) == (0, brief.stdout)
    assert "Traceback" not in outcome.stderr
