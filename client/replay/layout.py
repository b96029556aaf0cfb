"""The layout of a recording: the groups of its inputs, the memory that a call allocates, and how the outputs are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pygraphd.client.replay.outputs import Outputs
from pygraphd.client.replay.segments import InputGroup


@dataclass(frozen=True, slots=True)
class Memory:
    """An allocation that each call makes anew, for one segment; size and stride in elements of `dtype`."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The number of bytes from its first element to its last."""
        last = sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))
        itemsize: int = self.dtype.itemsize
        return (last + 1) * itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of one recording. Segments are numbered through `groups` and then through `memories`."""

    groups: tuple[InputGroup, ...]
    memories: tuple[Memory, ...]
    outputs: Outputs
    generators: tuple[tuple[int, torch.Generator], ...] = ()
    """Inputs that are generators from which the recording draws random numbers, as (index, generator)."""
    saves_together: bool = False
    """Several outputs that are saved for a backward share a storage."""
    scratch: int | None = None
    """The index in `memories` of all scratch of a graph with sizes; None: there is none, or it is in pieces."""
