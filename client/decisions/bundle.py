"""Bundles: decisions that a process writes to, and reads from, the folder of `PYGRAPH_BUNDLE` and PyTorch's artifacts. Needs no torch."""

from __future__ import annotations

import contextlib
import functools
import time
from typing import TYPE_CHECKING

from pygraphd.client.common.guard import guarded
from pygraphd.client.decisions import spool
from pygraphd.schema import bundle, offline
from pygraphd.schema.keys import Environment, entry_id
from pygraphd.schema.offline import Hit
from pygraphd.schema.portable import Portable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pygraphd.client.common.report import Report
    from pygraphd.schema.locations import Locations
    from pygraphd.schema.messages import Entry, Graph, Origin, Record

    Folder = Callable[[], Path]

MAX_BUNDLE_ENTRIES = 10_000
"""Entries that one process passes on, so that memory is bounded."""
ARTIFACTS = "pygraph"
"""The folder in Inductor's cache, and the first part of the keys of artifacts."""


class Bundle:
    """The decisions that one process passes on, and the folders that bring those of others. Its methods raise nothing."""

    def __init__(
        self, locations: Locations, report: Report, shared: Path | None = None, inductor: Folder | None = None
    ) -> None:
        """`shared`: the folder of `PYGRAPH_BUNDLE`; `inductor`: returns that of Inductor's cache. Without them no file is looked for."""
        self._locations, self._report = locations, report
        self._shared, self._inductor = shared, inductor
        self._entries: dict[str, Portable | Hit] = {}
        self._own: set[str] = set()

    def find(self, environment: Environment, graphs: Sequence[str]) -> list[Portable]:
        """Return the entries for some graphs (digests) in files; one that is not valid is a miss, and counted as a failure."""
        found: dict[str, Portable] = {}
        where = environment.digest()
        for folder in self._folders() if graphs else ():
            for graph in (each for each in graphs if each not in found):
                read = functools.partial(bundle.read, folder, where, graph)
                if entry := guarded(self._report, f"bundle: {folder}")(read):
                    found[graph] = entry
                    self._add(entry_id(*entry.key), entry)
        return list(found.values())

    def _folders(self) -> Iterable[Path]:
        if self._shared is not None:
            yield self._shared
        if self._inductor is not None:
            with guarded(self._report, "artifacts", in_full=True):
                yield self._inductor() / ARTIFACTS

    def add(self, environment: Environment, origin: Origin, record: Record) -> None:
        """Note a decision of this process, unless it is provisional."""
        if record.decision.final:
            entry = Portable(environment, origin, record, time.time() if record.measurements else None)
            self._add(key := entry_id(*entry.key), entry)
            # Only what is kept, so that both are bounded.
            if key in self._entries:
                self._own.add(key)

    def add_hit(self, environment: Environment, graph: Graph, entry: Entry) -> None:
        """Note an entry of the cache that this process uses, unless that is provisional. Its measurements are read when they are wanted."""
        key = entry_id(environment.digest(), graph.digest)
        known = self._entries.get(key)
        is_known = isinstance(known, Portable) and known.measured_at == entry.measured_at
        if entry.decision.final and not is_known:
            self._add(key, Hit(environment, graph, entry))

    def _add(self, key: str, entry: Portable | Hit) -> None:
        if len(self._entries) < MAX_BUNDLE_ENTRIES or key in self._entries:
            self._entries[key] = entry

    def artifacts(self) -> dict[str, object]:
        """Return the entries that this process uses, as the contents of artifacts by key."""
        # Other threads may add entries meanwhile.
        entries = self._complete(self._entries.copy())
        return {f"{ARTIFACTS}/{bundle.file_name(key)}": bundle.content(each) for key, each in entries.items()}

    def write(self) -> None:
        """Write to `PYGRAPH_BUNDLE` the decisions of this process, and the entries used that have no file there."""
        if self._shared is None or not self._entries:
            return
        with guarded(self._report, "bundle", in_full=True):
            known = self._entries.copy()
            bundle.write(
                self._shared,
                known.keys(),
                self._own,
                lambda keys: self._complete({key: known[key] for key in keys}),
            )

    def _complete(self, entries: Mapping[str, Portable | Hit]) -> dict[str, Portable]:
        """Return entries with their measurements, which the database has, or else the spool; others are left out."""
        complete = {key: each for key, each in entries.items() if isinstance(each, Portable)}
        hits = {key: each for key, each in entries.items() if isinstance(each, Hit)}
        with contextlib.suppress(Exception):  # there may be no database, or none that can be read
            complete |= offline.read_portable(self._locations.database, hits)
        with contextlib.suppress(Exception):  # whatever lies there
            for request, left_at in spool.requests(self._locations.spool) if hits.keys() - complete else ():
                for each in request.records:
                    key = entry_id(request.environment.digest(), each.graph.digest)
                    if key in hits and key not in complete and each.decision.final:
                        measured_at = left_at if each.measurements else None
                        complete[key] = Portable(request.environment, request.origin, each, measured_at)
        return complete
