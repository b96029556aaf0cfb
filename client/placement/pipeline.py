"""The placement passes as one custom pass of Inductor, over each graph before it is lowered. It never raises."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.common.signals import raised_by_handler
from pygraphd.client.placement import constants, fx_utils, hoist, inputs, provenance
from pygraphd.client.placement.fx_utils import PassResult
from pygraphd.client.placement.upload import SENT, STAGED, sender

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pygraphd.client.common.report import Report

FILES = (
    *(str(each) for each in sorted(Path(__file__).parent.glob("*.py"))),
    *torch_private.FILES,
)
"""The source files of the passes: Inductor hashes them into its cache keys, so that code of another version is not reused."""

IN_SUBGRAPH = "it is in a subgraph"
FROZEN = "parameters are frozen into the graph"
NOT_SPLIT = "it is an input, and graphs are not partitioned in this mode"
ON_STREAMS = "it is an input, and the graph uses streams of the program"
FOR_ELSEWHERE = "it is an input, and the code is compiled for processes without PyGraph"


class Placement:
    """Runs the passes on a graph, and saves their results with the compiled code (`provenance.py`)."""

    def __init__(
        self, report: Callable[[], Report | None], to_device: constants.ToDevice | None = None
    ) -> None:
        """Count failures of later uploads in the report that `report` returns; `to_device` copies a constant to a device."""
        self._to_device = to_device or _to_device
        sender.report = report
        torch_private.keep_results(SENT)  # it returns them again
        torch_private.keep_results(STAGED)  # the GPU may still be reading
        hoist.register()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Run all passes on a graph, in place; an exception is saved as a failure."""
        torch_private.count_in_compilation(provenance.RAN, 1)
        try:
            for counter, result in self._run_passes(graph):
                provenance.save(counter, result)
            if not torch_private.is_in_subgraph():
                provenance.save_module(graph)
        except Exception as error:
            # Within the user's compilation, which goes on with the graph as far as it was changed.
            if raised_by_handler(error):
                raise
            failure = f"placement: {type(error).__name__}: {error}"[:200]
            torch_private.count_in_compilation(provenance.FAILED + failure, 1)

    def _run_passes(self, graph: torch.fx.Graph) -> Iterator[tuple[str, PassResult]]:
        """Yield the counter's name and the result of each pass when it has ended: changes stay if a later pass fails."""
        if reason := _why_skip_graph(graph):
            yield provenance.INPUTS, inputs.skip_all(graph, reason)
            yield provenance.KNOWN, PassResult(0, constants.skip_all_uses(graph, reason))
            return
        reason = _why_skip_inputs(graph)
        of_inputs = inputs.skip_all(graph, reason) if reason else inputs.place_inputs(graph)
        yield provenance.INPUTS, of_inputs
        yield provenance.KNOWN, constants.place_constants(graph, self._to_device)
        if torch_private.graphs_are_split():  # else scalars are passed by value
            yield provenance.KNOWN, PassResult(0, constants.scalar_messages(graph, of_inputs.users))


def _why_skip_graph(graph: torch.fx.Graph) -> str | None:
    # New constants would be lost: Inductor traces branches again, and its caches hold frozen parameters.
    if torch_private.is_in_subgraph():
        return IN_SUBGRAPH
    if torch_private.is_for_package():
        return FOR_ELSEWHERE
    return FROZEN if torch_private.has_frozen_values(graph.owning_module) else None


def _why_skip_inputs(graph: torch.fx.Graph) -> str | None:
    # The values would be sent on the current stream, for which nothing makes the graph's other streams wait.
    if any(map(fx_utils.is_on_a_stream, graph.nodes)):
        return ON_STREAMS
    # Without partitions the upload cannot be split off, and scalars are passed by value. And the operator is ours.
    if not torch_private.graphs_are_split():
        return NOT_SPLIT
    return FOR_ELSEWHERE if torch_private.is_for_export() else None


def _to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    with torch_private.without_modes(), torch.inference_mode(False), torch.no_grad():
        return value.to(device)
