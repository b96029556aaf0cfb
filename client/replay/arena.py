"""Places many tensors in one allocation: hundreds of allocations take milliseconds of host time, and leave gaps."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from pygraphd.client.backend import torch_private
from pygraphd.client.replay.relocation_table import BLOCK, blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pygraphd.client.replay.layout import Memory


def lay_apart(
    memories: Sequence[Memory], allocate: Callable[[int], torch.Tensor]
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Place a tensor for each memory in one allocation; return the allocation, the tensors, and the guard block after each.

    The tensors lie in reverse order, each at the start of a block. So a kernel that reaches one memory from the bounds of another misses
    it, as it would in a call.
    """
    sizes = [blocks(memory.bytes) * BLOCK for memory in memories]
    begins = [*itertools.accumulate((size + BLOCK for size in reversed(sizes)), initial=0)][-2::-1]
    arena = allocate(sum(sizes) + BLOCK * len(sizes))
    tensors = [
        torch_private.reinterpret(arena, each.dtype, each.size, each.stride, begin // each.dtype.itemsize)
        for each, begin in zip(memories, begins, strict=True)
    ]
    return arena, tensors, [arena[begin + size :][:BLOCK] for begin, size in zip(begins, sizes, strict=True)]


class Arena:
    """One allocation, handed out from front to back as tensors with the alignment of given addresses."""

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate `size` bytes. A tensor that is not aligned to a block needs up to one block more than its own bytes."""
        self._bytes = torch.empty(blocks(size) * BLOCK, dtype=torch.uint8, device=device)
        self._as = {torch.uint8: self._bytes}
        self._end = 0

    def take(self, size: int, like: int) -> int:
        """Reserve `size` bytes with the alignment of the address `like`; return their offset."""
        start: int = self._end + (like - self._bytes.data_ptr() - self._end) % BLOCK
        self._end = start + size
        return start

    def tensor(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor at the offset `start` with the layout of `like`, and with its conjugate and negative bits."""
        return torch_private.viewed_like(self._made(start, like.dtype, like.size(), like.stride()), like)

    def bytes(self, start: int, size: int) -> torch.Tensor:
        """Return `size` bytes from the offset `start` on."""
        return self._made(start, torch.uint8, (size,), (1,))

    def _made(self, start: int, dtype: torch.dtype, size: Iterable[int], stride: Iterable[int]) -> Any:
        if dtype not in self._as:
            self._as[dtype] = self._bytes.view(dtype)
        return torch_private.reinterpret(
            self._as[dtype], dtype, tuple(size), tuple(stride), start // dtype.itemsize
        )
