"""Holds the state that a forward and its backward share; it is freed with their compiled graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.client.decisions.leases import LeaseGroup
from pygraphd.client.dispatch.shapes import StepShapes

if TYPE_CHECKING:
    from pygraphd.client.dispatch.shapes import Sizes


class Pair:
    """A forward and its backward, or an inference graph alone. Its compiled graphs hold it; the process refers to it weakly."""

    __slots__ = ("__weakref__", "_groups", "kernel_options", "leader_graph", "shapes")

    def __init__(self) -> None:
        self.shapes = StepShapes()
        self.kernel_options: tuple[tuple[str, str], ...] | None = None
        """The options in force when the forward was compiled. A backward may be compiled much later, and its key must not differ."""
        self.leader_graph: str | None = None
        """The digest by which ranks elect the one that leads for both."""
        self._groups: dict[Sizes, LeaseGroup] = {}

    def lease_group(self) -> LeaseGroup:
        """Return the lease group of forward and backward at the latest sizes of a step."""
        return self._groups.setdefault(self.shapes.latest, LeaseGroup())
