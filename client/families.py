"""What a forward and its backward have to know of each other, so that a step is not run in two ways. Knows nothing of torch.

PyTorch's trees take what their own forward has saved where it lies; of a launched forward it lies elsewhere each time, and they
copy it, or record anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.client import graph_text
from pygraphd.client.attention import State
from pygraphd.client.checking import Jury
from pygraphd.client.gradients import Inputs, gradients_of_parameters, inputs_of
from pygraphd.client.graph_facts import GraphFacts
from pygraphd.schema.messages import Decision, Deployment, Kind

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from pygraphd.client._torch import CompiledFacts
    from pygraphd.client.rota import Member as Part


class Families:
    """The forwards of one process, by family: a number that a forward shares with its backward."""

    def __init__(self) -> None:
        self._forwards: dict[int, dict[Hashable, Deployment | None]] = {}
        self._losses: dict[int, dict[Hashable, float | None]] = {}
        self._juries: dict[int, Jury] = {}
        self._juries_of_adopted: dict[int, Jury] = {}
        self._inputs: dict[int, Inputs | None] = {}
        self._state_in_trees: dict[int, bool] = {}

    def note_forward(self, family: int, part: Hashable, deployment: Deployment | None) -> None:
        """Note how a part of a forward runs; None: that is still to be found out, and it is launched at least at times."""
        self._forwards.setdefault(family, {})[part] = deployment

    def note_loss(self, family: int, part: Hashable, loss_us: float | None) -> None:
        """Note what a part of a forward, which was measured, loses in trees; None: that is not known."""
        self._losses.setdefault(family, {})[part] = loss_us

    def gain_left_us(self, part: Part, together: Sequence[Part]) -> float | None:
        """Return what is gained in trees by the backward of a forward, less what the forward's other parts lose there.

        `together` is what is measured with it. All parts go into trees or none, as their backward does; None: it is not measured.
        """
        backwards = [each for each in together if each.graph.kind is Kind.BACKWARD]
        if not backwards:
            return None
        others = [
            each.loss_in_trees_us()
            for each in together
            if each.graph.kind is Kind.FORWARD and each is not part
        ]
        others += self._losses_of_decided(part.family)
        if None in others:
            return 0.0
        return max(0.0, sum(each.gain_in_trees_us() for each in backwards) - sum(filter(None, others)))

    def _losses_of_decided(self, family: int) -> list[float | None]:
        """Return what the decided parts of a forward lose in trees; None of those that run otherwise."""
        losses = self._losses.get(family, {})
        return [
            losses.get(part, 0.0) if deployment is Deployment.TREES else None
            for part, deployment in self._forwards.get(family, {}).items()
            if deployment is not None
        ]

    def forward_in_trees(self, family: int) -> bool | None:
        """Return whether a family's forward runs in PyTorch's trees, all of it; None if it is not known, or not decided."""
        parts = list(self._forwards.get(family, {}).values())
        if not parts or None in parts:
            return None
        return all(deployment is Deployment.TREES for deployment in parts)

    def leaves_without_trees(self, family: int, kind: Kind, decision: Decision) -> bool:
        """Whether a decision wants a backward in trees whose forward is known, and does not run in them for good."""
        if kind is not Kind.BACKWARD or decision.deployment is not Deployment.TREES:
            return False
        return any(each is not Deployment.TREES for each in self._forwards.get(family, {}).values())

    def jury(self, family: int) -> Jury:
        """Return what brings together what is found of a family's decisions that others took."""
        return self._juries.setdefault(family, Jury())

    def jury_of_adopted(self, family: int) -> Jury:
        """Return the same for those that were adopted while it was waited for them; a verdict is one of those that were there then."""
        jury = self._juries_of_adopted.get(family)
        if jury is None or jury.verdict() is not None:
            jury = self._juries_of_adopted[family] = Jury()
        return jury

    def graph_facts(self, family: int, facts: CompiledFacts) -> GraphFacts:
        """Return what is known of a graph beforehand; a family's forward is asked about before its backward."""
        state = facts.state if facts.state is not None else State()
        if facts.is_backward:
            gradients = gradients_of_parameters(self._inputs.get(family), facts.text)
            names = graph_text.returned(facts.text)
            given = None if names is None else frozenset(i for i, name in enumerate(names) if name != "None")
            return GraphFacts(facts.undefined, gradients, state, is_backward=True, returned=given)
        if not facts.is_inference:
            self._inputs[family] = inputs_of(facts.text, facts.static_inputs)
            self._state_in_trees[family] = False
        return GraphFacts(facts.undefined, state=state)

    def note_state_in_trees(self, family: int) -> None:
        """Note that a forward whose `State` is not empty runs as PyTorch has it, which hands that over on the GPU."""
        self._state_in_trees[family] = True

    def state_in_trees(self, family: int) -> bool:
        """Return whether forward and backward must both run so; a backward must if its forward is not known."""
        return self._state_in_trees.get(family, True)
