"""Calls whose inputs are aligned or overlap otherwise than their recording can serve, and what the next recording has to support.

A recording serves inputs that are aligned at least as well as at its capture, and that overlap as they did if they did. A recording that
is made with the worst alignment seen, and with inputs apart, serves all of these calls: so a few recordings end the mismatches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from pygraphd.client.backend.errors import LayoutMismatch
from pygraphd.client.common.backoff import Backoff
from pygraphd.client.replay.relocation_table import MAX_ALIGNMENT, alignment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

FIRST = 2
"""Mismatches of a size after which it is recorded again: a single one may be chance."""
FACTOR = 4
"""How many times as many further mismatches the next recording takes: each recording costs as much as hundreds of calls."""


@dataclass(frozen=True, slots=True)
class LayoutConstraints:
    """What a recording has to support."""

    alignments: Mapping[int, int] = field(default_factory=dict)
    """The worst alignment of each input, in bytes by index of the input."""
    apart: bool = False
    """Whether inputs that overlap in this call need not do so in others."""


class LayoutMismatches:
    """The calls of one size whose inputs did not match the layout of its recording."""

    def __init__(self) -> None:
        self._alignments: dict[int, int] = {}
        self._apart = False
        self._backoff = Backoff(FIRST, FACTOR)

    def add(self, inputs: Sequence[Any], mismatch: LayoutMismatch) -> bool:
        """Note the layout of a call that did not match; return whether the size is to be recorded again."""
        self._apart |= mismatch is LayoutMismatch.OVERLAP
        for index, value in enumerate(inputs):
            if isinstance(value, torch.Tensor) and (found := alignment(value.data_ptr())) < MAX_ALIGNMENT:
                self._alignments[index] = min(found, self._alignments.get(index, MAX_ALIGNMENT))
        return self._backoff.count()

    @property
    def constraints(self) -> LayoutConstraints:
        """What the next recording has to support."""
        return LayoutConstraints(self._alignments, self._apart)
