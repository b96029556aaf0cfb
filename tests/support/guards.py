"""Memory between guard zones that lies elsewhere at every call, and that stays, poisoned, for two calls more."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.recording.alias_sets import input_groups
from pygraphd.client.replay.relocation_table import BLOCK, blocks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

GUARD = 0xA5
ZONE = 8 * BLOCK
"""Bytes of a guard zone, at least."""
KEPT = 2
"""Calls for which memory stays after the call that it was made for."""


@dataclass(frozen=True, slots=True)
class Block:
    """Memory that was handed out, from byte `start` of `memory` to `end`; the rest are guard zones."""

    memory: torch.Tensor
    start: int
    end: int

    def expect_guards(self) -> None:
        assert (self.memory[: self.start] == GUARD).all(), "something was written before memory of a call"
        assert (self.memory[self.end :] == GUARD).all(), "something was written behind memory of a call"

    def poison(self) -> None:
        self.memory.fill_(0xFF)

    def expect_poison(self) -> None:
        assert (self.memory == 0xFF).all(), "memory of a call before was written to"


class Guarded:
    """Makes tensors in such memory; called as torch's allocator is."""

    def __init__(self, device: str) -> None:
        self.device = device
        self._calls = 0
        self._given: list[Block] = []

    def __call__(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        block = self.block(blocks((last + 1) * dtype.itemsize) * BLOCK)
        return torch_private.reinterpret(block.memory, dtype, size, stride, block.start // dtype.itemsize)

    def block(self, size: int, like: int = 0) -> Block:
        """Return memory that is aligned as the address `like` is."""
        zone = ZONE * (1 + self._calls % 3)
        length = zone + BLOCK + like % BLOCK + size + ZONE
        memory = torch.full((blocks(length) * BLOCK,), GUARD, dtype=torch.uint8, device=self.device)
        start = zone + -memory.data_ptr() % BLOCK + like % BLOCK
        self._given.append(Block(memory, start, start + size))
        return self._given[-1]

    def copies(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs with all tensors of the device copied; what overlaps does so again, and alignment is the same."""
        copies = list(inputs)
        for group, span in input_groups(inputs):
            first = inputs[group.members[0][0]]
            if first.device.type != self.device:
                continue
            block = self.block(span.size, span.start)
            storage = first.untyped_storage()
            block.memory[block.start : block.end] = bytes_of(
                storage, span.start - storage.data_ptr(), span.size
            )
            for index, _ in group.members:
                tensor = inputs[index]
                start = (block.start + tensor.data_ptr() - span.start) // tensor.element_size()
                size, stride = tuple(tensor.size()), tuple(tensor.stride())
                copies[index] = torch_private.reinterpret(block.memory, tensor.dtype, size, stride, start)
        return copies

    def end_call(self) -> list[Block]:
        """Assert that no guard zone was written to, poison what was handed out since the last time, and return it."""
        given, self._given = self._given, []
        self._calls += 1
        for block in given:
            block.expect_guards()
            block.poison()
        return given


class Old:
    """What the last calls of a region worked on: no address comes again at once, and what is written there shows."""

    def __init__(self) -> None:
        self._calls: deque[list[Block]] = deque()

    def add(self, given: list[Block]) -> None:
        """Take what one call worked on, and let go of what is older than `KEPT` calls."""
        self._calls.append(given)
        if len(self._calls) > KEPT:
            self._expect_poison(self._calls.popleft())

    def close(self) -> None:
        while self._calls:
            self._expect_poison(self._calls.popleft())

    def _expect_poison(self, given: Iterable[Block]) -> None:
        for block in given:
            block.expect_poison()


def bytes_of(storage: torch.UntypedStorage, start: int, size: int) -> torch.Tensor:
    """Return some bytes of a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (size,), (1,))


def poisoned(values: Iterable[Any], device: str, keep: Collection[int]) -> list[Block]:
    """Poison the storages of tensors, but for those that begin where `keep` says, and return them."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage()
        for each in values
        if isinstance(each, torch.Tensor) and each.numel() and each.device.type == device
    }
    found = [storage for begin, storage in storages.items() if begin not in keep]
    given = [Block(bytes_of(each, 0, each.nbytes()), 0, each.nbytes()) for each in found]
    for block in given:
        block.poison()
    return given


def storages(values: Iterable[Any]) -> set[int]:
    """Return where the storages of tensors begin."""
    return {each.untyped_storage().data_ptr() for each in values if isinstance(each, torch.Tensor)}
