"""The rules as one pass over each graph before Inductor lowers it, and what the report says of them. Never raises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pygraphd.client import _torch
from pygraphd.client.placement import known, nodes

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.report import Report

FILES = tuple(str(Path(__file__).with_name(name)) for name in ("passes.py", "known.py", "nodes.py"))
"""Where the rules are: Inductor's caches keep apart what other versions of them have compiled."""


class Placement:
    """Applies the rules to graphs, and notes what they did."""

    def __init__(self, report: Callable[[], Report | None], place: known.Place | None = None) -> None:
        """Note it in what `report` returns at that time; `place` puts a tensor on a device."""
        self._report = report
        self._place = place or _place

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change a graph."""
        report = self._report()
        try:
            reason = _why_left_alone(graph)
            moved = nodes.Moved(0, known.all_left(graph, reason)) if reason else self._moved(graph)
        except Exception as error:  # noqa: BLE001 - within the user's compilation
            if report is not None:
                report.fail(f"placement: {type(error).__name__}: {error}"[:200])
            return
        if report is not None:
            report.count(placed=moved.uses)
            for reason in moved.left:
                report.leave_on_cpu(reason)

    def _moved(self, graph: torch.fx.Graph) -> nodes.Moved:
        return known.place_known_values(graph, self._place)


def _why_left_alone(graph: torch.fx.Graph) -> str | None:
    # Their constants do not get along with more that come later: Inductor runs branches again, and caches hold frozen values.
    if _torch.is_in_subgraph():
        return "it is in a graph within another"
    if _torch.has_frozen_values(graph.owning_module):
        return "parameters are frozen into the graph"
    return None


def _place(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    with _torch.without_modes(), torch.inference_mode(False), torch.no_grad():
        return value.to(device)
