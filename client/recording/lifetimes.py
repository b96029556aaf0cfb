"""Reads from the allocator's history what was allocated during a capture, and what of it lives on."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.replay.relocation_table import BLOCK, Span, blocks, find, merge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def lifetimes(
    events: Iterable[tuple[str, int, int]], skipped: int = 0
) -> tuple[tuple[Span, ...], tuple[Span, ...], int]:
    """Return all allocations in a history of (action, address, bytes), and those alive in the end; without the first `skipped` ones.

    The last value is the most bytes at a time of the others.
    """
    allocations: list[Span] = []
    alive: dict[int, tuple[int, Span]] = {}
    changes: list[int] = []
    for action, address, size in events:
        if action == "alloc":
            if skipped:
                skipped -= 1
                continue
            span = Span(address, address + size)
            allocations.append(span)
            alive[address] = len(changes), span
            changes.append(0)
        elif action in {"free_requested", "free_completed"} and address in alive:
            began, span = alive.pop(address)
            changes[began] = blocks(span.size) * BLOCK
            changes.append(-blocks(span.size) * BLOCK)
    return (
        tuple(allocations),
        tuple(span for _, span in alive.values()),
        max(itertools.accumulate(changes), default=0),
    )


def held(alive: Iterable[Span], outputs: Sequence[Any]) -> tuple[Span, ...]:
    """Return those of the allocations alive in which no output lies."""
    spans = merge(alive)
    returned = {
        find(spans, value.data_ptr())
        for value in outputs
        if isinstance(value, torch.Tensor) and value.numel()
    }
    return tuple(span for index, span in enumerate(spans) if index not in returned)
