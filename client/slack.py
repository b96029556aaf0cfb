"""How much longer work may take on the GPU than its call on the host before anybody waits for it.

It is hidden by the pause after the call, and by what later calls take longer on the host than on the GPU, up to where the host may
wait for a result. Of a step that is bound by the host that is all of the GPU's time.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.timeline import Entry
    from pygraphd.schema.messages import Deployment

    Calls = Sequence[tuple[Entry, Entry | None]]
    """Calls in their order, each with the next one on its stream."""

LONGER = 1.5
"""A pause of so many times the shortest one between the calls of two regions, and"""
WAIT_US = 10.0
"""so much longer, may be a wait."""


def add_slack(calls: Calls) -> None:
    """Add what later calls give to what comes after each."""
    pauses_us, gains_us = _shortest_pauses(calls), _gains(calls)
    for entry, following in reversed(calls):
        if following is None or following.region not in gains_us:
            continue
        shortest_us, pause_us = pauses_us.get((entry.region, following.region)), entry.pause_us(following)
        if shortest_us is not None and pause_us <= LONGER * shortest_us + WAIT_US:
            later_us = max(0.0, gains_us[following.region] + following.after_us)
            entry.after_us = max(entry.after_us, min(shortest_us, pause_us)) + later_us


def _shortest_pauses(calls: Calls) -> dict[tuple[int, int], float]:
    """Return what the host does at least between calls of two regions, for those where it was seen not to wait for the first."""
    found: dict[tuple[int, int], float] = {}
    for entry, following in calls:
        if following is not None and not following.apart:
            key, pause_us = (entry.region, following.region), entry.pause_us(following)
            found[key] = min(pause_us, found.get(key, pause_us))
    return found


def _gains(calls: Calls) -> dict[int, float]:
    """Return how much longer a call of each region takes on the host than on the GPU, however it will be deployed."""
    host_us: dict[int, dict[Deployment, list[float]]] = {}
    span_us: dict[int, float] = {}
    for entry, _ in calls:
        if entry.fair and entry.lead_us is not None:
            host_us.setdefault(entry.region, {}).setdefault(entry.deployment, []).append(entry.host_us)
            # One that waited for the host says how long that took; the shortest has waited least.
            span_us[entry.region] = min(entry.span_us, span_us.get(entry.region, entry.span_us))
    quickest_us = {region: min(map(statistics.median, by.values())) for region, by in host_us.items()}
    return {region: quickest_us[region] - span_us[region] for region in quickest_us}
