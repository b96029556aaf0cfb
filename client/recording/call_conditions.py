"""The conditions under which a call may be replayed or recorded, beside its size and the layout of its inputs.

Where a condition does not hold, the kernels of the call would be other ones than the recorded ones, read their inputs otherwise, or be
seen by the program. Then the call runs as KERNELS.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.recording.alias_sets import is_flagged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.analysis.graph_facts import GraphFacts
    from pygraphd.client.backend.torch_private import Condition

SWITCHED = "a setting of cuDNN or cuBLAS is not the one that it was compiled with"
OBSERVED = "a dispatch mode of the program sees each operator"
FLAGGED = "a gradient is a conjugate or negative view"


class CallConditions:
    """The conditions for the calls of one callable, with the settings of libraries as they are now."""

    def __init__(self, facts: GraphFacts) -> None:
        self._switches = torch_private.switches(facts.switches)
        self.tangents = tuple(facts.tangents)
        """The inputs that may not be conjugate or negative views, by index; the compiled helper checks them, too."""
        self.for_helper: tuple[Condition, ...] = (*self._switches, torch_private.no_dispatch_modes())
        """The conditions for the compiled helper that no input is needed for."""
        # Not in `why_not`: hooks are a layout mismatch, after which the size is recorded for calls with and without.
        if facts.saved:
            self.for_helper = (*self.for_helper, torch_private.no_hooks_see_saved())

    def why_not(self, inputs: Sequence[Any]) -> str | None:
        """Return why a call can neither be replayed nor recorded; None if it can."""
        if not torch_private.are_set(self._switches):
            return SWITCHED
        # Selective checkpointing counts operators by such a mode: it would see none of a replay, and too many of a capture.
        if torch_private.has_dispatch_modes():
            return OBSERVED
        # Autograd may set such a bit on a gradient at one call and not at the next.
        return FLAGGED if any(is_flagged(inputs[index]) for index in self.tangents) else None


def why_not_bind(
    inputs: Sequence[Any], device: torch.device, facts: GraphFacts, *, is_in_lockstep: bool
) -> str | None:
    """Return why inputs or collectives cannot be bound to a recording on `device`, at whatever call; None if they can."""
    if not is_in_lockstep and any(facts.collectives):
        return f"it holds a collective ({min(frozenset().union(*facts.collectives))[0]})"
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Generator):
            if value.device != device:
                return f"input {index} is a Generator of another device"
            if not facts.is_repeatable:
                # The operator may not be capturable, and up to torch 2.12 a failed capture leaves a generator as if it were captured still.
                return f"input {index} is a Generator, and it holds a custom operator"
        elif value is not None and not isinstance(value, torch.Tensor | int):
            return f"input {index} is a {type(value).__name__}"
    return None
