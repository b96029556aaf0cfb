"""What a backward is told of its forward: which of its outputs are gradients of parameters. Knows nothing of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.client.attention import State
from pygraphd.client.gradients import Inputs, gradients_of_parameters, inputs_of
from pygraphd.client.graph_facts import GraphFacts

if TYPE_CHECKING:
    from pygraphd.client._torch import CompiledFacts


class Families:
    """The forwards of one process, by family: a number that a forward shares with its backward."""

    def __init__(self) -> None:
        self._inputs: dict[int, Inputs | None] = {}

    def graph_facts(self, family: int, facts: CompiledFacts) -> GraphFacts:
        """Return what is known of a graph beforehand; a family's forward is asked about before its backward."""
        state = facts.state if facts.state is not None else State()
        if facts.is_backward:
            gradients = gradients_of_parameters(self._inputs.get(family), facts.text)
            return GraphFacts(facts.undefined, gradients, state, is_backward=True)
        if not facts.is_inference:
            self._inputs[family] = inputs_of(facts.text, facts.static_inputs)
        return GraphFacts(facts.undefined, state=state)
