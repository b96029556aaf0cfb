"""Calls that a recording does not fit for where their inputs lie, and what the next recording has to allow for.

A recording holds for inputs that are aligned as well as they were, and that overlap as they did if they overlapped. One that was
made with inputs that are aligned worse, or lie apart, holds for all of these: so after a few misfits none are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pygraphd.client.backend.errors import Misfit
from pygraphd.client.replay.relocation_table import MAX_ALIGNMENT, alignment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    Sizes = tuple[int, ...]

FIRST = 2
"""Misfits after which it is recorded anew: once may be by chance."""
LESS_OFTEN = 4
"""How many times as many it takes the next time."""


@dataclass(frozen=True, slots=True)
class Leeway:
    """What a recording has to allow for: the worst alignment of inputs, in bytes by index, and that they need not overlap as they do."""

    alignments: Mapping[int, int] = field(default_factory=dict)
    apart: bool = False


class Misfits:
    """What did not fit the recordings of one callable, by its sizes."""

    def __init__(self) -> None:
        self._calls: dict[Sizes, int] = {}
        self._alignments: dict[Sizes, dict[int, int]] = {}
        self._apart: set[Sizes] = set()

    def note(self, sizes: Sizes, inputs: Sequence[Any], misfit: Misfit) -> bool:
        """Note a call whose inputs did not fit; return whether it is to be recorded."""
        if misfit is Misfit.OVERLAP:
            self._apart.add(sizes)
        worst = self._alignments.setdefault(sizes, {})
        for index, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and (found := alignment(value.data_ptr())) < MAX_ALIGNMENT:
                worst[index] = min(found, worst.get(index, MAX_ALIGNMENT))
        calls = self._calls[sizes] = self._calls.get(sizes, 0) + 1
        return _is_due(calls)

    def leeway(self, sizes: Sizes) -> Leeway:
        """Return what a recording of some sizes is to allow for."""
        return Leeway(self._alignments.get(sizes, {}), sizes in self._apart)


def _is_due(calls: int) -> bool:
    due = FIRST
    while due < calls:
        due *= LESS_OFTEN
    return due == calls
