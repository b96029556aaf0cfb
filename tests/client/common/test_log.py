"""A message of ours never changes how a program ends, wherever its standard error leads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pygraphd.client.common import log

if TYPE_CHECKING:
    from collections.abc import Callable

LIMIT_S = 30
SAY = "from pygraphd.client.common import log; log.say('from the body'); import atexit; atexit.register(log.say, 'at exit')"


def run(program: str, *, stderr: int | None, before: Callable[[], None] | None = None) -> int:
    # Unbuffered, nothing would be left that cannot be written at exit.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", f"{program}; print(flush=True)"],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        preexec_fn=before,
        timeout=LIMIT_S,
        check=False,
    ).returncode


def test_a_message_is_one_line_and_is_there_at_exit_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SAY.replace("body", "body\\nand more")], capture_output=True, check=True
    )

    assert done.stderr == b"pygraph: from the body\npygraph: at exit\n"


@pytest.mark.parametrize("takes_signal", [False, True])
def test_a_broken_pipe(takes_signal: bool) -> None:
    """A program may have SIGPIPE end it, as tools do whose output goes to `head`."""
    reader, writer = os.pipe()
    os.close(reader)
    default = "import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL); " if takes_signal else ""
    try:
        assert run(default + SAY, stderr=writer) == 0
    finally:
        os.close(writer)


def test_a_closed_descriptor() -> None:
    assert run(SAY, stderr=None, before=lambda: os.close(2)) == 0


def test_a_full_device() -> None:
    with Path("/dev/full").open("wb") as full:
        assert run(SAY, stderr=full.fileno()) == 0


def test_a_pipe_that_nobody_reads_is_not_waited_for() -> None:
    reader, writer = os.pipe()
    try:
        os.set_blocking(writer, False)
        os.write(writer, bytes(1 << 24))  # as much as it takes
        os.set_blocking(writer, True)
        assert run(SAY, stderr=writer) == 0
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize(
    "stream", ["None", "object()", "type('S', (), {'write': lambda self, text: 1 / 0})()"]
)
def test_a_stream_that_takes_no_text(stream: str) -> None:
    assert run(f"import sys; sys.stderr = {stream}; {SAY}; sys.stderr = sys.__stderr__", stderr=None) == 0


def test_a_stream_of_the_program_s_gets_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.say("one\ntwo")
    log.say("")

    assert capsys.readouterr().err == "pygraph: one\npygraph: \n"


def test_what_cannot_be_encoded_is_said_all_the_same() -> None:
    done = subprocess.run(
        [sys.executable, "-c", r"from pygraphd.client.common import log; log.say('\udcff\u20ac')"],
        env={**os.environ, "PYTHONIOENCODING": "ascii:strict"},
        capture_output=True,
        check=True,
    )

    assert done.stderr.startswith(b"pygraph: \\udcff")


def test_bytes_pour_into_a_pipe_as_fast_as_it_is_read(tmp_path: Path) -> None:
    data = os.urandom(1 << 20)
    reader = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; open(sys.argv[1], 'wb').write(sys.stdin.buffer.read())",
            tmp_path / "out",
        ],
        stdin=subprocess.PIPE,
    )
    assert reader.stdin is not None
    log.pour(reader.stdin.fileno(), data, seconds=LIMIT_S)
    reader.communicate()

    assert (tmp_path / "out").read_bytes() == data


def test_bytes_that_nobody_reads_are_an_error_in_time() -> None:
    reader, writer = os.pipe()
    try:
        with pytest.raises(TimeoutError):
            log.pour(writer, bytes(1 << 20), seconds=0.05)
        os.close(reader)
        with pytest.raises(BrokenPipeError):
            log.pour(writer, b"x", seconds=0.05)
    finally:
        os.close(writer)
