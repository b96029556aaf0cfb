"""Logs changes of state to the logger `pygraph`, and writes lines to standard error. Nothing raises into a program or waits for a reader.

By default nothing is printed. A program that configures the standard library's logging gets the records as those of any other library.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import time

_PIECE = select.PIPE_BUF
"""Bytes that a pipe which is ready takes at once, without blocking."""

LEVELS = ("debug", "info", "warning")
_logger = logging.getLogger("pygraph")
_logger.addHandler(logging.NullHandler())  # without one, Python would print warnings itself


def debug(text: str, *values: object) -> None:
    """Log a step within a change of state; `text` is a format of `%`. Raises nothing."""
    _log(logging.DEBUG, text, values)


def info(text: str, *values: object) -> None:
    """Log a change of state. Raises nothing."""
    _log(logging.INFO, text, values)


def warning(text: str, *values: object) -> None:
    """Log a failure of PyGraph after which the program goes on. Raises nothing."""
    _log(logging.WARNING, text, values)


def _log(level: int, text: str, values: tuple[object, ...]) -> None:
    with contextlib.suppress(Exception):  # of a handler or a filter of the user's
        # `stacklevel`: the record names the caller of `debug`, `info` or `warning`.
        _logger.log(level, text, *values, stacklevel=3)


class _Lines(logging.Handler):
    """Writes each record to standard error as a line, unless the program has a handler that takes it."""

    def emit(self, record: logging.LogRecord) -> None:
        others = [*logging.getLogger().handlers, *(each for each in _logger.handlers if each is not self)]
        if all(isinstance(each, logging.NullHandler) for each in others):
            say(self.format(record))


def print_from(level: str) -> None:
    """Log from a level of `LEVELS` on, to standard error if the program has no handlers of its own."""
    _logger.setLevel(level.upper())
    if not any(isinstance(each, _Lines) for each in _logger.handlers):
        lines = _Lines()
        lines.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s"))
        _logger.addHandler(lines)


def say(text: str, *, is_logged: bool = False) -> None:
    """Write one line to standard error, or nothing if that is closed, full, broken or busy. Raises nothing.

    A text that `is_logged` as well is not written twice. Bytes that Python buffers and cannot write change the exit code of the program, so the line bypasses the stream's buffer.
    A stream that the program has put in place of standard error is written to as usual.
    """
    if is_logged and any(isinstance(each, _Lines) for each in _logger.handlers):
        return
    lines = text.splitlines() or [""]
    line = f"pygraph: {lines[0]}\n"
    with contextlib.suppress(Exception):
        stream = sys.stderr
        if stream is None:
            return
        own = sys.__stderr__
        if own is None or stream is not own:
            stream.write(line)
            return
        pour(own.fileno(), line.encode("utf-8", "backslashreplace")[:_PIECE], seconds=0.0)


def pour(descriptor: int, data: bytes, seconds: float) -> None:
    """Write all bytes within a time in seconds; raises OSError, and TimeoutError if the reader takes too long.

    Polls before each write, since writing to a pipe without a reader may end the process by SIGPIPE.
    """
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    left = memoryview(data)
    remaining = seconds
    while left:
        ready = poll.poll(max(remaining, 0) * 1e3)
        if not ready or remaining < 0:
            raise TimeoutError("the reader takes nothing")
        if ready[0][1] & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            raise BrokenPipeError("the reader is gone")
        with contextlib.suppress(BlockingIOError):
            left = left[os.write(descriptor, left[:_PIECE]) :]
        remaining = deadline - time.monotonic()


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or the name of its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
