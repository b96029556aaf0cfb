"""Fresh processes for measurements: one at a time, nothing of theirs left behind, their errors kept as one line."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

T = TypeVar("T")

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


def run_fresh(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    folder: Path = ROOT,
    stop: threading.Event | None = None,
) -> Outcome:
    """Run `python ARGUMENTS` in `folder` to its end, or kill it and its children after `timeout_s`, or when `stop` is set."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        code = _wait(_start([sys.executable, *arguments], environ, folder, log), timeout_s, stop)
        log.seek(0)
        output = log.read()
    return Outcome(_error(code, timeout_s, stop, output), output)


def run_logged(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    timeout_s: float,
    log: Path,
    grace_s: float,
    stop: threading.Event | None = None,
) -> Outcome:
    """Do as `run_fresh`, with what the process prints in `log` as it comes.

    One that is late is asked to end first (SIGTERM), so that it may end in turn what it has started; `grace_s` later it is killed.
    """
    with log.open("w") as stream:
        code = _wait(_start([sys.executable, *arguments], environ, ROOT, stream), timeout_s, stop, grace_s)
    output = log.read_text(errors="replace")
    return Outcome(_error(code, timeout_s, stop, output), output)


def _error(code: int | None, timeout_s: float, stop: threading.Event | None, output: str) -> str | None:
    if code is None:
        stopped = stop is not None and stop.is_set()
        return "killed: interrupted" if stopped else f"killed: not done after {timeout_s:.0f} s"
    return None if code == 0 else last_error(output) or f"exit code {code}"


def _start(
    command: list[str], environ: Mapping[str, str], folder: Path, log: IO[str]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=dict(environ),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # so that compile workers can be ended with it
    )


def _wait(
    process: subprocess.Popen[bytes], timeout_s: float, stop: threading.Event | None, grace_s: float = 0.0
) -> int | None:
    end = time.monotonic() + timeout_s
    try:
        while time.monotonic() < end and not (stop is not None and stop.is_set()):
            try:
                return process.wait(_LOOK_S)
            except subprocess.TimeoutExpired:
                continue
        return None
    finally:
        if process.returncode is None:  # too late, or we were interrupted
            _end(process, grace_s)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        if grace_s:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(grace_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # it has ended, and left nobody behind
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def as_ended(running: Iterable[Future[T]]) -> Iterator[Future[T]]:
    """Yield futures as they end, like `as_completed`, to a main thread that can be interrupted meanwhile.

    Python handles signals in the main thread, and one that the kernel gave to another thread does not wake it.
    """
    pending = set(running)
    while pending:
        ended, pending = wait(pending, _LOOK_S, FIRST_COMPLETED)
        yield from ended


def last_error(output: str) -> str | None:
    """Return the last line that names an exception, or else the last line; None if there is no line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return (last_exception(lines) or lines[-1][:_MAX_LINE]) if lines else None


def last_exception(lines: Iterable[str]) -> str | None:
    """Return the last of some lines that names an exception; None if none does."""
    telling = [line for line in lines if _EXCEPTION.match(line)]
    return telling[-1][:_MAX_LINE] if telling else None
