"""The text of `pygraphd cache explain`: a block for each graph, with a table of its measurements."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pygraphd.cli import render
from pygraphd.schema.durations import human_duration
from pygraphd.schema.policy import reason_text
from pygraphd.schema.shipped import SHIPPED
from pygraphd.schema.summary import Source

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    from pygraphd.cli.entries import CachedEntry
    from pygraphd.cli.explain import Answer, Explanation, Neighbour
    from pygraphd.schema.summary import Deployed

_DIGITS = 12
SOURCES = {
    Source.CACHE: "looked up in the cache",
    Source.MEASURED: "measured by this program",
    Source.GROUP: "another rank of the process group",
    Source.RULE: "a rule; nothing was measured",
    Source.UNFINISHED: "unfinished; the program ended before it was decided",
}
NOTE_LABELS = {
    "left_to_torch": "left to PyTorch",
    "left_on_cpu": "left on CPU",
    "graph_breaks": "graph break",
    "between_graphs": "between graphs",
    "fallbacks": "ran as KERNELS",
    "failures": "failed",
}
_IN_SPOOL = "looked up in the spool, where it waits for a daemon"
_SHIPPED = "looked up among the shipped decisions"
_UNKNOWN = "not known in any environment; recorded when a program that compiles it runs long enough"


def answer_text(answer: Answer, now: float | None = None) -> str:
    """Return all explanations, and remarks on graphs and files left out."""
    moment = time.time() if now is None else now
    blocks = [_explanation(each, moment) for each in answer.explanations]
    return "\n\n".join(
        [*(blocks or ["no graphs: the program compiled none"]), *_remarks(answer), *notes_text(answer.notes)]
    )


def _remarks(answer: Answer) -> Iterator[str]:
    if answer.left_out:
        yield f"and {answer.left_out} more, which the summary only counts"
    if answer.spool_waiting:
        files = render.plural(answer.spool_waiting, "file", "files")
        yield f"{files} of results not in the cache yet; take them in with: pygraphd start"


def notes_text(notes: dict[str, dict[str, int]]) -> Iterator[str]:
    """Yield one block with the summary's notes: the reasons of each kind, the most frequent first."""
    said = [
        (NOTE_LABELS[name], f"{reason} ({times} times)" if times > 1 else reason)
        for name, reasons in notes.items()
        for reason, times in sorted(reasons.items(), key=lambda item: -item[1])
    ]
    if said:
        yield render.pairs(said)


def _explanation(explanation: Explanation, now: float) -> str:
    facts = [
        ("graph", explanation.graph),
        ("kind", _kind(explanation)),
        ("environment", _environment(explanation)),
        *_said(explanation, now),
        *_provisional(explanation),
        *_not_used(explanation),
        *_nearest(explanation.nearest, now),
        *_measured(explanation.figures, now),
    ]
    text = render.pairs(facts)
    return f"{text}\n{_table(explanation.figures)}" if explanation.figures else text


def _kind(explanation: Explanation) -> str:
    if explanation.entry is None:
        sizes = explanation.ran.sizes if explanation.ran is not None else ()
        return f"{explanation.kind}{render.sizes_text(sizes)}"
    return render.kind_text(explanation.entry.facts)


def _said(explanation: Explanation, now: float) -> Iterator[tuple[str, str]]:
    """Yield the program's record and the stored entry; an equal entry without its reason."""
    ran, entry = explanation.ran, explanation.entry
    if ran is not None:
        times = f" ({explanation.times} times)" if explanation.times > 1 else ""
        text = reason_text(ran.reason, final=ran.final)
        yield "ran as", f"{_deployment(ran.deployment, ran.final)}: {text}{times}"
        yield from render.reason_against(ran.deployment, ran.reason, ran.against)
        yield "source", _source(ran, entry)
        if ran.because:
            yield "not taken", str(ran.because)
    if entry is None:
        is_known = explanation.nearest is not None or (ran is not None and ran.because)
        yield "cache", "not known in this environment" if is_known else _UNKNOWN
        return
    place = "spool" if entry.spooled else "shipped" if entry.shipped else "cache"
    if ran is not None and _agree(ran, entry):
        yield place, "the same" if entry.shipped else f"the same, decided {render.decided_text(entry, now)}"
    else:
        facts = entry.facts
        yield place, f"{_deployment(facts['deployment'], facts['final'])}: {entry.text}"
        yield from render.reason_against(facts["deployment"], entry.reason, entry.against)
        yield "decided", render.decided_text(entry, now)


def _provisional(explanation: Explanation) -> Iterator[tuple[str, str]]:
    if explanation.entry is not None and explanation.entry.provisional:
        yield "provisional", f"{explanation.entry.provisional}: the next program measures it anew"


def _not_used(explanation: Explanation) -> Iterator[tuple[str, str]]:
    if explanation.not_used:
        yield "not used", explanation.not_used


def _source(ran: Deployed, entry: CachedEntry | None) -> str:
    if ran.source is Source.CACHE and entry is not None and (entry.spooled or entry.shipped):
        return _IN_SPOOL if entry.spooled else _SHIPPED
    return SOURCES[ran.source]


def _agree(ran: Deployed, entry: CachedEntry) -> bool:
    facts = entry.facts
    return (ran.deployment, ran.final, ran.reason) == (facts["deployment"], facts["final"], entry.reason)


def _deployment(name: str, final: bool) -> str:
    return name if final else f"{name}?"


def _environment(explanation: Explanation) -> str:
    factors = (f"{name} {value}" for name, value in explanation.factors.items() if value)
    return f"{explanation.environment[:_DIGITS]} ({', '.join(factors)})"


def _nearest(nearest: Neighbour | None, now: float) -> Iterator[tuple[str, str]]:
    if nearest is None:
        return
    facts = nearest.entry.facts
    where = "there, in the spool" if nearest.entry.spooled else "there"
    by = f", by policy {facts['policy']}" if nearest.not_used else ""
    when = render.decided_text(nearest.entry, now)
    decided = when if nearest.entry.shipped else f"decided {when}{by}"
    there = f"{_deployment(facts['deployment'], facts['final'])} {where}, {decided}"
    changes = (f"{each.factor} {_value(each.there)} -> {_value(each.here)}" for each in nearest.differences)
    yield "nearest", f"environment {facts['environment'][:_DIGITS]} ({there})"
    # The version of keys is part of a digest: after a change of it, equal factors have another one.
    yield "differs in", ", ".join(changes) or "no factor: its key is of another version"


def _value(factor: str | int) -> str:
    return str(factor) or "none"


def _measured(figures: Sequence[dict[str, Any]], now: float) -> Iterator[tuple[str, str]]:
    """Yield host, user, version and age of the measurements; as a rule one line for all."""
    names: dict[str, list[str]] = {}
    for row in figures:
        age = human_duration(now - row["measured_at"])
        # Shipped rows have no user: the 0 that they have would be root's.
        who = "" if row["host"].startswith(SHIPPED) else f" by uid {row['uid']}"
        origin = f"{age} ago on {row['host']}{who}, pygraphd {row['version']}"
        names.setdefault(origin, []).append(row["deployment"])
    return (("measured", f"{', '.join(some)}: {origin}") for origin, some in names.items())


def _table(figures: Sequence[dict[str, Any]]) -> str:
    return render.table(render.FIGURES, [render.figure_cells(row) for row in figures])
