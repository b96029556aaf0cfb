"""What can be said of a capture without a GPU: which allocations it made, and which of them somebody holds."""

from __future__ import annotations

import pytest
import torch

from pygraphd.client.capture import held, lifetimes
from pygraphd.client.relocation import Span

pytestmark = pytest.mark.torch


def test_allocations_are_told_from_what_is_alive_in_the_end() -> None:
    events = [
        ("segment_alloc", 0, 4096),
        ("alloc", 0, 100),
        ("alloc", 512, 8),
        ("free_requested", 0, 100),
        ("free_completed", 0, 100),
        ("alloc", 0, 300),
        ("alloc", 1024, 8),
        ("free_requested", 1024, 8),
    ]

    allocations, alive = lifetimes(events)

    assert allocations == (Span(0, 100), Span(512, 520), Span(0, 300), Span(1024, 1032))
    assert set(alive) == {Span(512, 520), Span(0, 300)}


def test_what_is_alive_and_returned_is_held_by_nobody_else() -> None:
    output, other = torch.zeros(8), torch.zeros(8)
    alive = [Span(each.data_ptr(), each.data_ptr() + 32) for each in (output, other)]

    assert held(alive, [None, output[4:], torch.empty(0)]) == (alive[1],)
