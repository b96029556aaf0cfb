"""The facts that `pygraphd cache explain` shows of each graph: how it ran, the stored entry, its measurements, the nearest environment.

`render_explanations` makes text of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pygraphd import folders
from pygraphd.cli import summaries
from pygraphd.cli.catalogue import NO_DIGITS, NOT_FOUND, Catalogue, is_prefix, only_graph
from pygraphd.cli.entries import CachedEntry
from pygraphd.cli.shipped_catalogue import open_with_shipped
from pygraphd.cli.spool_catalogue import SpoolCatalogue
from pygraphd.daemon import spool
from pygraphd.errors import UsageError
from pygraphd.schema.messages import Deployment
from pygraphd.schema.policy import POLICY_VERSION, reason_text
from pygraphd.schema.summary import Deployed, Source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from pygraphd.cli.entries import EntryDetails
    from pygraphd.cli.summaries import Summary
    from pygraphd.schema.locations import Locations


@dataclass(frozen=True, slots=True)
class Difference:
    """A factor of the environment that differs between there (an entry's environment) and here."""

    factor: str
    there: str | int
    here: str | int


@dataclass(frozen=True, slots=True)
class Neighbour:
    """The entry of the nearest other environment: the fewest factors differ; of several the newest."""

    entry: CachedEntry
    differences: tuple[Difference, ...]
    not_used: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the entry and the factors that differ, for JSON."""
        return {
            "entry": _entry_json(self.entry, self.not_used),
            "differences": [dataclasses.asdict(difference) for difference in self.differences],
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """One graph in one environment.

    `ran` is the program's record (None without a summary), `times` the number of equal records. `entry` is the stored entry of cache
    or spool, `not_used` why this version does not use it, and `figures` the measurements that it rests on. `nearest` is set if the
    program did not find the graph, or if there is no entry.
    """

    graph: str
    kind: str
    environment: str
    factors: dict[str, str | int]
    ran: Deployed | None
    times: int
    entry: CachedEntry | None
    figures: tuple[dict[str, Any], ...] = ()
    nearest: Neighbour | None = None
    not_used: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return one item of `cache explain --json`."""
        return {
            "graph": self.graph,
            "kind": self.kind,
            "environment": {"id": self.environment, **self.factors},
            "ran": None if self.ran is None else {**_how(self.ran), "times": self.times},
            "entry": self.entry and _entry_json(self.entry, self.not_used),
            "figures": list(self.figures),
            "nearest": self.nearest and self.nearest.as_json(),
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """All explanations; the number of graphs that the summary leaves out, of files in the spool, and `Summary.notes`."""

    explanations: tuple[Explanation, ...]
    left_out: int
    spool_waiting: int
    notes: dict[str, dict[str, int]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the JSON of `cache explain --json`."""
        return {
            "schema": 1,
            "graphs": [explanation.as_json() for explanation in self.explanations],
            "left_out": self.left_out,
            "spool_waiting": self.spool_waiting,
            "notes": self.notes,
        }


def explain(target: str, locations: Locations) -> Answer:
    """Explain the graphs of a summary file, or else the graph whose digest or id begins with `target`; raises CommandError."""
    if not target:
        raise UsageError(
            "GRAPH is empty, which would name any graph; give its first digits, or the file of a summary"
        )
    waiting = spool.state(locations.spool).waiting
    is_file = summaries.is_file(target)
    if not is_file and not is_prefix(target):
        raise UsageError(f"{target}: is no file, and {NO_DIGITS}")
    with open_catalogues(locations, waiting) as catalogues:
        if is_file:
            summary = summaries.read_summary(Path(target))
            explanations = explain_summary(summary, *catalogues)
            return Answer(explanations, summary.left_out, waiting, summary.notes)
        # Where there is no catalogue at all, that of the cache says that there is no cache yet.
        found = _of_prefix(target, catalogues or (Catalogue(locations.database),))
    if not found:
        raise UsageError(f"{target}: is no file, and {NOT_FOUND}")
    return Answer(tuple(map(explain_entry, found)), 0, waiting)


@contextlib.contextmanager
def open_catalogues(locations: Locations, waiting: int) -> Iterator[tuple[Catalogue, ...]]:
    """Open the catalogues of cache, spool and shipped decisions, unless empty, in the order in which programs without a daemon read them.

    Raises CommandError if another user may have put something there.
    """
    folders.check_readable(locations)
    kinds: list[tuple[type[Catalogue], Path]] = []
    if locations.database.exists():
        kinds.append((Catalogue, locations.database))
    if waiting:
        kinds.append((SpoolCatalogue, locations.spool))
    with open_with_shipped(*kinds) as opened:
        yield opened


def _of_prefix(prefix: str, catalogues: Sequence[Catalogue]) -> list[EntryDetails]:
    found = _merged(each.of_prefix(prefix) for each in catalogues)
    # Once more for all together: each catalogue has looked at its own graphs alone.
    only_graph(prefix, {each.entry.facts["graph"] for each in found})
    return found


def _merged(answers: Iterable[Sequence[EntryDetails]]) -> list[EntryDetails]:
    """Return all entries found, newest first. An entry in several answers is taken from the first, but a shipped one before a guess."""
    found: dict[str, EntryDetails] = {}
    for each in itertools.chain.from_iterable(answers):
        known = found.setdefault(each.entry.facts["id"], each)
        if each.entry.shipped and known.entry.is_unmeasured:
            found[each.entry.facts["id"]] = each
    return sorted(found.values(), key=lambda each: -each.entry.facts["created_at"])


def explain_summary(summary: Summary, *catalogues: Catalogue) -> tuple[Explanation, ...]:
    """Explain each graph of a summary, in its order; equal records are explained once.

    Without a catalogue, only the program's records are explained.
    """
    times = Counter(summary.decisions)
    graphs = {ran.graph for ran in times}
    known = {graph: _merged(each.of_graph(graph) for each in catalogues) for graph in graphs}
    return tuple(
        _explain_run(ran, count, summary.environments[ran.environment].factors(), known[ran.graph])
        for ran, count in times.items()
    )


def explain_entry(details: EntryDetails) -> Explanation:
    """Explain one entry of the cache."""
    facts = details.entry.facts
    return Explanation(
        graph=facts["graph"],
        kind=facts["kind"],
        environment=facts["environment"],
        factors={name: value for name, value in details.environment.items() if name != "id"},
        ran=None,
        times=0,
        entry=details.entry,
        figures=_figures(details),
        not_used=_why_not_used(facts, spooled=details.entry.spooled),
    )


def _explain_run(
    ran: Deployed, times: int, factors: dict[str, str | int], known: Sequence[EntryDetails]
) -> Explanation:
    here = next((each for each in known if each.entry.facts["environment"] == ran.environment), None)
    # What was not taken although it was known needs no other environment to explain it.
    is_explained = ran.source is Source.CACHE or ran.because is not None
    if here is None:
        nearest = None if ran.because else _nearest(factors, known)
        return Explanation(ran.graph, ran.kind, ran.environment, factors, ran, times, None, nearest=nearest)
    # Why the program did not find what is known now: at that time it was known, if at all, in another environment.
    before = [each for each in known if each.entry.facts["created_at"] < here.entry.facts["created_at"]]
    nearest = None if is_explained else _nearest(factors, before)
    return dataclasses.replace(explain_entry(here), ran=ran, times=times, nearest=nearest)


def _nearest(here: dict[str, str | int], known: Sequence[EntryDetails]) -> Neighbour | None:
    neighbours = (_neighbour(each, here) for each in known)
    return min(
        neighbours,
        key=lambda each: (len(each.differences), -each.entry.facts["created_at"]),
        default=None,
    )


def _neighbour(there: EntryDetails, here: dict[str, str | int]) -> Neighbour:
    not_used = _why_not_used(there.entry.facts, spooled=there.entry.spooled)
    return Neighbour(there.entry, _differences(there.environment, here), not_used)


def _differences(there: dict[str, Any], here: dict[str, str | int]) -> tuple[Difference, ...]:
    return tuple(Difference(name, there[name], value) for name, value in here.items() if there[name] != value)


def _figures(details: EntryDetails) -> tuple[dict[str, Any], ...]:
    """Return the measurements that the decision rests on, in the order of `Deployment`."""
    moment = details.entry.facts["measured_at"]
    # Only those of that time: clocks and loads of two programs differ by more than the policy's noise.
    rows = {row["deployment"]: row for row in details.measurements if row["measured_at"] == moment}
    return tuple(rows[name] for name in Deployment if name in rows)


def _why_not_used(facts: Mapping[str, Any], *, spooled: bool) -> str:
    """Return why programs of this version do not use an entry, and how it is decided anew; empty if they do."""
    if facts["policy"] == POLICY_VERSION:
        return ""
    versions = f"decided by policy {facts['policy']}, and this is policy {POLICY_VERSION}"
    if facts["measured_at"] is None:
        return f"{versions}: decided anew when a program next uses the graph"
    when = "once it is taken in, " if spooled else ""
    cure = f"{when}`pygraphd cache rederive` can apply the present policy"
    return f"{versions}: measured anew when it is met, unless {cure}"


def _how(ran: Deployed) -> dict[str, Any]:
    text = reason_text(ran.reason, final=ran.final)
    said = {name: getattr(ran, name) for name in ("deployment", "final", "source")}
    reasons = {name: dataclasses.asdict(getattr(ran, name)) for name in ("reason", "against")}
    return {**said, **reasons, "text": text, "because": ran.because and dataclasses.asdict(ran.because)}


def _entry_json(entry: CachedEntry, not_used: str) -> dict[str, Any]:
    """Return an entry as `cache inspect --json` does, with whether it is in the spool and why it is not used."""
    return {**entry.as_json(), "spooled": entry.spooled, "not_used": not_used}
