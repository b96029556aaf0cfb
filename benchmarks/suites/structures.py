"""Structures of tensors, as models take and return them: tuples, lists, mappings and objects with fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

NOISE = 0.01
"""Mean relative distance of drawn numbers from those of a model's example. Signs, zeros and infinities stay."""


def tensors_of(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a structure with the path to each."""
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    for key, item in _items(value):
        yield from tensors_of(item, f"{name}.{key}".lstrip("."))


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    # The items of a string are strings again, without end.
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def with_tensors(value: Any, made: Callable[[str, torch.Tensor], Any], name: str = "") -> Any:
    """Return a structure of tuples, lists and dictionaries with each tensor replaced; other values are kept."""
    if isinstance(value, torch.Tensor):
        return made(name, value)

    def inner(key: Any, item: Any) -> Any:
        return with_tensors(item, made, f"{name}.{key}".lstrip("."))

    if isinstance(value, Mapping):
        replaced = {key: inner(key, item) for key, item in value.items()}
        kind: Any = type(value)
        return kind(replaced)
    # A named tuple takes its items as arguments, and not as one list.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(inner(index, item) for index, item in enumerate(value)))
    if isinstance(value, tuple | list):
        return type(value)(inner(index, item) for index, item in enumerate(value))
    return value


def redrawn(example: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a new tensor: a floating one with other numbers near the example's, any other with the same.

    Indices and lengths stay, as only their author knows which others are possible.
    """
    # A generator of torch's draws on its own device only.
    if not example.is_floating_point() or example.device != generator.device:
        return example.detach().clone()
    noise = torch.randn(example.shape, device=example.device, generator=generator).clamp_(-4, 4)
    new = example.detach() * (1 + NOISE * noise).to(example.dtype)
    return new.requires_grad_(example.requires_grad)


def scalar_loss(output: Any) -> torch.Tensor:
    """Return the mean over all numbers of each tensor, and over the tensors of each level of a structure."""
    if isinstance(output, torch.Tensor):
        # Not by `mean`, which torch refuses for whole numbers.
        return output.sum() / output.numel()
    logits = getattr(output, "logits", None)
    if isinstance(logits, torch.Tensor):
        return scalar_loss(logits)
    losses = [scalar_loss(item) for _, item in _items(output) if item is not None]
    if not losses:
        raise TypeError(f"no loss can be made of {type(output).__name__}")
    return torch.stack([loss.float() for loss in losses]).mean()
