"""Transformer layers that several workloads share. Masks and positions come from outside, from wherever they were made."""

from __future__ import annotations

import torch
from torch.nn import functional


class Attention(torch.nn.Module):
    """Attention with several heads. A mask is true where a position may be seen, or is added to the scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = torch.nn.Linear(width, width)
        self.key = torch.nn.Linear(width, width)
        self.value = torch.nn.Linear(width, width)
        self.output = torch.nn.Linear(width, width)

    def forward(self, values: torch.Tensor, context: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return what each of `values` makes of `context`."""
        query, key, value = self.query(values), self.key(context), self.value(context)
        return self.attend(self.split(query), self.split(key), self.split(value), mask)

    # Apart from `forward`, as is `attend`, for layers that keep keys and values from call to call.
    def split(self, values: torch.Tensor) -> torch.Tensor:
        """Return (batch, head, position, number) for (batch, position, all numbers)."""
        return values.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output for what `split` has split."""
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(torch.nn.Sequential):
    """Two linear layers, four times as wide in between."""

    def __init__(self, width: int) -> None:
        super().__init__(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )


class Layer(torch.nn.Module):
    """A layer that normalizes before each of its parts; `cross`: it looks at a context, too."""

    def __init__(self, width: int, heads: int, *, cross: bool = False) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.cross = Attention(width, heads) if cross else None
        self.feed_forward = FeedForward(width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(3 if cross else 2))

    def forward(
        self,
        values: torch.Tensor,
        mask: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        context_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the values after this layer."""
        normal = self.norms[0](values)
        values = values + self.attention(normal, normal, mask)
        if self.cross is not None:
            values = values + self.cross(self.norms[1](values), context, context_mask)
        return values + self.feed_forward(self.norms[-1](values))


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return sines and cosines of positions, made where the positions are."""
    frequencies = 1 / 10_000 ** (torch.arange(0, width, 2.0, device=positions.device) / width)
    angles = torch.outer(positions, frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
