"""Answers to lookups, written as JSON straight from the rows of the database.

To make an `Entry` of each row and to encode that takes longer than to read it. The text equals that of `encode` for a
`LookupAnswer`; a row of which no valid `Entry` can be made is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pygraphd.daemon import statistics
from pygraphd.schema import offline
from pygraphd.schema.checks import check_int, check_number, check_text
from pygraphd.schema.messages import MAX_HOST, MAX_MICROSECONDS, MAX_TIME, MAX_UID, LookupRequest, encode
from pygraphd.schema.portable import TEAM
from pygraphd.schema.shipped import is_unmeasured
from pygraphd.schema.version import VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pygraphd.daemon.statistics import Counters
    from pygraphd.schema.offline import Row
    from pygraphd.schema.shipped import Shipped, ShippedDecision

_NULL = "null"
_VERSION = json.dumps(VERSION)


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to one lookup: `texts` has the entries as JSON, by graph.

    `unusable` has, of those that a program cannot use, the counter of the reason, and `missing` that of the reason why there is no
    entry. `unmeasured` say no more than that a program ended early. `from_team` are those that can be used and came from the team's database.
    """

    request: LookupRequest
    texts: dict[str, str] = field(default_factory=dict)
    unusable: dict[str, str] = field(default_factory=dict)
    unmeasured: list[str] = field(default_factory=list)
    from_team: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def with_shipped(self, shipped: Shipped) -> tuple[Found, list[ShippedDecision]]:
        """Have shipped decisions replace misses and unmeasured entries; return the remaining answer, and these decisions."""
        found = shipped.for_unanswered(self.request, self.texts.keys() - self.unmeasured)
        if not found and not self.missing:
            return self, found
        better = {each.entry.graph for each in found}
        # Shipped for another environment: `cache explain` can name the factors that differ.
        missing = {
            graph: "other_environment" if why == "unknown" and graph in shipped.graphs else why
            for graph, why in self.missing.items()
            if graph not in better
        }
        texts = {graph: text for graph, text in self.texts.items() if graph not in better}
        unusable = {graph: why for graph, why in self.unusable.items() if graph not in better}
        return dataclasses.replace(self, texts=texts, unusable=unusable, missing=missing), found

    def count(
        self, counters: Counters, shipped: Sequence[ShippedDecision], is_measured: Callable[[str], bool]
    ) -> None:
        """Add the answer, with some shipped decisions, to the counters; `is_measured`: whether a process measures a graph."""
        reasons = list(self.unusable.values())
        reasons += ("being_measured" if is_measured(graph) else why for graph, why in self.missing.items())
        counters.lookups += 1
        counters.graphs += len(self.request.graphs)
        counters.hits += len(self.texts) - len(self.unusable) + len(shipped)
        counters.team_hits += len(self.from_team)
        counters.misses += len(reasons)
        for why in reasons:
            setattr(counters, why, getattr(counters, why) + 1)
        if shipped:
            counters.shipped_hits += len(shipped)
            counters.measuring_saved_s += sum(each.measuring_us for each in shipped) / 1e6
            counters.recording_saved_s += sum(each.recording_us for each in shipped) / 1e6

    def encode(self, shipped: Sequence[ShippedDecision] = ()) -> bytes:
        """Return the body of the answer, with some shipped decisions."""
        texts = ",".join([*self.texts.values(), *(encode(each.entry).decode() for each in shipped)])
        answer = f'{{"environment":"{self.request.environment}","version":{_VERSION},"entries":[{texts}]}}'
        return answer.encode()


def found_in(request: LookupRequest, rows: Sequence[Row]) -> Found:
    """Return the answer that some rows make; nothing is missing in it yet."""
    found = Found(request)
    for graph, *decision, uid, host, cost_us, measured_at, host_us, span_us in rows:
        try:
            chosen, why_not, may_be_guess = _decision(*decision)
            at, cost = _number(measured_at, MAX_TIME), _number(cost_us, MAX_MICROSECONDS)
            host_cost, span = _number(host_us, MAX_MICROSECONDS), _number(span_us, MAX_MICROSECONDS)
            # The graph is one of the request's, so it is a digest.
            found.texts[graph] = (
                f'{{"graph":"{graph}","decision":{chosen},{_origin(uid, host)},"cost_us":{cost},"measured_at":{at},'
                f'"host_us":{host_cost},"span_us":{span}}}'
            )
        # One bad row must not empty the answer for the other graphs.
        except ValueError:
            continue
        if why_not is not None:
            found.unusable[graph] = why_not
            if may_be_guess and measured_at is None:
                found.unmeasured.append(graph)
        elif host.startswith(TEAM):
            found.from_team.append(graph)
    return found


# Few of both differ among the entries of a program.
@functools.lru_cache(maxsize=1024)
def _decision(*columns: str | int) -> tuple[str, str | None, bool]:
    decision = offline.decision_of(*columns)
    text = json.dumps(dataclasses.asdict(decision), separators=(",", ":"))
    return text, statistics.why_missed(decision), is_unmeasured(decision, None)


@functools.lru_cache(maxsize=64)
def _origin(uid: int | None, host: str) -> str:
    text = json.dumps(check_text("host", host, maximum=MAX_HOST))
    return f'"uid":{_NULL if uid is None else check_int("uid", uid, maximum=MAX_UID)},"host":{text}'


def _number(value: object, most: float) -> str:
    if value is None:
        return _NULL
    # As `json.dumps` writes a float. NaN fails the comparison, and infinity exceeds the bound.
    if type(value) is float and 0.0 <= value <= most:
        return repr(value)
    return repr(check_number("number", value, maximum=most))
