"""A number with half of an address beside it, where a recording's memory begins at 4 GiB: it is no address, and is left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from pygraphd.client.recording import stand_ins
from pygraphd.client.recording.false_pointers import UNDECIDABLE

if TYPE_CHECKING:
    from tests.support.relocated import Relocated

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

HALF = 1 << 32
CALLS = 12


class Edge:
    """Memory of the device in which addresses with a lower half of zero are, for what stands in for inputs to begin there."""

    def __init__(self, captures: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = captures
        """How many captures, the first one and then those after it, are still to have theirs there."""
        self._memory = torch.empty(captures * HALF + (1 << 20), dtype=torch.uint8, device="cuda")
        self._usual = stand_ins._allocated
        monkeypatch.setattr(stand_ins, "_allocated", self._allocated)

    def _allocated(self, index: int, member: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, int]:
        room, base = self._usual(index, member, *rest)
        return (room, base) if not self.left else (self._next(room.numel()), 0)

    def _next(self, size: int) -> torch.Tensor:
        self.left -= 1
        begin = -self._memory.data_ptr() % HALF + self.left * HALF
        return self._memory[begin : begin + size]


def run(edge: Edge) -> None:
    from tests.support.users_operators import leading

    compiled = torch.compile(lambda x: leading(x, 16) * 2, mode="reduce-overhead", dynamic=False)
    for _ in range(CALLS):
        x = torch.randn(1000, device="cuda")
        assert torch.equal(compiled(x), x[:16] * 2)
    assert edge.left == 0


def test_a_number_beside_half_an_address_is_left_alone(
    relocated: Relocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(Edge(1, monkeypatch))

    relocated.expect_all_captured()


def test_where_two_captures_cannot_tell_others_are_made(
    relocated: Relocated, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(Edge(2, monkeypatch))

    assert relocated.report.counts["captured"] == 1
    assert relocated.report.fallbacks[UNDECIDABLE] == 1
