"""Entries outside of a cache: the file that `cache export` writes and `cache import` reads, and the import request to the daemon.

A file is UTF-8 with one JSON object a line: a header with the number of entries, then one entry each. It holds facts and
decisions only, so a false entry can make a graph slower, but not wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.daemon.older_versions import translated
from pygraphd.errors import UsageError
from pygraphd.schema.checks import InvalidMessageError, check_bool, check_int
from pygraphd.schema.keys import KEY_VERSION
from pygraphd.schema.messages import read
from pygraphd.schema.portable import (
    FORMAT,
    FORMAT_VERSION,
    Header,
    Portable,
    json_line,
)
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO, TextIO

_HEADER_BYTES = 256
"""Length of a written header: it is written again, with the number of entries, after the last one."""


@dataclass(frozen=True, slots=True)
class ImportAnswer:
    """The outcome of an import, or with `dry_run` its forecast.

    `added` entries were not known. `replaced` ones took the place of a provisional decision or of an earlier import. `kept` ones
    were known here already. `derived` of those stored came from another version of the policy and were decided anew. `left_out`
    ones rest on graphs of PyTorch, which are no deployment any more.
    """

    added: int = 0
    replaced: int = 0
    kept: int = 0
    derived: int = 0
    left_out: int = 0
    dry_run: bool = False

    def __post_init__(self) -> None:
        for name in _COUNTS:
            check_int(name, getattr(self, name), maximum=2**53)
        check_bool("dry_run", self.dry_run)

    def __add__(self, other: ImportAnswer) -> ImportAnswer:
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        return ImportAnswer(**counts, dry_run=self.dry_run or other.dry_run)

    def as_json(self) -> dict[str, object]:
        """Return the answer as JSON has it."""
        return {"schema": 1, **dataclasses.asdict(self)}


_COUNTS = ("added", "replaced", "kept", "derived", "left_out")


def write(entries: Iterable[Portable], stream: TextIO) -> int:
    """Write a file's lines to a stream that can be rewound, one entry in memory at a time; return the number of entries."""
    begin, count = stream.tell(), 0
    stream.write(_header_line(count))
    for entry in entries:
        stream.write(_line(entry) + "\n")
        count += 1
    stream.seek(begin)
    stream.write(_header_line(count))
    stream.seek(0, io.SEEK_END)
    return count


def _header_line(entries: int) -> str:
    return (
        _line(Header(FORMAT, FORMAT_VERSION, KEY_VERSION, VERSION, entries)).ljust(_HEADER_BYTES - 1) + "\n"
    )


def _line(value: Header | Portable) -> str:
    # By default json writes NaN, which is no JSON.
    return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)


def _plain(value: Any) -> Any:
    """Return a value as `dataclasses.asdict` does, but without copies of what cannot change, which took most of an export's time."""
    kind: Any = type(value)
    if (names := _field_names(kind)) is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...] | None:
    return tuple(each.name for each in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


@dataclass(frozen=True, slots=True)
class Contents:
    """What a valid file has: entries, and entries of an older format that decide nothing any more."""

    entries: int
    left_out: int


def check_file(stream: BinaryIO, name: str) -> Contents:
    """Return what a file has, and rewind it; raises UsageError, with the number of the line, if it is not complete or not valid."""
    entries = left_out = 0
    for entry in read_file(stream, name):
        if entry is None:
            left_out += 1
        else:
            entries += 1
    stream.seek(0)
    return Contents(entries, left_out)


def read_header(stream: BinaryIO, name: str) -> Header:
    """Return the header of a file; raises UsageError if there is none, or one of a version that cannot be read here."""
    with _refusing(name, 1):
        value = json_line(stream)
        # First: of a newer format, "upgrade" is to be said, and not which field it lacks here.
        _check_version(value)
        header = read(Header, value)
    if header.keys != KEY_VERSION:
        raise UsageError(
            f"{name}: was written by pygraphd {header.pygraphd}, which names graphs otherwise, so that nothing of it would ever"
            " be found here: export it anew with this version; nothing was imported"
        )
    return header


def read_file(stream: BinaryIO, name: str) -> Iterator[Portable | None]:
    """Yield each entry of a file as it is read; None for one of an older format that decides nothing any more. Raises UsageError as `check_file`."""
    header = read_header(stream, name)
    # As many as the header says: a file that was cut off must not pass for one with fewer.
    for number in range(2, header.entries + 2):
        with _refusing(name, number):
            entry = _entry(json_line(stream), header.version)
        yield entry
    if stream.read(1):
        raise UsageError(
            f"{name}: goes on after {header.entries} entries, as many as it says; nothing was imported"
        )


def _entry(value: Any, version: int) -> Portable | None:
    """Return the entry of a line, in a format's version; None for one of an older format that decides nothing any more."""
    record = value.get("record") if isinstance(value, dict) else None
    if version < FORMAT_VERSION and isinstance(record, dict):
        if (record := translated(record)) is None:
            return None
        value["record"] = record
    return read(Portable, value)


def _check_version(value: object) -> None:
    """Raise InvalidMessageError for a header of a newer format, whatever else that has."""
    if isinstance(value, dict) and value.get("format") == FORMAT:
        version = value.get("version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise InvalidMessageError(
                f"version {version!s:.20} of the format, and this pygraphd reads {FORMAT_VERSION}: upgrade it"
            )


@contextlib.contextmanager
def _refusing(name: str, number: int) -> Iterator[None]:
    """Turn an error within into a UsageError that names the file and the line."""
    try:
        yield
    except (ValueError, RecursionError) as error:  # of which InvalidMessageError is one
        raise UsageError(f"{name}: line {number}: {error}; nothing was imported") from error
