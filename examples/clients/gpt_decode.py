"""Decodes with a small Llama as gpt-fast does: plain PyTorch, a static cache, prefill and one token compiled apart, top-k sampling inside."""

from dataclasses import dataclass
from typing import Any

import torch
from measuring import DEVICE, Clock, agreement, compiled, run
from torch import nn
from torch.nn import functional

TOP_K = 20
TEMPERATURE = 0.8
DTYPE = torch.bfloat16
"""Of weights and caches; angles of positions stay in float32."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model; `length` is that of the cache."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    length: int

    @property
    def head(self) -> int:
        return self.width // self.heads


LARGE = Sizes(layers=12, width=2048, heads=32, kv_heads=4, hidden=5632, vocabulary=32000, length=512)
TINY = Sizes(layers=2, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=100, length=256)


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turn heads by rotary positions."""
    first, second = heads.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(heads.dtype)


class Attention(nn.Module):
    """Grouped-query attention over a cache that it writes in place."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = sizes.heads, sizes.kv_heads, sizes.head
        self.wqkv = nn.Linear(sizes.width, (sizes.heads + 2 * sizes.kv_heads) * sizes.head, bias=False)
        self.wo = nn.Linear(sizes.width, sizes.width, bias=False)
        cache = torch.zeros(1, sizes.kv_heads, sizes.length, sizes.head)
        self.register_buffer("keys", cache)
        self.register_buffer("values", cache.clone())

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        length = x.shape[1]
        heads = self.wqkv(x).view(1, length, -1, self.head).transpose(1, 2)
        query, key, value = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        self.keys[:, :, at] = rotate(key, angles)
        self.values[:, :, at] = value
        mixed = functional.scaled_dot_product_attention(
            rotate(query, angles), self.keys, self.values, attn_mask=mask, enable_gqa=True
        )
        return self.wo(mixed.transpose(1, 2).reshape(1, length, -1))


class FeedForward(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.up = nn.Linear(sizes.width, sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and a residual connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention = Attention(sizes)
        self.feed_forward = FeedForward(sizes)
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.norm = nn.RMSNorm(sizes.width)

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor, at: torch.Tensor
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), angles, mask, at)
        return x + self.feed_forward(self.norm(x))


class Llama(nn.Module):
    """A decoder-only transformer."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width).to(DTYPE)
        self.blocks = nn.ModuleList(Block(sizes).to(DTYPE) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width).to(DTYPE)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False).to(DTYPE)
        self.register_buffer("seen", torch.ones(sizes.length, sizes.length, dtype=torch.bool).tril())
        speeds = 1e4 ** -(torch.arange(0, sizes.head, 2) / sizes.head)
        self.register_buffer("angles", torch.outer(torch.arange(sizes.length), speeds))

    def forward(self, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        mask, angles = self.seen[at][None, None], self.angles[at]
        for block in self.blocks:
            x = block(x, angles, mask, at)
        return self.head(self.norm(x))


def sample(logits: torch.Tensor) -> torch.Tensor:
    """Draw a token from the most likely ones, without waiting for the GPU."""
    logits = logits[:, -1].float() / TEMPERATURE
    least = logits.topk(TOP_K, -1).values[:, -1:]
    chances = torch.where(logits < least, -torch.inf, logits).softmax(-1)
    return (chances / torch.empty_like(chances).exponential_(1)).argmax(-1, keepdim=True)


def next_token(model: Llama, tokens: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return sample(model(tokens, at))


def make(sizes: Sizes) -> Llama:
    """Return a model with random weights."""
    with torch.device(DEVICE):
        model = Llama(sizes)
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
    return model.eval()


@torch.no_grad()
def generate(model: Llama, mode: str, steps: int, sizes: Sizes) -> dict[str, Any]:
    """Generate `steps` tokens after a prompt, in several texts if the cache is too short for all."""
    prefill = compiled(next_token, "none" if mode == "none" else "default", fullgraph=True, dynamic=True)
    decode = compiled(next_token, mode, fullgraph=True)
    clock = Clock(steps)
    agreements = []
    left = steps
    while left:
        prompt = torch.randint(sizes.vocabulary, (1, 32), device=DEVICE)
        new = min(left, sizes.length - prompt.shape[1] - 1)
        token = prefill(model, prompt, torch.arange(prompt.shape[1], device=DEVICE)).clone()
        at = torch.tensor([prompt.shape[1]], device=DEVICE)
        text = [prompt, token]
        for _ in range(new):
            clock.begin()
            token = decode(model, token, at).clone()
            at += 1
            clock.end()
            text.append(token)
        tokens = torch.cat(text, 1)
        logits = model(tokens[:, :-1], torch.arange(tokens.shape[1] - 1, device=DEVICE))
        chosen = slice(prompt.shape[1] - 1, None)
        agreements.append(agreement(logits[:, chosen], tokens[:, 1:][:, chosen], rank=TOP_K))
        left -= new
    return clock.result(tolerance=0.02, agreements=agreements)


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Generate `steps` tokens."""
    sizes = TINY if tiny else LARGE
    return generate(make(sizes), mode, steps, sizes)


if __name__ == "__main__":
    run(main, __doc__)
