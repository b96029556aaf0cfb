"""What a forward and its backward share, from the compilation of the one to that of the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from pygraphd.client.analysis.graph_facts import BackwardFacts
from pygraphd.client.backend import torch_private


@dataclass(slots=True, weakref_slot=True)
class Pair:
    """The state that a forward and its backward share; an inference graph has one of its own."""

    kernel_options: tuple[tuple[str, str], ...] | None = None
    """The options in force when the forward was compiled; None: it was not yet."""
    leader_graph: str | None = None
    """The digest by which ranks elect the one that leads for both."""
    backward: BackwardFacts = field(default_factory=BackwardFacts)

    def options_for(self, *, is_backward: bool) -> tuple[tuple[str, str], ...]:
        """Return the options in force for kernels; for a backward, those of its forward.

        A backward may be compiled at its first call, and its key must not differ for that.
        """
        if not is_backward or self.kernel_options is None:
            self.kernel_options = torch_private.kernel_options()
        return self.kernel_options
