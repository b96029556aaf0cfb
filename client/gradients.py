"""Which outputs of a compiled backward are the gradients of parameters, told from its forward. Knows nothing of torch.

A backward returns one gradient for each input of its forward, in their order. Those of parameters are let go of together, when
the optimiser is done with them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SIGNATURE = re.compile(r"^ *def forward\(self, (.*)\):?", re.MULTILINE)
_INPUT = re.compile(r'\w+(?:: "[^"]*")?(?:, |$|(?=\)))')
_RETURN = re.compile(r"^ +return \((.*)\)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Inputs:
    """How many inputs a forward has, and which of them stay where they are from call to call: parameters and buffers."""

    count: int
    static: frozenset[int]


def inputs_of(text: str, static: Iterable[int]) -> Inputs | None:
    """Return the inputs of a graph as FX prints it; None if the text is not understood."""
    signatures = _SIGNATURE.findall(text)
    return Inputs(len(_INPUT.findall(signatures[0])), frozenset(static)) if len(signatures) == 1 else None


def gradients_of_parameters(forward: Inputs | None, text: str) -> frozenset[int]:
    """Return the indices of these among the outputs of a backward; none if it does not return what is expected."""
    returned = _RETURN.findall(text)
    if forward is None or len(returned) != 1:
        return frozenset()
    names = [name.strip(",") for name in returned[0].split(", ")]
    if len(names) != forward.count:
        return frozenset()
    return frozenset(index for index in forward.static if index < len(names) and names[index] != "None")
