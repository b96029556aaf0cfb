"""How much of a step runs inside CUDA graphs, counted in the events of a profiler's trace; needs no torch.

The events are those of `torch.profiler`'s JSON export. Each kernel carries the correlation id of the call that launched it;
those of a graph carry the one of the graph's launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Event = Mapping[str, Any]

_KERNEL = "kernel"
_CALLS = ("cuda_runtime", "cuda_driver")
_GRAPH_LAUNCH = "GraphLaunch"
"""In the names of all calls that launch a graph: cudaGraphLaunch, cuGraphLaunch and their variants for other streams."""
_GRAPH_FIELDS = ("graph node id", "graph id")
"""Newer profilers write them of all work; zero: not of a graph."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """The kernels of a step, how many of them were launched as part of a graph, and the launches of graphs."""

    kernels_in_graphs: int
    kernels: int
    graph_launches: int

    @property
    def share(self) -> float:
        """Kernels in graphs over all kernels; copies and fills count in neither."""
        return self.kernels_in_graphs / self.kernels

    def __str__(self) -> str:
        return f"{self.kernels_in_graphs} of {self.kernels} kernels in {self.graph_launches} graph launches"


def count(events: Sequence[Event]) -> Coverage | None:
    """Return the coverage of the step that a trace is of; None for a trace without a kernel."""
    kernels = [event for event in events if event.get("cat") == _KERNEL]
    if not kernels:
        return None
    graphs = _named_graphs(events, kernels) | _inferred_graphs(events, kernels)
    in_graphs = sum(_args(event).get("correlation") in graphs for event in kernels)
    # Only launches of kernels: a graph of copies alone takes no part in the share.
    return Coverage(in_graphs, len(kernels), len(graphs & _correlations(kernels)))


def _named_graphs(events: Iterable[Event], work: Iterable[Event]) -> set[int]:
    """Return the launches of graphs, told by the name of the call or by a field of the kernel."""
    by_name = [event for event in events if _is_call(event) and _GRAPH_LAUNCH in str(event.get("name"))]
    by_work = [event for event in work if any(_args(event).get(field) for field in _GRAPH_FIELDS)]
    return _correlations([*by_name, *by_work])


def _inferred_graphs(events: Iterable[Event], kernels: Iterable[Event]) -> set[int]:
    """Return the launches of kernels for which the trace has no call, if it does not tell graphs otherwise.

    The profiler keeps all calls that launch a single kernel, but of the driver's calls (PyGraph launches by these) only
    some: `cuGraphLaunch` is not among them.
    """
    if any(field in _args(kernel) for kernel in kernels for field in _GRAPH_FIELDS):
        return set()
    return _correlations(kernels) - _correlations(event for event in events if _is_call(event))


def _is_call(event: Event) -> bool:
    return event.get("cat") in _CALLS


def _correlations(events: Iterable[Event]) -> set[int]:
    return {_args(event)["correlation"] for event in events if "correlation" in _args(event)}


def _args(event: Event) -> Mapping[str, Any]:
    args: Mapping[str, Any] = event.get("args") or {}
    return args
