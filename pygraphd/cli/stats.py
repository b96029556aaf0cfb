"""`pygraphd stats`: counts of the daemon's requests and answers, since its start and in all. Starts nothing."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pygraphd import folders
from pygraphd.cli import render
from pygraphd.cli.catalogue import Catalogue
from pygraphd.cli.writing import writing
from pygraphd.daemon import control, statistics
from pygraphd.daemon.statistics import SINCE, Counters
from pygraphd.schema.durations import human_duration
from pygraphd.schema.messages import MAX_COUNT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pygraphd.schema.locations import Locations

_Counts = dict[str, float]
# A label that begins with spaces is a part of the figure above it.
_LABELS = {
    "lookups": "lookups",
    "graphs": "graphs looked up",
    "hits": "hits",
    "team_hits": "  of the team",
    "shipped_hits": "  shipped with the package",
    "misses": "misses",
    "unknown": "  never recorded",
    "other_environment": "  known in other environments",
    "being_measured": "  being measured by another process",
    "provisional": "  provisional",
    "other_policy": "  of another policy",
    "unreadable": "  database unreadable",
    "measuring_saved_s": "measuring saved",
    "recording_saved_s": "recording saved",
    "records": "records stored",
    "spooled": "records from the spool",
    "leases": "leases granted",
    "evicted": "entries evicted",
    "team_asked": "graphs asked of the team",
    "team_found": "graphs known to the team",
    "team_invalid": "team's records not valid",
    "team_published": "records published",
    "team_failed": "team not usable",
    "invalid": "requests invalid",
    "refused": "requests refused",
    "failed": "requests failed",
}


@dataclass(frozen=True, slots=True)
class Statistics:
    """The counts by name, each with `since`, its beginning in seconds since the epoch. None: no daemon runs, or nothing was counted."""

    since_start: _Counts | None
    since_ever: _Counts | None

    def as_json(self) -> dict[str, object]:
        """Return the statistics as `stats --json` has them."""
        return {"schema": 1, **dataclasses.asdict(self)}


def collect(locations: Locations) -> Statistics:
    """Return the statistics: from the daemon if one answers, else from the file. Raises CommandError."""
    if control.ping(locations.socket) is not None:
        # The daemon knows counts that are not in the file yet: it writes them at each housekeeping.
        told = control.stats(locations.socket)
        return Statistics(_counts(told), _counts(told.get("since_ever")))
    # Whoever can write to the folder can put another database there.
    folders.check_readable(locations)
    if not locations.database.exists():
        return Statistics(None, None)
    with Catalogue(locations.database) as catalogue:
        stored = catalogue.read(statistics.read)
    return Statistics(None, None if stored is None else _counts(stored.as_json()))


def begin_anew(locations: Locations) -> None:
    """Begin all counts anew. Where there is neither a daemon nor a database, makes nothing. Raises CommandError."""
    if control.ping(locations.socket) is None:
        folders.check_readable(locations)
        if not locations.database.exists():
            return
    with writing(locations) as writer:
        writer.zero_statistics()


def statistics_text(found: Statistics, now: float | None = None) -> str:
    """Return the statistics as a table; figures that are zero in both columns are left out unless they are the main ones."""
    columns = {
        name: counts
        for name, counts in (("SINCE START", found.since_start), ("ALL TIME", found.since_ever))
        if counts is not None
    }
    if not columns:
        return "nothing was counted yet: the daemon counts lookups and records of programs"
    moment = time.time() if now is None else now
    rows = [("counted for", *(human_duration(moment - counts[SINCE]) for counts in columns.values()))]
    for name, label in _LABELS.items():
        if name in _ALWAYS or any(counts[name] for counts in columns.values()):
            rows.append((label, *(_shown(name)(counts) for counts in columns.values())))
    return render.table(("", *columns), rows)


_ALWAYS = ("lookups", "graphs", "hits", "misses", "measuring_saved_s", "recording_saved_s", "records")


def _shown(name: str) -> Callable[[_Counts], str]:
    if name == "hits":
        return _hits
    return lambda counts: _seconds(counts[name]) if name.endswith("_s") else f"{counts[name]:.0f}"


def _hits(counts: _Counts) -> str:
    share = f" ({counts['hits'] / counts['graphs']:.1%})" if counts["graphs"] else ""
    return f"{counts['hits']:.0f}{share}"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 60 else human_duration(value)


def _counts(told: Any) -> _Counts | None:
    """Return the counts in a daemon's answer; those that a daemon of another version does not have are 0."""
    if not isinstance(told, dict):
        return None
    return {name: _number(told, name) for name in (SINCE, *dataclasses.asdict(Counters()))}


def _number(told: Mapping[str, object], name: str) -> float:
    value = told.get(name)
    # A daemon of another version may answer anything here.
    return value if isinstance(value, int | float) and 0 <= value <= MAX_COUNT else 0
