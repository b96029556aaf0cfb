"""The rules as one pass over each graph before Inductor lowers it, and what the report says of them. Never raises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pygraphd.client import _torch
from pygraphd.client.placement import arithmetic, inputs, items, known, told
from pygraphd.client.placement.nodes import Moved
from pygraphd.client.placement.sending import SENT, sender

if TYPE_CHECKING:
    from collections.abc import Callable

    from pygraphd.client.report import Report

FILES = tuple(
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("passes", "known", "inputs", "arithmetic", "sending", "items", "nodes", "told")
)
"""Where the rules are: Inductor's caches keep apart what other versions of them have compiled."""

IN_SUBGRAPH = "it is in a graph within another"
FROZEN = "parameters are frozen into the graph"
NOT_SPLIT = "it is an input, and this mode captures nothing of a graph that has any on the CPU"
FOR_ELSEWHERE = "it is an input, and what is compiled is to run where PyGraph may not be"


class Placement:
    """Applies the rules to graphs, and has what is compiled of these keep what they did; see `told.py`."""

    def __init__(self, report: Callable[[], Report | None], place: known.Place | None = None) -> None:
        """Note what fails in what `report` returns at that time; `place` puts a tensor on a device."""
        self._report = report
        self._place = place or _place
        sender.report = report
        _torch.keep_results(SENT)
        arithmetic.register()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change a graph."""
        try:
            of_items, of_inputs, of_known = self._applied(graph)
        except Exception as error:  # noqa: BLE001 - within the user's compilation
            if (report := self._report()) is not None:
                report.fail(f"placement: {type(error).__name__}: {error}"[:200])
            return
        counts = dict(zip(told.COUNTS, (of_known.uses, of_inputs.uses, of_items.uses), strict=True))
        told.keep(counts, (*of_items.left, *of_inputs.left, *of_known.left), of_inputs.lines)

    def _applied(self, graph: torch.fx.Graph) -> tuple[Moved, Moved, Moved]:
        """Return what the rules have done: that for numbers, that for inputs, and that for known values."""
        if reason := _why_left_alone(graph):
            of_items, of_known = (Moved(0, rule.all_left(graph, reason)) for rule in (items, known))
            return of_items, inputs.leave_all(graph, reason), of_known
        of_items = items.keep_items(
            graph, split=_torch.graphs_are_split()
        )  # first: its tensors may be inputs
        reason = _why_no_inputs()
        of_inputs = inputs.leave_all(graph, reason) if reason else inputs.place_inputs(graph)
        of_known = known.place_known_values(graph, self._place)
        if _torch.graphs_are_split():  # elsewhere numbers are passed by value
            of_known = Moved(of_known.uses, of_known.left + known.numbers_left(graph, of_inputs.takers))
        return of_items, of_inputs, of_known


def _why_left_alone(graph: torch.fx.Graph) -> str | None:
    # Their constants do not get along with more that come later: Inductor runs branches again, and caches hold frozen values.
    if _torch.is_in_subgraph():
        return IN_SUBGRAPH
    return FROZEN if _torch.has_frozen_values(graph.owning_module) else None


def _why_no_inputs() -> str | None:
    # Nothing is split off where nothing is captured, and scalars are passed by value there. And the operator is ours.
    if not _torch.graphs_are_split():
        return NOT_SPLIT
    return FOR_ELSEWHERE if _torch.is_for_elsewhere() else None


def _place(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    with _torch.without_modes(), torch.inference_mode(False), torch.no_grad():
        return value.to(device)
