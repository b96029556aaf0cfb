"""The text of `pygraphd cache show`: the decision, the environment, and a table of all measurements."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from pygraphd.cli import render
from pygraphd.cli.output import printable
from pygraphd.cli.wrapping import wrapped
from pygraphd.schema.durations import human_duration

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from pygraphd.cli.entries import CachedEntry, EntryDetails

_TIMES = render.FIGURES.index("GPU BUSY")
"""The number of columns up to the times of a measurement."""


def entry_text(details: EntryDetails, now: float | None = None) -> str:
    """Return one entry with its environment and measurements."""
    moment = time.time() if now is None else now
    blocks = (
        render.pairs(_entry_facts(details.entry, moment)),
        render.pairs(_environment_facts(details.environment)),
        _measured(details, moment),
    )
    return "\n\n".join(blocks)


def _entry_facts(entry: CachedEntry, now: float) -> list[tuple[str, str]]:
    facts = entry.facts
    last = facts["last_hit"]
    provisional = f" (provisional: {entry.provisional})" if entry.provisional else ""
    last_hit = f", last {human_duration(now - last)} ago" if isinstance(last, float) else ""
    return [
        ("entry", str(facts["id"])),
        ("graph", str(facts["graph"])),
        ("kind", render.kind_text(facts)),
        ("deployment", f"{facts['deployment']}{provisional}"),
        ("reason", entry.text),
        *render.reason_against(facts["deployment"], entry.reason, entry.against),
        ("decided", f"{render.decided_text(entry, now)}, policy {facts['policy']}"),
        *_measured_when(facts, now),
        ("hits", f"{render.hits_text(entry)}{last_hit}"),
    ]


def _measured_when(facts: dict[str, Any], now: float) -> list[tuple[str, str]]:
    moment = facts["measured_at"]
    return [] if moment is None else [("measured", f"{human_duration(now - moment)} ago")]


def _environment_facts(environment: dict[str, object]) -> list[tuple[str, str]]:
    return [("environment" if name == "id" else name, str(value)) for name, value in environment.items()]


def _measured(details: EntryDetails, now: float) -> str:
    if not details.measurements:
        return "no measurements"
    header = (*render.FIGURES, "HOST", "VERSION", "UID", "AGE")
    rows = [_measurement_cells(row, now) for row in details.measurements]
    return render.table(header, rows) if render.fits(header, rows) else _in_two_lines(rows)


def _measurement_cells(row: dict[str, object], now: float) -> tuple[str, ...]:
    measured_at = row["measured_at"]
    assert isinstance(measured_at, float)
    origin = (str(row["host"]), str(row["version"]), str(row["uid"]))
    return (*render.figure_cells(row), *origin, human_duration(now - measured_at))


def _in_two_lines(rows: Sequence[tuple[str, ...]]) -> str:
    """Return measurements for a narrow terminal: the times of each, and below them all else."""
    header, *lines = render.plain_lines(render.FIGURES[:_TIMES], [row[:_TIMES] for row in rows])
    below = (
        f"  GPU busy {busy}, {age} ago on {host}, pygraphd {version}, uid {uid}"
        for busy, host, version, uid, age in (row[_TIMES:] for row in rows)
    )
    return "\n".join(
        [header, *(f"{line}\n{wrapped(printable(more), 4)}" for line, more in zip(lines, below, strict=True))]
    )
