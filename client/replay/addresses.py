"""Returns the address ranges of tensors and of their storages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pygraphd.client.replay.relocation_table import Span

if TYPE_CHECKING:
    import torch


def extent(tensor: torch.Tensor) -> Span:
    """Return the addresses from a tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return Span(start, start + (last + 1) * tensor.element_size())


def storage_of(tensor: torch.Tensor) -> Span:
    """Return the addresses of a tensor's storage."""
    storage = tensor.untyped_storage()
    return Span(storage.data_ptr(), storage.data_ptr() + storage.nbytes())
