"""Serves requests in batches as vLLM does: they come and go at every step, and share the pages of one cache. Sampling is on the GPU.

Batches are padded to a few sizes, each of which comes back.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpt_decode import DTYPE, LARGE, TINY, TOP_K, FeedForward, Sizes, rotate, sample
from measuring import DEVICE, Clock, agreement, compiled, run
from torch import nn
from torch.nn import functional

PAGE = 16
"""Tokens in a page of the cache."""
MOST = 64
"""Requests in a batch."""
PADDED = (8, 16, 32, MOST)
"""The sizes to which batches are padded, by rows whose tokens nobody reads."""
STAYS = 8
"""Steps until another number of requests is wanted."""
CHECKED = 4
"""Texts that are compared with eager: those that ended last."""


class PagedAttention(nn.Module):
    """Grouped-query attention over the pages that a table gives each request; it writes the cache in place."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.parts = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        self.wqkv = nn.Linear(sizes.width, sum(self.parts) * sizes.head, bias=False)
        self.wo = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(
        self,
        x: torch.Tensor,
        angles: torch.Tensor,
        mask: torch.Tensor,
        places: tuple[torch.Tensor, torch.Tensor],
        table: torch.Tensor,
        cache: torch.Tensor,
    ) -> torch.Tensor:
        heads = self.wqkv(x).unflatten(-1, (sum(self.parts), -1))
        query, key, value = heads.split(self.parts, dim=2)
        cache[0].index_put_(places, rotate(key, angles))
        cache[1].index_put_(places, value)
        keys, values = (each[table].flatten(1, 2).transpose(1, 2) for each in cache)
        mixed = functional.scaled_dot_product_attention(
            rotate(query, angles).transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
        )
        return self.wo(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and a residual connection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.feed_forward = PagedAttention(sizes), FeedForward(sizes)
        self.attention_norm, self.norm = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)

    def forward(self, x: torch.Tensor, *context: Any) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), *context)
        return x + self.feed_forward(self.norm(x))


class Server(nn.Module):
    """A decoder-only transformer and its cache: `requests` times the pages of the longest text, in one tensor."""

    def __init__(self, sizes: Sizes, requests: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width).to(DTYPE)
        self.blocks = nn.ModuleList(Block(sizes).to(DTYPE) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width).to(DTYPE)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False).to(DTYPE)
        pages = requests * sizes.length // PAGE
        shape = sizes.layers, 2, pages, PAGE, sizes.kv_heads, sizes.head
        self.register_buffer("cache", torch.zeros(shape, dtype=DTYPE))
        speeds = 1e4 ** -(torch.arange(0, sizes.head, 2) / sizes.head)
        self.register_buffer("angles", torch.outer(torch.arange(sizes.length), speeds))

    def forward(self, tokens: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Return logits for tokens of shape (requests, length) at positions `at` of their texts, whose pages are in `table`."""
        x = self.embedding(tokens)
        places = table.gather(1, at // PAGE), at % PAGE
        seen = torch.arange(table.shape[1] * PAGE, device=at.device)
        mask = (seen <= at[..., None])[:, None]
        for number, block in enumerate(self.blocks):
            x = block(x, self.angles[at][:, :, None], mask, places, table, self.cache[number])
        return self.head(self.norm(x))


def next_tokens(model: Server, tokens: torch.Tensor, at: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return sample(model(tokens, at, table))


@dataclass
class Request:
    """A text of `length` tokens, the first of which is given; `place` says which pages it has, and `at` how far it is."""

    number: int
    place: int
    length: int
    at: int = 0


class Arrivals:
    """The same requests in every run: every few steps another number of them is wanted, of 1 to 64."""

    def __init__(self, longest: int) -> None:
        self._random = random.Random(0)
        self._longest = longest
        self._free = list(range(MOST))
        self._wanted = 0
        self.active: list[Request] = []
        self.ended: list[Request] = []
        self.count = 0

    def step(self, number: int) -> None:
        """Let requests go that have ended, and others in."""
        for each in [each for each in self.active if each.at == each.length - 1]:
            self.active.remove(each)
            self.ended.append(each)
            self._free.append(each.place)
        if number % STAYS == 0:
            self._wanted = self._random.randint(1, MOST)
        while len(self.active) < self._wanted:
            length = self._random.randint(4, self._longest)
            self.active.append(Request(self.count, self._free.pop(), length))
            self.count += 1


@torch.no_grad()
def serve(
    model: Server, mode: str, steps: int, sizes: Sizes, rows_of_batches: Sequence[int]
) -> dict[str, Any]:
    """Take `steps` steps, each with the least of the rows that hold its requests.

    The last texts are held against what the model says of them without `torch.compile`.
    """
    step = compiled(next_tokens, mode, fullgraph=True, dynamic=True)
    pages = torch.arange((MOST + 1) * sizes.length // PAGE, device=DEVICE).view(MOST + 1, -1)
    texts = torch.randint(sizes.vocabulary, (steps * MOST, sizes.length), device=DEVICE)
    arrivals, clock = Arrivals(sizes.length // 8), Clock(steps)
    for number in range(steps):
        arrivals.step(number)
        active = arrivals.active
        used = len(active)
        rows = [(each.number, each.at, each.place) for each in active]
        padded = next(size for size in rows_of_batches if size >= used)
        rows += [(0, 0, MOST)] * (padded - used)
        texts_of, at, places = torch.tensor(rows).to(DEVICE).unbind(1)
        clock.begin()
        tokens = step(model, texts[texts_of, at][:, None], at[:, None], pages[places])
        texts[texts_of[:used], at[:used] + 1] = tokens[:used, 0]
        clock.end()
        for each in active:
            each.at += 1
    if len(arrivals.ended) < CHECKED:
        raise SystemExit(f"only {len(arrivals.ended)} texts ended, too few to compare: take more --steps")
    agreements = []
    for each in arrivals.ended[-CHECKED:]:
        text = texts[each.number, : each.length][None]
        at = torch.arange(each.length - 1, device=DEVICE)[None]
        logits = model(text[:, :-1], at, pages[-1:])
        agreements.append(agreement(logits, text[:, 1:], rank=TOP_K))
    return clock.result(tolerance=0.02, agreements=agreements)


def server(sizes: Sizes) -> Server:
    """Return a server with random weights, with pages for one request more than a batch has: that of the padding."""
    with torch.device(DEVICE):
        model = Server(sizes, MOST + 1)
    for weight in model.parameters():
        if weight.dim() == 2:
            nn.init.normal_(weight, std=0.02)
    return model.eval()


def main(mode: str, steps: int, tiny: bool) -> dict[str, Any]:
    """Serve for `steps` steps."""
    sizes = TINY if tiny else LARGE
    return serve(server(sizes), mode, steps, sizes, PADDED)


if __name__ == "__main__":
    run(main, __doc__)
