"""Fresh processes for measurements: they leave no children behind, and an error is kept as one line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
"""The repository: `python -m benchmarks.child` is found from here."""
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt)\b.*: ")
_MAX_LINE = 300
_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a process ended; `error` is None if it did well, otherwise the line that says why not."""

    error: str | None
    output: str
    killed: bool = False
    """Whether it was late, or was to stop."""


def run_fresh(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    folder: Path = ROOT,
    stop: threading.Event | None = None,
    grace_s: float = 0.0,
) -> Outcome:
    """Run `python ARGUMENTS` in `folder` to its end, or kill it and its children after `timeout_s`, or when `stop` is set.

    With `grace_s` it gets a SIGTERM first, and is killed `grace_s` seconds later.
    """
    # A file and no pipe: a process that prints more than a pipe holds would wait for a reader.
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        code = wait_for(start([sys.executable, *arguments], environ, folder, log), timeout_s, stop, grace_s)
        log.seek(0)
        output = log.read()
    return Outcome(error_of(code, timeout_s, stop, output), output, killed=code is None)


def error_of(code: int | None, timeout_s: float, stop: threading.Event | None, output: str) -> str | None:
    """Return the line that says why a process failed; None if it did well. `code` None: it was killed."""
    if code is None:
        stopped = stop is not None and stop.is_set()
        return "killed: interrupted" if stopped else f"killed: not done after {timeout_s:.0f} s"
    return None if code == 0 else last_error(output) or f"exit code {code}"


def start(
    command: list[str], environ: Mapping[str, str], folder: Path, log: IO[str]
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, so that its children can be ended with it."""
    return subprocess.Popen(
        command,
        env=dict(environ),
        cwd=folder,
        # A program that asks something gets the end of its input, and does not wait for an answer.
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for(
    process: subprocess.Popen[bytes], timeout_s: float, stop: threading.Event | None, grace_s: float = 0.0
) -> int | None:
    """Return a process's exit code; None if it was late, or `stop` was set, and it was killed with its children.

    With `grace_s` it gets a SIGTERM first, and is killed `grace_s` seconds later.
    """
    end = time.monotonic() + timeout_s
    try:
        while time.monotonic() < end and not (stop is not None and stop.is_set()):
            try:
                # In short waits, as `stop` is set by another thread, and would not end a long one.
                return process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        return None
    finally:
        if process.returncode is None:  # too late, or we were interrupted
            _end(process, grace_s)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    # Those that it gave sessions of their own outlive its group, where it does not end them itself.
    others = _descendants(process.pid) if grace_s else []
    try:
        if grace_s:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
    finally:
        # Also where it has ended in time: what it has started may still run.
        with contextlib.suppress(ProcessLookupError):  # it has ended, and left nobody behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for each in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, and those that these have."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # Behind the name, which stands in brackets, and may hold spaces and brackets.
            parent = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found = list(children.get(pid, []))
    for each in found:
        found += children.get(each, [])
    return found


def last_error(output: str) -> str | None:
    """Return the last line that names an exception, or else the last line; None if there is no line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    # The exception first: libraries print more when the interpreter ends.
    return (last_exception(lines) or lines[-1][:_MAX_LINE]) if lines else None


def last_exception(lines: Iterable[str]) -> str | None:
    """Return the last of some lines that names an exception; None if none does."""
    telling = [line for line in lines if _EXCEPTION.match(line)]
    return telling[-1][:_MAX_LINE] if telling else None
