"""What is known of a graph before it runs: of its outputs and inputs, each by index. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pygraphd.client.analysis.attention_rng import RngState, rng_state_of, undefined_outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.backend.torch_private import CompiledFacts, PartitionMap


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """What a recording of a graph, or of a part of it, is told of it."""

    undefined: frozenset[int] = frozenset()
    """No kernel writes these outputs; see `client/analysis/attention_rng.py`."""
    state: RngState = RngState()  # noqa: RUF009 - it is frozen
    """Scalars that are on the CPU if the graph is launched, and on the GPU if it is captured."""
    is_repeatable: bool = True
    """Nothing in it but kernels of PyTorch's, Inductor's or Triton: it may be launched once more than the program asks for."""
    is_vouched: bool = True
    """So it is, or the user vouches for what else is in it."""
    saved: frozenset[int] = frozenset()
    """These outputs are saved for a backward, and seen by nobody else."""
    name: str = ""
    """The name of the graph in logs."""

    def of_partition(self, maps: Sequence[PartitionMap], partition: int) -> GraphFacts:
        """Return what is known of a partition; there are no `maps` where it has what the graph has."""
        if not maps:
            return self
        mine = maps[partition]
        return GraphFacts(
            _where(mine.outputs, self.undefined),
            self.state.of_partition(mine.inputs, mine.outputs),
            self.is_repeatable,
            self.is_vouched,
            frozenset(at for at, each in enumerate(mine.outputs) if each and self.saved.issuperset(each)),
        )


def facts_of(compiled: CompiledFacts) -> GraphFacts | None:
    """Return what a recording of a compiled graph is told; None: where it keeps random numbers is unknown, so it must be launched."""
    state = RngState() if compiled.is_inference else rng_state_of(compiled.text)
    if state is None:
        return None
    return GraphFacts(
        undefined_outputs(compiled.text), state, compiled.is_repeatable, compiled.is_vouched, compiled.saved
    )


def _where(mine: Sequence[Sequence[int]], outputs: frozenset[int]) -> frozenset[int]:
    return frozenset(index for index, each in enumerate(mine) if not outputs.isdisjoint(each))
