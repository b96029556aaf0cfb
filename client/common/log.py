"""Messages to the user, and bytes into a descriptor that may not take them. Neither ever raises into a program or waits for a reader."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import time

_PIECE = select.PIPE_BUF
"""What a pipe that is ready takes at once, without blocking."""


def say(text: str) -> None:
    """Write one line to standard error, or nothing if that is closed, full, broken or busy. Raises nothing.

    What Python buffers and cannot write changes the exit code of the program, so the buffer of the stream is passed by.
    A stream that the program has put in its place gets the line as any other text.
    """
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
    """Write all bytes within a time; raises OSError, TimeoutError if nobody reads.

    A pipe without a reader is told by asking, since writing may end the process by SIGPIPE.
    """
    deadline = time.monotonic() + seconds
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    left = memoryview(data)
    remaining = seconds
    while left:
        ready = poll.poll(max(remaining, 0) * 1e3)
        if not ready or remaining < 0:
            raise TimeoutError("nobody reads what is written there")
        if ready[0][1] & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            raise BrokenPipeError("nobody reads there any more")
        with contextlib.suppress(BlockingIOError):
            left = left[os.write(descriptor, left[:_PIECE]) :]
        remaining = deadline - time.monotonic()
