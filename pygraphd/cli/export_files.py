"""The files of `cache export` and `cache import`: a new one, an old one, standard output and input."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pygraphd.cli.output import check_open
from pygraphd.daemon import exchange
from pygraphd.errors import CommandError, UsageError
from pygraphd.schema.portable import FORMAT, MAX_LINE_BYTES, json_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pygraphd.schema.portable import Portable

_AN_EXPORT = "one that `pygraphd cache export FILE` has written; nothing was imported"


def write_out(entries: Iterable[Portable]) -> int:
    """Write entries to standard output; return their number. Raises CommandError."""
    check_open()
    # The header has the number of entries, and is written again in the end: a pipe cannot go back to it.
    with _buffer("w+") as buffer:
        count = exchange.write(entries, buffer)
        buffer.seek(0)
        shutil.copyfileobj(buffer, sys.stdout)
        sys.stdout.flush()
    return count


def write_new(path: Path, entries: Iterable[Portable]) -> int:
    """Write entries to a new file, which is gone again if that fails; return their number. Raises CommandError."""
    try:
        # By the mode "x": between asking whether the file is there and opening it, somebody else could make
        # it.
        with path.open("x", encoding="utf-8") as stream:
            try:
                count = exchange.write(entries, stream)
                stream.flush()
            except BaseException:
                # Half a file is refused where it is read, but had better not be there: also after an interrupt.
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
    except FileExistsError as error:
        raise UsageError(f"{path}: exists already; give another name, or delete it first") from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{path}: cannot be written, as there is no folder {path.parent}") from error
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror}") from error
    return count


@contextlib.contextmanager
def opened(file: str) -> Iterator[tuple[BinaryIO, str]]:
    """Yield a file to be imported, which is read twice, and its name in messages; raises UsageError, also for one that is no export."""
    name = "standard input" if file == "-" else file
    with contextlib.ExitStack() as stack:
        try:
            # Python sets `sys.stdin` to None where descriptor 0 is closed.
            if file == "-" and sys.stdin is None:
                raise UsageError(f"{name}: is closed; give the name of a file, or feed one through a pipe")
            stream: BinaryIO = sys.stdin.buffer if file == "-" else stack.enter_context(Path(file).open("rb"))
            stream = _checked(stream, name, stack)
        except IsADirectoryError as error:
            raise UsageError(f"{file}: is a folder, not {_AN_EXPORT}") from error
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror}") from error
        yield stream, name


def _checked(stream: BinaryIO, name: str, stack: contextlib.ExitStack) -> BinaryIO:
    """Return a stream that begins as an export does, at its beginning, and can be rewound; raises UsageError, OSError.

    The header is checked before the rest is read: what comes through a pipe may be long, or have no end.
    """
    # Bounded, as a file of another kind may have no end of a line for gigabytes.
    header = stream.readline(MAX_LINE_BYTES + 1)
    _check_is_export(header, name)
    # Standard input may be a file, too, which needs no copy to be read twice.
    if stream.seekable():
        stream.seek(0)
        return stream
    buffer: BinaryIO = stack.enter_context(_buffer("w+b"))
    buffer.write(header)
    shutil.copyfileobj(stream, buffer)
    buffer.seek(0)
    return buffer


def _check_is_export(header: bytes, name: str) -> None:
    """Raise UsageError for the first line of another file, or of an export that cannot be read here."""
    try:
        value = json_line(io.BytesIO(header))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise UsageError(f"{name}: is {'another file' if header else 'empty'}, not {_AN_EXPORT}")
    exchange.read_header(io.BytesIO(header), name)


@contextlib.contextmanager
def _buffer(mode: str) -> Iterator[Any]:
    """Yield a file that can be rewound, as a pipe cannot; it is gone after the block."""
    encoding = None if "b" in mode else "utf-8"
    try:
        with tempfile.TemporaryFile(mode, encoding=encoding) as stream:
            yield stream
    except OSError as error:
        raise CommandError(f"{tempfile.gettempdir()}: cannot be written: {error.strerror}") from error
