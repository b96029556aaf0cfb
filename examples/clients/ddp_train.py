"""Trains a small language model on several GPUs with DistributedDataParallel: `torchrun --nproc-per-node 2 ddp_train.py`."""

from typing import Any

import torch
from measuring import DEVICE, Clock, compiled, joined, run
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each behind a norm and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    """Predicts each next token."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(tiny: bool) -> LanguageModel:
    """Return a model with random weights, the same in each process."""
    return LanguageModel(100, 64, 4, 2, 33) if tiny else LanguageModel(8192, 768, 12, 6, 257)


def train(model: nn.Module, vocabulary: int, rank: int, steps: int, tiny: bool) -> dict[str, Any]:
    """Train for `steps` steps, on other texts in each process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    draw = torch.Generator().manual_seed(1 + rank)
    texts = torch.randint(vocabulary, (64, 33 if tiny else 257), generator=draw)
    clock = Clock(steps)
    for _ in range(steps):
        ids = texts[torch.randint(64, (4,), generator=draw)].to(DEVICE)
        clock.begin()
        with torch.autocast(DEVICE, torch.bfloat16):
            scores = model(ids[:, :-1])
        loss = functional.cross_entropy(scores.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.end(loss)
    return clock.result(tolerance=0.02)


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Train for `steps` steps."""
    rank, _ = joined()
    module = make(tiny).to(DEVICE)
    model = DistributedDataParallel(module)
    return train(compiled(model, mode), module.tokens.num_embeddings, rank, steps, tiny)


if __name__ == "__main__":
    run(main, __doc__)
