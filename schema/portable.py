"""Entries outside of a cache: the lines of an exported file, and the import request to the daemon."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd.schema.checks import InvalidMessageError, check_int, check_number, check_text
from pygraphd.schema.keys import Environment
from pygraphd.schema.messages import MAX_TIME, Entry, Origin, Record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import BinaryIO

FORMAT = "pygraphd cache"
FORMAT_VERSION = 3
"""Version of the rows. An import reads older ones, too: see `pygraphd.daemon.older_versions`."""
MAX_LINE_BYTES = 2**16
MAX_REQUEST_ENTRIES = 64
"""Entries in one request: few enough to fit into a body and to delay no other request for long."""
IMPORTED = "import:"
BUNDLED = "bundle:"
TEAM = "team:"
HOST_PREFIXES = (IMPORTED, BUNDLED, TEAM)
"""Prefixes of the host of entries that a file or the team's database brought. No host has such a name, so every client treats them as foreign."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line. `keys` is the version of the keys: entries with keys of another version would never be found."""

    format: str
    version: int
    keys: int
    pygraphd: str
    entries: int

    def __post_init__(self) -> None:
        check_text("format", self.format, maximum=64)
        if self.format != FORMAT:
            raise InvalidMessageError(f"format: {self.format!r:.40} is not {FORMAT!r}")
        check_text("pygraphd", self.pygraphd, maximum=64)
        check_int("version", self.version, maximum=2**53, minimum=1)
        check_int("keys", self.keys, maximum=2**53)
        check_int("entries", self.entries, maximum=2**53)


@dataclass(frozen=True, slots=True)
class Portable:
    """One entry: a final decision, the measurements that it rests on, their time (`measured_at`, seconds since the epoch) and origin.

    Raises InvalidMessageError for a decision that is not final: the importing process would measure all the same.
    """

    environment: Environment
    origin: Origin
    record: Record
    measured_at: float | None = None

    def __post_init__(self) -> None:
        if not self.record.decision.final:
            raise InvalidMessageError("decision: is not final")
        if (self.measured_at is None) is bool(self.record.measurements):
            raise InvalidMessageError("measured_at: expected a time if there are measurements, else null")
        if self.measured_at is not None:
            check_number("measured_at", self.measured_at, maximum=MAX_TIME)

    @property
    def key(self) -> tuple[str, str]:
        """Return the digests of environment and graph."""
        return self.environment.digest(), self.record.graph.digest

    def entry(self) -> Entry:
        """Return the answer to a lookup that this entry gives."""
        return self.record.entry(None, self.origin.host, self.measured_at)


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """Entries to be stored unless their graph is known already in their environment: the body of `IMPORT_PATH`."""

    entries: tuple[Portable, ...]

    def __post_init__(self) -> None:
        if len(self.entries) > MAX_REQUEST_ENTRIES:
            raise InvalidMessageError(
                f"entries: {len(self.entries)} items, at most {MAX_REQUEST_ENTRIES} allowed"
            )

    def as_json(self) -> dict[str, object]:
        """Return the body."""
        return dataclasses.asdict(self)


def imported_host(host: str) -> str:
    """Return the host under which imported measurements of `host` are stored."""
    # An entry may go through several caches: its first mark stays, with the host that measured.
    return host if host.startswith(HOST_PREFIXES) else f"{IMPORTED}{host}"[:256]


def json_line(stream: BinaryIO) -> Any:
    """Return the JSON value of the next line; raises ValueError, of which InvalidMessageError is one, or RecursionError."""
    data = stream.readline(MAX_LINE_BYTES + 1)
    # Each line is written with its end, so one without it was cut off, or goes on beyond the limit.
    if not data.endswith(b"\n"):
        raise InvalidMessageError(
            f"more than {MAX_LINE_BYTES} bytes"
            if len(data) > MAX_LINE_BYTES
            else "the file ends here, too early"
        )
    return json.loads(data)


def requests(entries: Iterable[Portable]) -> Iterator[ImportRequest]:
    """Yield the requests that store all entries, in their order."""
    left = iter(entries)
    while some := tuple(itertools.islice(left, MAX_REQUEST_ENTRIES)):
        yield ImportRequest(some)
