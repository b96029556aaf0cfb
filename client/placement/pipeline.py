"""The rules as one pass over each graph before Inductor lowers it, and what the report says of them. Never raises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.placement import constants, hoist, inputs, provenance
from pygraphd.client.placement.fx_utils import Moved
from pygraphd.client.placement.upload import SENT, sender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.client.common.report import Report

FILES = (
    *(str(each) for each in sorted(Path(__file__).parent.glob("*.py"))),
    *torch_private.FILES,
)
"""Where the rules are, and how Inductor is told of them: its caches keep apart what other versions of these have compiled."""

IN_SUBGRAPH = "it is in a graph within another"
FROZEN = "parameters are frozen into the graph"
NOT_SPLIT = "it is an input, and this mode captures nothing of a graph that has any on the CPU"
FOR_ELSEWHERE = "it is an input, and what is compiled is to run where PyGraph may not be"


class Placement:
    """Applies the rules to graphs, and has what is compiled of these keep what they did; see `provenance.py`."""

    def __init__(self, report: Callable[[], Report | None], place: constants.Place | None = None) -> None:
        """Have what fails when values are sent be noted in what `report` returns then; `place` puts a tensor on a device."""
        self._place = place or _place
        sender.report = report
        torch_private.keep_results(SENT)
        hoist.register()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Change a graph."""
        provenance.keep_that_rules_ran()
        try:
            for count, moved in self._applied(graph):
                provenance.keep({count: moved.uses}, moved.left, moved.lines)
        except Exception as error:  # noqa: BLE001 - within the user's compilation
            provenance.keep_failure(f"placement: {type(error).__name__}: {error}"[:200])

    def _applied(self, graph: torch.fx.Graph) -> Iterator[tuple[str, Moved]]:
        """Yield what each rule has done, once it has, and where that is counted: what was done stays if a later rule fails."""
        if reason := _why_left_alone(graph):
            yield provenance.INPUTS, inputs.leave_all(graph, reason)
            yield provenance.KNOWN, Moved(0, constants.all_left(graph, reason))
            return
        reason = _why_no_inputs()
        of_inputs = inputs.leave_all(graph, reason) if reason else inputs.place_inputs(graph)
        yield provenance.INPUTS, of_inputs
        yield provenance.KNOWN, constants.place_known_values(graph, self._place)
        if torch_private.graphs_are_split():  # elsewhere numbers are passed by value
            yield provenance.KNOWN, Moved(0, constants.numbers_left(graph, of_inputs.takers))


def _why_left_alone(graph: torch.fx.Graph) -> str | None:
    # Their constants do not get along with more that come later: Inductor runs branches again, and caches hold frozen values.
    if torch_private.is_in_subgraph():
        return IN_SUBGRAPH
    return FROZEN if torch_private.has_frozen_values(graph.owning_module) else None


def _why_no_inputs() -> str | None:
    # Nothing is split off where nothing is captured, and scalars are passed by value there. And the operator is ours.
    if not torch_private.graphs_are_split():
        return NOT_SPLIT
    return FOR_ELSEWHERE if torch_private.is_for_elsewhere() else None


def _place(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch_private.without_modes(), torch.inference_mode(False), torch.no_grad():
        return value.to(device)
