"""Collects the facts of a graph that a recording needs before the graph runs. Inputs and outputs are given by index. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pygraphd.client.analysis.atomic_sums import atomic_outputs
from pygraphd.client.analysis.attention_rng import RngState, rng_state_of, undefined_outputs
from pygraphd.client.analysis.fx_text import overwritten_inputs, tangents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.backend.torch_private import CompiledFacts, PartitionMap


@dataclass(slots=True, eq=False)
class BackwardFacts:
    """Facts of the backward of a graph. It is compiled later than its forward, often at its own first call."""

    returned_sizes: frozenset[int] | None = None
    """See `CompiledFacts.returned_sizes`; None also until the backward is compiled."""


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """Facts of a graph, or of one of its partitions, for its recordings."""

    undefined: frozenset[int] = frozenset()
    """Outputs of which no kernel writes all, so that their values mean nothing; see `attention_rng.py`."""
    state: RngState = RngState()  # noqa: RUF009 - it is frozen
    """Scalars that are on the CPU in KERNELS, and on the GPU in a GRAPH."""
    is_repeatable: bool = True
    """Whether all kernels are PyTorch's, Inductor's or Triton's, so that one more run is harmless."""
    is_vouched: bool = True
    """Whether it is repeatable, or the user vouches for its other operators."""
    saved: frozenset[int] = frozenset()
    """Outputs that are saved for a backward, and that nothing else sees."""
    collectives: tuple[frozenset[tuple[str, str]], ...] = ()
    """The collectives that the partition calls, or each of the graph's partitions, as (`namespace::operator`, name of the group)."""
    name: str = ""
    """The name of the graph in logs."""
    digest: str = "0" * 64
    """The digest of the graph, without sizes."""
    written: frozenset[int] | None = None
    """Inputs that a kernel may write; None: any may be."""
    donated: frozenset[int] = frozenset()
    """Inputs of a backward that it may write and that nothing else sees."""
    overwritten: frozenset[int] = frozenset()
    """Inputs of which the graph writes every element, so that nothing else can use them while it runs."""
    nondeterministic: frozenset[int] = frozenset()
    """Outputs whose bits may differ from run to run; see `atomic_sums.py`."""
    tangents: frozenset[int] = frozenset()
    """Inputs of a backward that autograd computes: they may be conjugate or negative views at one call and not at the next."""
    switches: tuple[str, ...] = ()
    """See `CompiledFacts.switches`."""
    may_draw: bool = True
    """See `CompiledFacts.may_draw`."""
    backward: BackwardFacts = field(default_factory=BackwardFacts)

    def of_partition(self, maps: Sequence[PartitionMap], partition: int) -> GraphFacts:
        """Return the facts of a partition; without `maps`, the only partition has the inputs and outputs of the graph."""
        if not maps:
            return self
        mine = maps[partition]
        return GraphFacts(
            _where(mine.outputs, self.undefined),
            self.state.of_partition(mine.inputs, mine.outputs),
            self.is_repeatable,
            self.is_vouched,
            frozenset(at for at, each in enumerate(mine.outputs) if each and self.saved.issuperset(each)),
            self.collectives[partition : partition + 1],
            # Nothing says of a value from another partition that it may not be written.
            written=None
            if self.written is None
            else frozenset(at for at, each in enumerate(mine.inputs) if each is None or each in self.written),
            donated=_at(mine.inputs, self.donated),
            overwritten=_at(mine.inputs, self.overwritten),
            nondeterministic=_where(mine.outputs, self.nondeterministic),
            tangents=_at(mine.inputs, self.tangents),
            switches=self.switches,
            may_draw=self.may_draw,
            backward=self.backward,
        )


def facts_of(compiled: CompiledFacts, backward: BackwardFacts | None = None) -> GraphFacts | None:
    """Return the facts of a compiled graph, with those of its `backward`; None: its use of RNG state is not understood, so it can only run as KERNELS."""
    # An inference graph has no backward to pass the state to.
    state = RngState() if compiled.is_inference else rng_state_of(compiled.text)
    if state is None:
        return None
    return GraphFacts(
        undefined_outputs(compiled.text),
        state,
        compiled.is_repeatable,
        compiled.is_vouched,
        compiled.saved,
        compiled.collectives,
        written=_written(compiled),
        donated=compiled.donated_inputs or frozenset(),
        overwritten=_overwritten(compiled),
        nondeterministic=atomic_outputs(compiled.text),
        tangents=tangents(compiled.text) if compiled.is_backward else frozenset(),
        switches=compiled.switches,
        may_draw=compiled.may_draw,
        backward=backward or BackwardFacts(),
    )


def _written(compiled: CompiledFacts) -> frozenset[int] | None:
    # A custom operator may write more than its schema says, and a graph within the graph more than Inductor lists.
    if not compiled.is_repeatable or compiled.hides_writes or compiled.donated_inputs is None:
        return None
    return compiled.donated_inputs.union(compiled.mutated_inputs)


def _overwritten(compiled: CompiledFacts) -> frozenset[int]:
    # Most graphs write to no input, and their text need not be read.
    if not (compiled.is_repeatable and compiled.mutated_inputs):
        return frozenset()
    return overwritten_inputs(compiled.text).intersection(compiled.mutated_inputs)


def _where(mine: Sequence[Sequence[int]], outputs: frozenset[int]) -> frozenset[int]:
    return frozenset(index for index, each in enumerate(mine) if not outputs.isdisjoint(each))


def _at(mine: Sequence[int | None], inputs: frozenset[int]) -> frozenset[int]:
    return frozenset(index for index, each in enumerate(mine) if each in inputs)
