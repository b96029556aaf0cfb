"""Which outputs of a compiled backward are the gradients of parameters, told from its forward. Knows nothing of torch.

A backward returns one gradient for each input of its forward, in their order. Those of parameters are let go of together, when
the optimiser is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.client import graph_text

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class Inputs:
    """How many inputs a forward has, and which of them stay where they are from call to call: parameters and buffers."""

    count: int
    static: frozenset[int]


def inputs_of(text: str, static: Iterable[int]) -> Inputs | None:
    """Return the inputs of a graph as FX prints it; None if the text is not understood."""
    names = graph_text.inputs(text)
    return Inputs(len(names), frozenset(static)) if names is not None else None


def gradients_of_parameters(forward: Inputs | None, text: str) -> frozenset[int]:
    """Return the indices of these among the outputs of a backward; none if it does not return what is expected."""
    names = graph_text.returned(text)
    if forward is None or names is None or len(names) != forward.count:
        return frozenset()
    return frozenset(index for index in forward.static if index < len(names) and names[index] != "None")
