"""Standard output of the commands: printable text only, and one error where it cannot be written.

Rows, answers and files may hold anything, escape codes for a terminal included.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

from pygraphd.errors import CommandError

if TYPE_CHECKING:
    from collections.abc import Iterator


def printable(text: str, keep: str = "") -> str:
    """Return a text with a question mark for each character that a terminal might interpret, but those to keep."""
    others = text
    for each in keep:
        others = others.replace(each, "")
    if others.isprintable():
        return text  # at once, as nearly all is
    return "".join(each if each.isprintable() or each in keep else "?" for each in text)


class NobodyReadsError(CommandError):
    """The other end of the pipe is closed, as after `| head`. There is nothing to say."""


class StandardOutput:
    """Writes printable lines to a stream, or nowhere if standard output is closed; raises CommandError where it cannot."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._failure: CommandError | None = None

    def write(self, text: str) -> int:
        """Write a text; control characters are replaced, and characters that the stream's encoding lacks."""
        if not isinstance(text, str):
            raise TypeError(
                f"expected text, got {type(text).__name__}"
            )  # as typer wants to know of each stream
        # Where standard output is closed, nobody wants what is printed.
        if self._stream is None or not text:
            return len(text)
        shown = printable(text, keep="\n\t")
        if not shown.isascii():
            encoding = self._stream.encoding or "utf-8"
            # Or a name beyond the encoding of the locale would end the command in a traceback.
            shown = shown.encode(encoding, "replace").decode(encoding)
        try:
            return self._stream.write(shown)
        except OSError as error:
            raise self._failed(error) from error

    @property
    def is_closed(self) -> bool:
        """Whether standard output is closed, so that nothing is written."""
        return self._stream is None

    def flush(self) -> None:
        """Write all buffered text; raises CommandError where it cannot be written."""
        self.end()

    def end(self) -> None:
        """Write the rest, unless its reader is gone. An earlier failure is raised again, as its first exception may have been caught."""
        if self._failure is not None:
            raise self._failure
        try:
            if self._stream is not None:
                self._stream.flush()
        except OSError as error:
            raise self._failed(error) from error

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _failed(self, error: OSError) -> CommandError:
        assert self._stream is not None
        _discard(self._stream)
        if isinstance(error, BrokenPipeError):
            self._failure = NobodyReadsError()
        else:
            self._failure = CommandError(f"standard output: cannot be written: {error.strerror}")
        return self._failure


@contextlib.contextmanager
def standard_output() -> Iterator[None]:
    """Have the block print to a `StandardOutput`."""
    # Of descriptors that are closed, the next files to be opened would get the numbers, and what is printed.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    before = sys.stdout
    output = StandardOutput(before)
    sys.stdout = cast(TextIO, output)
    try:
        yield
    finally:
        sys.stdout = before
        # Raised in place of the command's own outcome: where its output is lost, it has failed.
        output.end()


class StandardError:
    """Writes to a stream, as far as that is possible: what cannot be said changes neither the outcome nor the exit code."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write all buffered text, or drop it."""
        with self._dropping():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            _discard(self._stream)


def _discard(stream: TextIO) -> None:
    """Have a stream that cannot be written lead nowhere. The rest would fail once more when Python ends, with code 120."""
    with contextlib.suppress(OSError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


@contextlib.contextmanager
def standard_error() -> Iterator[None]:
    """Have the block write to a `StandardError`."""
    before = sys.stderr
    if before is None:
        yield
        return
    output = StandardError(before)
    sys.stderr = cast(TextIO, output)
    try:
        yield
    finally:
        output.flush()
        sys.stderr = before


def check_open() -> None:
    """Raise CommandError if standard output is closed, for a command that is to write nothing but data to it."""
    if getattr(sys.stdout, "is_closed", sys.stdout is None):
        raise CommandError("standard output: is closed")


def complain(text: str) -> None:
    """Print one line to standard error, if that can be written."""
    # Python sets `sys.stderr` to None where descriptor 2 is closed.
    with contextlib.suppress(OSError, AttributeError):
        sys.stderr.write(f"{printable(text)}\n")
        sys.stderr.flush()
