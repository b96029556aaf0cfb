"""Decisions that come with the package: exports in its folder `shipped`, one file a GPU model, of which nothing is ever written.

They rank below all that was found out here. The daemon reads all of them once, a program without a daemon those of the graphs that it
asks for. Another folder of exports can take their place, as a site may have on its machines.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pygraphd.schema import policy
from pygraphd.schema.checks import InvalidMessageError
from pygraphd.schema.keys import KEY_VERSION
from pygraphd.schema.messages import Deployment, Entry, LookupRequest, read
from pygraphd.schema.ownership import open_regular
from pygraphd.schema.portable import FORMAT_VERSION, MAX_LINE_BYTES, Header, Portable, json_line

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator
    from typing import BinaryIO

    from pygraphd.schema.messages import Decision

VARIABLE = "PYGRAPHD_SHIPPED"
PACKAGE, NONE = "package", "none"
"""Values of the setting beside the path of a folder."""
SHIPPED = "shipped:"
"""Prefix of the host of these entries. No host has such a name, so every client treats them as foreign."""
MAX_SHIPPED_ENTRIES = 100_000
"""Entries of a file: some 100 MB."""
_WORDS = dict.fromkeys(("", "1", "on", "true", "yes", PACKAGE), PACKAGE)
_WORDS |= dict.fromkeys(("0", "off", "false", "no", NONE), NONE)
_DIGEST = re.compile(rb'"digest": ?"([0-9a-f]{64})"')

Key = tuple[str, str]
"""(environment digest, graph digest)."""


def setting(text: str) -> str:
    """Return the setting that a text stands for: `PACKAGE`, `NONE`, or the absolute path of a folder; raises ValueError for others."""
    if word := _WORDS.get(text.strip().lower()):
        return word
    if not Path(text).is_absolute():  # the daemon would look for it in another place
        raise ValueError(f"{text!r:.40} is neither 0 nor 1 nor the absolute path of a folder")
    return text


def folder(text: str) -> Path | None:
    """Return the folder of exports that the setting asks for, None if there shall be none; raises ValueError."""
    chosen = setting(text)
    if chosen == NONE:
        return None
    # This file may lie outside of the package's folder, as in a checkout; an import of the package would be one of the client.
    return (
        Path(str(sys.modules["pygraphd"].__file__)).parent / "shipped" if chosen == PACKAGE else Path(chosen)
    )


@dataclass(frozen=True, slots=True)
class ShippedDecision:
    """A decision that was shipped, as a row and as the answer to a lookup."""

    row: Portable
    entry: Entry

    @property
    def measuring_us(self) -> float:
        """Extra host time of a trial that this makes unnecessary: that of calls in the deployment that was not chosen."""
        costs = {each.deployment: each for each in self.row.record.measurements}
        chosen = costs.pop(self.entry.decision.deployment, None)
        if chosen is None:
            return 0.0
        return sum(max(other.host_us - chosen.host_us, 0.0) * other.samples for other in costs.values())

    @property
    def recording_us(self) -> float:
        """Host time of the recording that this makes unnecessary: none for a GRAPH, which is recorded anyway."""
        is_graph = self.entry.decision.deployment is Deployment.GRAPH
        return 0.0 if is_graph else self.row.record.recording_us or 0.0


@dataclass(frozen=True, slots=True)
class Shipped:
    """The decisions of a folder's exports by key. `problems` has a line for each file that was refused, of which nothing is used."""

    known: dict[Key, ShippedDecision] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    graphs: frozenset[str] = frozenset()
    """The graphs of all environments."""

    def for_unanswered(self, request: LookupRequest, answered: Collection[str]) -> list[ShippedDecision]:
        """Return the shipped decisions for those graphs of a request that are not among the `answered`."""
        if not self.known:
            return []
        found = (
            self.known.get((request.environment, each)) for each in request.graphs if each not in answered
        )
        return [each for each in found if each is not None]


def answered(own: Iterable[Entry]) -> set[str]:
    """Return the graphs that entries answer. An entry that rests on no measurement does not, since a shipped decision tells more."""
    return {entry.graph for entry in own if not is_unmeasured(entry.decision, entry.measured_at)}


def is_unmeasured(decision: Decision, measured_at: float | None) -> bool:
    """Whether a decision is provisional and rests on no measurement, as of a program that ended too early."""
    return not decision.final and measured_at is None


def load(where: Path | None, graphs: Collection[str] | None = None) -> Shipped:
    """Read the exports in a folder; `graphs`: only their entries. Raises nothing: see `Shipped.problems`."""
    known: dict[Key, ShippedDecision] = {}
    is_missing = where is not None and where != folder(PACKAGE) and not where.is_dir()
    problems = [f"{where}: is no folder, so nothing of it is used: see {VARIABLE}"] if is_missing else []
    wanted = None if graphs is None else frozenset(map(str.encode, graphs))
    for file in _files(where):
        try:
            found = {row.key: each for row in _rows(file, wanted) if (each := _known(row)) is not None}
        except OSError as error:
            problems.append(f"{file}: cannot be read: {error.strerror}")
        except (ValueError, RecursionError) as error:
            problems.append(f"{file}: {error}; none of its decisions are used")
        else:
            # Only here, behind the last line: of a file that is cut off or damaged, nothing counts.
            known |= found
    return Shipped(known, tuple(problems), frozenset(graph for _, graph in known))


def _files(where: Path | None) -> list[Path]:
    # A folder that is missing, or cannot be listed, has none.
    # By name, so that on all hosts the same file counts for a key that two have.
    return [] if where is None else sorted(where.glob("*.jsonl"))


def _rows(file: Path, wanted: frozenset[bytes] | None) -> Iterator[Portable]:
    with os.fdopen(open_regular(file, follow=True), "rb") as stream:
        for number in range(2, _header(stream).entries + 2):
            try:
                if (value := _line(stream, wanted)) is not None:
                    yield read(Portable, value)
            except ValueError as error:
                raise InvalidMessageError(f"line {number}: {error}") from error
        if stream.read(1):
            raise InvalidMessageError("has more lines than it says")


def _header(stream: BinaryIO) -> Header:
    header = read(Header, json_line(stream))
    if header.version != FORMAT_VERSION or header.keys != KEY_VERSION:
        raise InvalidMessageError(
            f"written by pygraphd {header.pygraphd}, which names graphs otherwise: export it anew"
        )
    if header.entries > MAX_SHIPPED_ENTRIES:
        raise InvalidMessageError(f"{header.entries} entries, at most {MAX_SHIPPED_ENTRIES} allowed")
    return header


def _line(stream: BinaryIO, wanted: frozenset[bytes] | None) -> object:
    """Return the next line's value, None if it has none of the wanted graphs; a digest is found much sooner than JSON is read."""
    if wanted is None:
        return json_line(stream)
    begin = stream.tell()
    found = _DIGEST.search(stream.readline(MAX_LINE_BYTES + 1))
    if found is not None and found[1] not in wanted:
        return None
    # A line without a digest is not valid, which is to be said.
    stream.seek(begin)
    return json_line(stream)


def _known(row: Portable) -> ShippedDecision | None:
    """Return the decision of a row by the present policy; None if that is not sure of it."""
    record = row.record
    if record.decision.policy != policy.POLICY_VERSION:
        decision = policy.decide(record.measurements)
        if not decision.final:
            return None
        record = dataclasses.replace(
            record, decision=dataclasses.replace(decision, calls=record.decision.calls)
        )
    host = f"{SHIPPED}{row.origin.host}"[:256]
    row = dataclasses.replace(row, record=record, origin=dataclasses.replace(row.origin, host=host))
    entry = Entry(record.graph.digest, record.decision, None, host, measured_at=row.measured_at)
    for each in record.measurements:
        if each.deployment is record.decision.deployment:
            entry = dataclasses.replace(
                entry, cost_us=each.median_us, host_us=each.host_us, span_us=each.span_us
            )
    return ShippedDecision(row, entry)
