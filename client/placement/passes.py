"""The rules as one pass over each graph before Inductor lowers it, and what the report says of them. Never raises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pygraphd.client import _torch
from pygraphd.client.placement import arithmetic, inputs, known, told
from pygraphd.client.placement.nodes import Moved
from pygraphd.client.placement.sending import SENT, sender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.client.report import Report

FILES = (
    *(str(each) for each in sorted(Path(__file__).parent.glob("*.py"))),
    str(Path(__file__).parents[1] / "_torch.py"),
)
"""Where the rules are, and how Inductor is told of them: its caches keep apart what other versions of these have compiled."""

IN_SUBGRAPH = "it is in a graph within another"
FROZEN = "parameters are frozen into the graph"
NOT_SPLIT = "it is an input, and this mode captures nothing of a graph that has any on the CPU"
FOR_ELSEWHERE = "it is an input, and what is compiled is to run where PyGraph may not be"


class Placement:
    """Applies the rules to graphs, and has what is compiled of these keep what they did; see `told.py`."""

    def __init__(self, report: Callable[[], Report | None], place: known.Place | None = None) -> None:
        """Have what fails when values are sent be noted in what `report` returns then; `place` puts a tensor on a device."""
        self._place = place or _place
        sender.report = report
        _torch.keep_results(SENT)
        arithmetic.register()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change a graph."""
        told.keep_that_rules_ran()
        try:
            for count, moved in self._applied(graph):
                told.keep({count: moved.uses}, moved.left, moved.lines)
        except Exception as error:  # noqa: BLE001 - within the user's compilation
            told.keep_failure(f"placement: {type(error).__name__}: {error}"[:200])

    def _applied(self, graph: torch.fx.Graph) -> Iterator[tuple[str, Moved]]:
        """Yield what each rule has done, once it has, and where that is counted: what was done stays if a later rule fails."""
        if reason := _why_left_alone(graph):
            yield told.INPUTS, inputs.leave_all(graph, reason)
            yield told.KNOWN, Moved(0, known.all_left(graph, reason))
            return
        reason = _why_no_inputs()
        of_inputs = inputs.leave_all(graph, reason) if reason else inputs.place_inputs(graph)
        yield told.INPUTS, of_inputs
        yield told.KNOWN, known.place_known_values(graph, self._place)
        if _torch.graphs_are_split():  # elsewhere numbers are passed by value
            yield told.KNOWN, Moved(0, known.numbers_left(graph, of_inputs.takers))


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
