"""What is known of a graph's outputs before it runs, each by index. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class OutputFacts:
    """What a recording of a graph, or of a part of it, is told of its outputs."""

    undefined: frozenset[int] = frozenset()
    """No kernel writes these; see `client/undefined.py`."""
    gradients: frozenset[int] = frozenset()
    """Of parameters; see `client/gradients.py`. They may share one allocation."""

    def of_partition(self, maps: Sequence[Sequence[int | None]], partition: int) -> OutputFacts:
        """Return what is known of a partition; `maps` say for each which outputs of the graph its own are, if they differ."""
        if not maps:
            return self
        mine = maps[partition]
        return OutputFacts(_where(mine, self.undefined), _where(mine, self.gradients))


def _where(mine: Sequence[int | None], outputs: frozenset[int]) -> frozenset[int]:
    return frozenset(index for index, output in enumerate(mine) if output in outputs)
