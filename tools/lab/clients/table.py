"""A result of `clients` as Markdown: times, memory, failures and differing results."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from tools.lab.stored import markdown_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tools.lab.clients.records import ClientRecord

_NOTHING = "-"
_RATIOS = (
    ("default", "pygraph-default", "`default` over ours"),
    ("reduce-overhead", "pygraph-cold", "`reduce-overhead` over ours"),
)


def render(records: Sequence[ClientRecord]) -> str:
    """Return the tables, and below them a line for each process that raised or came to other results."""
    shown = [each for each in records if not each.skipped]
    skipped = dict.fromkeys(
        f"- {each.client} was skipped: {each.skipped}" for each in records if each.skipped
    )
    parts = [_times(shown), _memory(shown), _graphs(shown), "\n".join([*_notes(shown), *skipped])]
    return "\n\n".join(part for part in parts if part)


def _times(records: Sequence[ClientRecord]) -> str:
    variants, clients = _variants(records), _clients(records)
    ratios = [each for each in _RATIOS if each[0] in variants and each[1] in variants]
    rows = [["ms a step", *variants, *(label for _, _, label in ratios)]]
    for client in clients:
        cells = [_cell(_of(records, client, variant), _step_ms) for variant in variants]
        rows.append([client, *cells, *(_ratio(records, client, above, ours) for above, ours, _ in ratios)])
    return markdown_table(rows[0], rows[1:])


def _memory(records: Sequence[ClientRecord]) -> str:
    if not any(each.reserved_mb for each in records):
        return ""
    variants = _variants(records)
    rows = [["reserved MB", *variants]]
    rows += [
        [client, *(_cell(_of(records, client, variant), _reserved) for variant in variants)]
        for client in _clients(records)
    ]
    return markdown_table(rows[0], rows[1:])


def _graphs(records: Sequence[ClientRecord]) -> str:
    variants = [name for name in _variants(records) if any(e.deployed for e in records if e.variant == name)]
    if not variants:
        return ""
    rows = [["graphs as GRAPH, as KERNELS", *variants]]
    rows += [
        [client, *(_deployed(_of(records, client, variant)) for variant in variants)]
        for client in _clients(records)
    ]
    return markdown_table(rows[0], rows[1:])


def _notes(records: Sequence[ClientRecord]) -> Iterator[str]:
    for each in records:
        if each.raised:
            yield f"- {each.client}, {each.variant} raised: {each.raised}"
        if each.agrees is False:
            yield f"- {each.client}, {each.variant} DIFFERS from {each.against} by {each.difference:.3g}"
        if each.failures:
            yield f"- {each.client}, {each.variant}: failures of PyGraph: {'; '.join(each.failures)}"


def _step_ms(records: Sequence[ClientRecord]) -> str:
    return _ms(statistics.median(each.step_ms for each in records if each.step_ms is not None))


def _reserved(records: Sequence[ClientRecord]) -> str:
    known = [each.reserved_mb for each in records if each.reserved_mb is not None]
    return f"{max(known):.0f}" if known else _NOTHING


def _cell(records: Sequence[ClientRecord], figure: Callable[[Sequence[ClientRecord]], str]) -> str:
    # A median over the processes that did not raise would hide the others.
    good = [each for each in records if not each.raised]
    if len(good) < len(records):
        return "raises"
    return figure(good) if good else _NOTHING


def _ratio(records: Sequence[ClientRecord], client: str, above: str, ours: str) -> str:
    both = [_of(records, client, variant) for variant in (above, ours)]
    if any(not each or any(record.raised for record in each) for each in both):
        return _NOTHING
    first, second = (statistics.median(r.step_ms for r in each if r.step_ms) for each in both)
    return f"{first / second:.2f}"


def _deployed(records: Sequence[ClientRecord]) -> str:
    if not records or not (deployed := records[-1].deployed):
        return _NOTHING
    return ", ".join(str(deployed.get(name, 0)) for name in ("GRAPH", "KERNELS"))


def _of(records: Sequence[ClientRecord], client: str, variant: str) -> list[ClientRecord]:
    return [each for each in records if (each.client, each.variant) == (client, variant)]


def _variants(records: Sequence[ClientRecord]) -> list[str]:
    return list(dict.fromkeys(each.variant for each in records))


def _clients(records: Sequence[ClientRecord]) -> list[str]:
    return list(dict.fromkeys(each.client for each in records))


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"
