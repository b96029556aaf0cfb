"""Commands that start and end the daemon, where standard output is full, closed, or read by nobody: they do it, and end in order."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pygraphd.daemon import control
from tests.support.daemon_home import COMMAND, HANGS_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemon_home import Home

pytestmark = pytest.mark.daemon

FULL = (1, "pygraphd: standard output: cannot be written: No space left on device\n")
UNREAD = (1, "")
CLOSED = (0, "")


@contextlib.contextmanager
def _full() -> Iterator[int]:
    with Path("/dev/full").open("wb") as full:
        yield full.fileno()


@contextlib.contextmanager
def _unread() -> Iterator[int]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        yield writer
    finally:
        os.close(writer)


def _ended(home: Home, output: int | None, *words: str) -> tuple[int, str]:
    """Return exit code and errors of a command whose standard output is a descriptor, or closed."""
    closing = ["/bin/sh", "-c", 'exec "$@" >&-', "sh"] if output is None else []
    with (home.path / "errors").open("w+") as errors:  # a daemon that held it would keep a pipe open
        done = subprocess.run(
            [*closing, *COMMAND, *words],
            env=home.environ,
            stdout=output,
            stderr=errors,
            check=False,
            timeout=HANGS_S,
        )
        errors.seek(0)
        return done.returncode, errors.read()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("opened", "expected"),
    [(_full, FULL), (_unread, UNREAD), (contextlib.nullcontext, CLOSED)],
    ids=["full", "unread", "closed"],
)
def test_a_daemon_is_started_restarted_and_stopped_whatever_becomes_of_the_output(
    home: Home, opened: type[contextlib.AbstractContextManager[int | None]], expected: tuple[int, str]
) -> None:
    home.variables["PYTHONUNBUFFERED"] = ""  # as users have it, so that what is written fails at the end
    pids = []
    with opened() as output:
        for words in ("start", "start", "restart"):
            assert _ended(home, output, words) == expected, words
            running = control.ping(home.locations.socket)
            assert running is not None
            pids.append(running.pid)
        assert _ended(home, output, "stop") == expected
    assert pids[0] == pids[1] != pids[2]
    assert home.daemons() == []
    assert b"Traceback" not in home.locations.log.read_bytes()
