"""`pygraphd logs`: the last lines of the daemon's log, and each line that is added. Reads files only."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from pygraphd.cli.output import printable
from pygraphd.daemon import control
from pygraphd.errors import CommandError
from pygraphd.remedies import unreadable
from pygraphd.schema.ownership import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from pathlib import Path
    from typing import BinaryIO

    from pygraphd.schema.locations import Locations

_POLL_S = 0.2
_TAIL_BYTES = 4 * 2**20
"""How much of a file is read for its last lines: more than the daemon lets one grow."""


class _NoLogError(CommandError):
    """There is no log."""


def check_there(locations: Locations) -> None:
    """Raise CommandError if the log cannot be opened; if there is none, with how to get one."""
    try:
        _open(locations.log).close()
    except _NoLogError as error:
        if (running := control.ping(locations.socket)) is None:
            raise
        raise CommandError(
            f"{locations.log}: there is no log, though pid {running.pid} runs: in the foreground of a terminal, the daemon "
            "logs there; `pygraphd status` says if it cannot write a log, and `pygraphd restart` starts one in the background"
        ) from error


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last lines of the log, those of the file before it included; raises CommandError if there is no log."""
    with _open(log) as stream:
        return _last_lines(log, stream, count)


def _last_lines(log: Path, stream: BinaryIO, count: int) -> list[str]:
    """Return the last lines of an open log and of the file before it; the stream is at its end then."""
    lines = _tail(stream)
    if len(lines) < count:
        try:
            with _open(log.with_name(f"{log.name}.1")) as older:
                lines = _tail(older) + lines
        except CommandError:
            pass  # it was never rotated
    # `lines[-0:]` would be all of them.
    return lines[-count:] if count else []


def follow(
    log: Path, count: int, wait: Callable[[], None] = lambda: time.sleep(_POLL_S)
) -> Generator[str, None, None]:
    """Yield the last lines of the log and each line that is added, also after it was rotated or cut off.

    Calls `wait` between two looks, and ends if that raises. Raises CommandError if there is no log.
    """
    stream = _open(log)
    try:
        yield from _last_lines(log, stream, count)
        while True:
            yield from _whole_lines(stream)
            if _has_changed(log, stream):
                # What was written to the old one until then.
                yield from _whole_lines(stream)
                stream.close()
                stream = _reopened(log, wait)
            else:
                wait()
    finally:
        stream.close()


def _whole_lines(stream: BinaryIO) -> Iterator[str]:
    while (line := stream.readline()).endswith(b"\n"):
        yield _printable(line)
    # A line without an end is still being written: the next look reads it whole.
    stream.seek(-len(line), os.SEEK_CUR)


def _has_changed(log: Path, stream: BinaryIO) -> bool:
    ours = os.fstat(stream.fileno())
    try:
        there = log.stat()
    # Between the renaming of the old file and the making of the new one, none is there.
    except OSError:
        return False
    # A file that is shorter than what was read was cut off, as where it cannot be renamed.
    return not os.path.samestat(there, ours) or there.st_size < stream.tell()


def _reopened(log: Path, wait: Callable[[], None]) -> BinaryIO:
    while True:
        try:
            return _open(log)
        except CommandError:
            wait()


def _tail(stream: BinaryIO) -> list[str]:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(size - _TAIL_BYTES, 0))
    return [_printable(line) for line in stream.read().splitlines()]


def _open(path: Path) -> BinaryIO:
    try:
        # A pipe in the log's place would have `open` wait until somebody writes to it.
        return os.fdopen(open_regular(path, os.O_RDONLY), "rb")
    except FileNotFoundError as error:
        how = "a daemon in the background writes it: run pygraphd start"
        raise _NoLogError(f"{path}: there is no log yet; {how}") from error
    except OSError as error:
        raise CommandError(unreadable(path, error)) from error


def _printable(line: bytes) -> str:
    """Return a line without characters that a terminal would interpret: it may quote programs and files of other users."""
    return printable(line.rstrip(b"\r\n").decode(errors="replace"), keep="\t")
