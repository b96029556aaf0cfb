"""Makes recordings as a capture would, of graphs for the emulated driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.recording.builder import Built, build
from pygraphd.client.recording.capture import Capture
from pygraphd.client.recording.false_pointers import CapturedCall

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pygraphd.client.replay.replay import Replay
    from pygraphd.client.replay.rng import RngCursor
    from tests.support.emulator import Allocator, Arena, Emulator, Graph


class Recorder:
    """Makes graphs as a capture would."""

    def __init__(self, emulator: Emulator, allocator: Allocator, arena: Arena | None = None) -> None:
        self.emulator = emulator
        self.allocator = allocator
        self.arena = arena or emulator.arena()
        self.graph: Graph = emulator.graph()
        self.notes: list[str] = []

    def floats(self, *values: float) -> torch.Tensor:
        """Return a tensor on the device."""
        return self.allocator.tensor(torch.tensor(values, dtype=torch.float32))

    def built(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
        cursor: RngCursor | None = None,
    ) -> Built:
        capture = Capture(self.graph.handle, list(outputs), tuple(self.arena.allocations), cursor=cursor)
        built = build(self.emulator.driver, CapturedCall(capture, inputs), self.notes.append)
        self.arena.let_go()
        return built

    def doubling(self, inputs: Sequence[torch.Tensor], reads: Sequence[torch.Tensor] | None = None) -> Replay:
        """Record a graph that doubles each of its inputs, or those that are named: a node and an output for each."""
        outputs = []
        for each in inputs if reads is None else reads:
            outputs.append(self.arena.allocate(each.numel()))
            self.graph.scale(each, outputs[-1], 2.0)
        return self.built(inputs, outputs).replay
